"""How the policy is trained."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from rondo.config.section import Positive, Section


class LoRAConfig(Section):
    rank: int = Field(default=0, ge=0, description="Of the adapters; 0: the whole model is trained.")
    alpha: float = Field(default=32.0, gt=0, description="The adapters' product counts alpha / rank times.")
    targets: tuple[str, ...] = Field(
        default=(), description="Last names of the linear layers to adapt; empty: all of the decoder's blocks."
    )


class TrainerConfig(Section):
    ranks: Positive = Field(default=1, description="Trainer processes (the environment's WORLD_SIZE under torchrun).")
    shard: int = Field(
        default=0, ge=0, description="Ranks that hold one copy of the model among them; 0: all. Copies are kept equal."
    )
    learning_rate: float = Field(default=1e-6, gt=0, description="AdamW's, after warm-up.")
    warmup_periods: int = Field(default=0, ge=0, description="Linear warm-up of the learning rate.")
    decay: Literal["constant", "linear", "cosine"] = Field(default="constant", description="What follows the warm-up.")
    weight_decay: float = Field(default=0.0, ge=0, description="AdamW's, on matrices only.")
    betas: tuple[float, float] = Field(default=(0.9, 0.999), description="AdamW's.")
    max_grad_norm: float = Field(default=1.0, gt=0, description="The whole gradient is scaled down to this norm.")
    micro_tokens: Positive = Field(default=16384, description="Token budget of one forward/backward.")
    dtype: Literal["float32", "bfloat16"] = Field(
        default="float32",
        description="Of forward and backward; master weights, gradient sums and the optimizer stay float32.",
    )
    lora: LoRAConfig = LoRAConfig()
    compile: bool = Field(
        default=False, description="Fuse the decoder's layers with torch.compile; rows are padded to few sizes."
    )
    offload: bool = Field(
        default=False, description="Old policy and reference live on the host and visit the device layer by layer."
    )
    reduce: Literal["micro-step", "step"] = Field(
        default="micro-step",
        description="When ranks sum their gradients: in every backward pass, where only shards are kept, or once per "
        "step, for less traffic and a whole float32 gradient on every rank.",
    )
    checkpointing: bool = Field(default=False, description="Save memory: compute activations again in the backward.")
    attention: Literal["auto", "shared-prompt", "separate"] = Field(
        default="auto", description="Compute a group's prompt once, or one row per response."
    )
    accumulation: Literal["fast", "exact"] = Field(
        default="fast",
        description="How gradients are summed: as floats, or as integers, with the same bits for any order of arrival "
        "and any number of ranks (a proof mode: 8 bytes more per parameter, nothing sharded, 1 thread per rank).",
    )
    checkpoint_every: int = Field(default=0, ge=0, description="Periods between checkpoints; 0: only at the end.")
    keep_checkpoints: int = Field(default=2, ge=0, description="The newest ones are kept; 0: none is written.")
    threads: int = Field(
        default=0, ge=0, description="CPU threads per rank; 0: an equal share of the cores this process may use."
    )
    cpus: tuple[int, ...] = Field(
        default=(), description="Pin the trainer to these cores, shared out among its ranks; empty: do not pin."
    )
    device: str = Field(default="auto", description="auto: the accelerator if there is one, else the CPU.")
    memory_share: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="Share of the device's memory that a rank may use, where it shares the device with an engine (then "
        "set engines.memory_share too); 0: no limit.",
    )

    @model_validator(mode="after")
    def _whole_copies(self) -> TrainerConfig:
        if self.shard and self.ranks > 1 and self.ranks % self.shard:
            raise ValueError(
                f"trainer.shard = {self.shard} does not divide trainer.ranks = {self.ranks} into whole copies"
            )
        if self.shard and self.accumulation == "exact":
            raise ValueError(
                f'trainer.shard = {self.shard} with trainer.accumulation = "exact": there every rank holds the whole '
                "model; set trainer.shard to 0"
            )
        if self.offload and self.lora.rank:
            raise ValueError(
                f"trainer.offload = true with trainer.lora.rank = {self.lora.rank}: there old policy and reference "
                "are the policy's own weights, and nothing is left to move; unset one"
            )
        return self
