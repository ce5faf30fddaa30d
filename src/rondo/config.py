"""The whole config tree: one TOML file, every key documented here.

Sections are frozen; unknown keys are refused with the nearest known one; a combination that cannot work fails
here, naming both keys. Paths are relative to the working directory; `rondo:NAME` is a folder or file that
ships with the package.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from rondo.config_mistakes import first_mistake
from rondo.errors import ConfigError

ASSETS = Path(__file__).parent / "assets"

Positive = Annotated[int, Field(gt=0)]


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class RunConfig(Section):
    name: str = Field(default="run", pattern=r"^[A-Za-z0-9._-]+$", description="Names the run and its folder.")
    seed: int = Field(default=0, ge=0, description="Every sample, order and shuffle of the run follows from it.")
    folder: str = Field(default="", description="Where the run is written; empty: runs/NAME.")

    @property
    def path(self) -> Path:
        return Path(self.folder) if self.folder else Path("runs") / self.name


class ModelConfig(Section):
    path: str = Field(description="A folder in Hugging Face format, a hub name, or rondo:NAME.")
    dtype: Literal["float32", "bfloat16", "float16"] = Field(
        default="float32", description="Of the published weights and the engines; the trainer keeps float32."
    )


class DataConfig(Section):
    train: str = Field(description="JSONL or Parquet file with one prompt per row.")
    eval: str = Field(default="", description="Held-out rows of the same shape; empty: no evaluation.")
    prompt: str = Field(default="prompt", description="Column that holds the prompt: a string or chat messages.")
    shuffle: bool = Field(default=True, description="Draw a new seeded order for every pass over the data.")


class RolloutConfig(Section):
    prompts_per_period: Positive = Field(default=32, description="Groups per period.")
    group_size: Positive = Field(default=8, description="Responses per prompt (G).")
    max_new_tokens: Positive = Field(default=256, description="A response is cut there, marked and counted.")
    temperature: float = Field(default=1.0, gt=0, description="The policy is softmax(logits / temperature) everywhere.")
    top_p: float = Field(default=1.0, gt=0, le=1, description="Below 1 the samples are off-policy.")
    off_policy_sampling: bool = Field(default=False, description="Allow top_p below 1 all the same.")
    stop_token_ids: tuple[int, ...] = Field(default=(), description="Empty: the model's end-of-sequence ids.")

    @model_validator(mode="after")
    def _one_distribution(self) -> RolloutConfig:
        if self.top_p < 1 and not self.off_policy_sampling:
            raise ValueError(
                f"rollout.top_p = {self.top_p} samples from another distribution than the trained one: "
                "set it to 1, or set rollout.off_policy_sampling = true to accept that"
            )
        return self


class ScheduleConfig(Section):
    mode: Literal["periodic", "synchronous"] = Field(
        default="periodic", description="Train while generating, or when all is generated."
    )
    order: Literal["arrival", "prompt"] = Field(
        default="arrival",
        description="Train groups as they finish, or in prompt order (then bit for bit reproducible).",
    )
    periods: Positive = Field(default=100, description="How many periods to train.")
    updates_per_period: Positive = Field(default=1, description="Optimizer steps per period; prompts split in order.")


class KLConfig(Section):
    coefficient: float = Field(default=0.0, ge=0, description="Weight of the KL; 0: no reference model is loaded.")
    estimator: Literal["k1", "k2", "k3"] = Field(
        default="k3", description="k1: log-ratio, k2: half its square, k3: r-1-log r."
    )
    place: Literal["loss", "reward"] = Field(
        default="loss", description="A term of the loss per token, or taken from each response's reward as its sum."
    )


# What a paper sets otherwise than the defaults below, which are GRPO's; what the user sets goes before either.
PAPERS: dict[str, dict[str, Any]] = {
    "dr-grpo": {"scale_advantages": False, "normalise": "constant"},
    "dapo": {"clip_high": 0.28, "normalise": "tokens", "overlong_buffer": 0.2, "filter": "nonzero-spread"},
    "gspo": {"clip_low": 3e-4, "clip_high": 4e-4},
    "rloo": {"scale_advantages": False, "kl": {"place": "reward", "estimator": "k1"}},
    "reinforce++": {"kl": {"estimator": "k2"}},
    "cispo": {"clip_low": 1.0, "clip_high": 4.0, "normalise": "tokens"},
}


class AlgorithmConfig(Section):
    name: Literal["grpo", "dr-grpo", "dapo", "gspo", "rloo", "reinforce++", "cispo"] = Field(
        default="grpo", description="The objective; it brings its paper's defaults for the keys below."
    )
    clip: float | None = Field(default=None, gt=0, description="Sets clip_low and clip_high at once.")
    clip_low: float = Field(default=0.2, gt=0, description="The ratio is clipped to 1 - clip_low ..")
    clip_high: float = Field(default=0.2, gt=0, description=".. 1 + clip_high.")
    scale_advantages: bool = Field(
        default=True, description="Divide advantages by their rewards' deviation (of the group; reinforce++: period)."
    )
    normalise: Literal["sequences", "tokens", "constant"] = Field(
        default="sequences",
        description="What the summed loss is divided by: each response's own length and then the number of "
        "responses, the number of tokens, or responses x max_new_tokens.",
    )
    overlong_buffer: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="The last share of max_new_tokens, in which a reward loses up to 1; 0: length costs nothing.",
    )
    entropy_coefficient: float = Field(default=0.0, ge=0, description="Weight of the policy's entropy, as a bonus.")
    correction_cap: float = Field(
        default=0.0, ge=0, description="Weigh tokens by trainer / engine probability, at most this; 0: do not."
    )
    filter: Literal["none", "nonzero-spread"] = Field(
        default="none", description="nonzero-spread: train the period's first groups whose rewards are not all equal."
    )
    oversample: float = Field(
        default=1.5, ge=1, description="With a filter: ask for so many times prompts_per_period groups at first."
    )
    max_candidates: int = Field(
        default=0, ge=0, description="With a filter: groups to try per period; 0: ten times prompts_per_period."
    )
    kl: KLConfig = KLConfig()

    @model_validator(mode="before")
    @classmethod
    def _as_in_the_paper(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        paper = dict(PAPERS.get(str(given.get("name")), {}))
        if given.get("clip") is not None:
            paper |= {"clip_low": given["clip"], "clip_high": given["clip"]}
        if isinstance(given.get("kl"), dict):
            given = {**given, "kl": {**paper.get("kl", {}), **given["kl"]}}
        return {**paper, **given}

    @model_validator(mode="after")
    def _estimable(self) -> AlgorithmConfig:
        if self.name == "rloo" and self.scale_advantages:
            raise ValueError(
                'algorithm.name = "rloo" leaves rewards unscaled: unset algorithm.scale_advantages, '
                'or set algorithm.name = "grpo"'
            )
        if self.name == "reinforce++" and self.kl.coefficient and self.kl.place == "reward":
            raise ValueError(
                'algorithm.kl.place = "reward" cannot be exact with algorithm.name = "reinforce++", whose whitening '
                'needs the penalties of the whole period first: set algorithm.kl.place = "loss"'
            )
        return self


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
    keep_checkpoints: Positive = Field(default=2, description="The newest ones are kept.")
    threads: int = Field(
        default=0, ge=0, description="CPU threads per rank; 0: an equal share of the cores this process may use."
    )
    cpus: tuple[int, ...] = Field(
        default=(), description="Pin the trainer to these cores, shared out among its ranks; empty: do not pin."
    )
    device: str = Field(default="auto", description="auto: the accelerator if there is one, else the CPU.")

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
        return self


class EnginesConfig(Section):
    backend: Literal["embedded"] = Field(default="embedded", description="What generates.")
    count: Positive = Field(default=1, description="Engines to start.")
    urls: tuple[str, ...] = Field(default=(), description="Engines that already run; then none is started.")
    base_port: int = Field(
        default=0, ge=0, le=65535, description="Engine i listens on base_port + i; 0: any free port."
    )
    slots: Positive = Field(default=64, description="Responses that one engine decodes at once.")
    batch_invariant: bool = Field(
        default=False, description="A sample's bits do not depend on its batch mates (slower; embedded only)."
    )
    max_model_len: int = Field(default=0, ge=0, description="Longest prompt plus response; 0: what the model allows.")
    max_retries: int = Field(
        default=3, ge=0, description="How often a failed request is sent again before the run stops."
    )
    request_seconds: float = Field(default=600.0, gt=0, description="A request that takes longer counts as failed.")
    start_seconds: float = Field(default=300.0, gt=0, description="An engine that is not ready by then is an error.")
    threads: int = Field(default=0, ge=0, description="CPU threads each; 0: an equal share of the cores.")
    cpus: tuple[tuple[int, ...], ...] = Field(default=(), description="Pin engine i to cpus[i]; empty: do not pin.")
    device: str = Field(default="auto", description="auto: the accelerator if there is one, else the CPU.")


class WeightsConfig(Section):
    transport: Literal["auto", "files"] = Field(default="auto", description="How weights travel to the engines.")
    folder: str = Field(
        default="", description="For files; empty: shared memory (/dev/shm), or the run's folder without it."
    )
    delta: Literal[False] = Field(default=False, description="Send only what changed; not built yet.")


class RewardsConfig(Section):
    functions: tuple[str, ...] = Field(min_length=1, description="pkg.module:function or path/to/file.py:function.")
    weights: tuple[float, ...] = Field(default=(), description="One per function; empty: 1 each.")
    seconds: float = Field(default=30.0, gt=0, description="Hard limit for scoring one group.")
    on_error: Literal["fail", "zero"] = Field(default="fail", description="Stop the run, or score 0 and count it.")
    workers: Positive = Field(default=1, description="Worker processes.")

    @model_validator(mode="after")
    def _a_weight_each(self) -> RewardsConfig:
        if self.weights and len(self.weights) != len(self.functions):
            raise ValueError(
                f"rewards.weights has {len(self.weights)} entries but rewards.functions has "
                f"{len(self.functions)}: give one weight per function"
            )
        return self


class EvalConfig(Section):
    every: int = Field(default=0, ge=0, description="Periods between evaluations; 0: only before and after training.")
    samples: Positive = Field(default=1, description="Responses per held-out prompt, at the rollout's temperature.")
    prompts: int = Field(default=0, ge=0, description="Use the first so many held-out rows; 0: all.")


class LaunchConfig(Section):
    backend: Literal["local"] = Field(default="local", description="Child processes of this one.")
    silence_seconds: float = Field(
        default=30.0, gt=0, description="When nothing moves for so long, say what is awaited."
    )


class Config(Section):
    """One run."""

    run: RunConfig = RunConfig()
    model: ModelConfig
    data: DataConfig
    rollout: RolloutConfig = RolloutConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    trainer: TrainerConfig = TrainerConfig()
    engines: EnginesConfig = EnginesConfig()
    weights: WeightsConfig = WeightsConfig()
    rewards: RewardsConfig
    eval: EvalConfig = EvalConfig()
    launch: LaunchConfig = LaunchConfig()

    @model_validator(mode="after")
    def _possible(self) -> Config:
        if self.schedule.updates_per_period > self.rollout.prompts_per_period:
            raise ValueError(
                f"schedule.updates_per_period = {self.schedule.updates_per_period} exceeds "
                f"rollout.prompts_per_period = {self.rollout.prompts_per_period}: every update needs a group"
            )
        self._check_groups()
        if self.engines.cpus and len(self.engines.cpus) != self.engines.count:
            raise ValueError(
                f"engines.cpus pins {len(self.engines.cpus)} engines but engines.count = {self.engines.count}"
            )
        return self

    def _check_groups(self) -> None:
        rollout, algorithm = self.rollout, self.algorithm
        if algorithm.name == "rloo" and rollout.group_size == 1:
            raise ValueError('algorithm.name = "rloo" needs others to compare with: rollout.group_size = 1 has none')
        longest = rollout.group_size * rollout.max_new_tokens
        if algorithm.kl.coefficient and algorithm.kl.place == "reward" and longest > self.trainer.micro_tokens:
            raise ValueError(
                f'algorithm.kl.place = "reward" needs every group whole in one micro-batch, but rollout.group_size x '
                f"rollout.max_new_tokens = {longest} exceeds trainer.micro_tokens = {self.trainer.micro_tokens}: "
                'raise that, or set algorithm.kl.place = "loss"'
            )
        if 0 < algorithm.max_candidates < rollout.prompts_per_period:
            raise ValueError(
                f"algorithm.max_candidates = {algorithm.max_candidates} is below rollout.prompts_per_period = "
                f"{rollout.prompts_per_period}: a period could never be full"
            )
        if algorithm.filter != "none" and rollout.group_size == 1:
            raise ValueError(
                f'algorithm.filter = "{algorithm.filter}" keeps groups whose rewards differ: '
                "rollout.group_size = 1 has none"
            )

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(self.model_dump(mode="json"), indent=2) + "\n")


def read_config(path: Path, overrides: Sequence[str] = ()) -> Config:
    """The config in `path` (TOML, or the JSON that a run wrote), under `section.key=value` overrides."""
    try:
        text = path.read_text(encoding="utf-8")
        tree = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}: give the path of a TOML config") from None
    except ValueError as error:  # not UTF-8, or not TOML
        raise ConfigError(f"{path} cannot be read: {error}") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} holds a {type(tree).__name__}: a config is an object with sections")
    for override in overrides:
        _override(tree, override)
    return parse_config(tree, source=str(path))


def parse_config(tree: dict[str, Any], source: str = "config") -> Config:
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(f"{source}: {first_mistake(error, Config)}") from None


def asset_or_path(name: str) -> str:
    """`rondo:NAME` as the path of what ships with the package; anything else unchanged."""
    return str(ASSETS / name.removeprefix("rondo:")) if name.startswith("rondo:") else name


def _override(tree: dict[str, Any], text: str) -> None:
    dotted, equals, value = text.partition("=")
    *sections, key = dotted.strip().split(".")
    if not equals or not sections:
        raise ConfigError(f"--set {text}: write it as section.key=value")
    for section in sections:
        tree = tree.setdefault(section, {})
        if not isinstance(tree, dict):
            raise ConfigError(f"--set {text}: {section} is a value, not a section")
    try:
        tree[key] = tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        tree[key] = value  # a bare word is a string: --set run.name=first
