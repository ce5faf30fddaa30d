"""The whole config tree: one TOML file, every key documented here and in the sections beside it.

Sections are frozen; unknown keys are refused with the nearest known one; a combination that cannot work fails
here, naming both keys. Paths are relative to the working directory; `rondo:NAME` is a folder or file that
ships with the package.
"""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, model_validator

from rondo.config.algorithm import AlgorithmConfig
from rondo.config.engines import EnginesConfig
from rondo.config.journal import JournalConfig
from rondo.config.launch import LaunchConfig
from rondo.config.mistakes import first_mistake
from rondo.config.observe import ObserveConfig
from rondo.config.section import Positive, Section
from rondo.config.trainer import TrainerConfig
from rondo.config.weights import WeightsConfig
from rondo.errors import ConfigError

ASSETS = Path(__file__).parent.parent / "assets"


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


class RewardsConfig(Section):
    functions: tuple[str, ...] = Field(min_length=1, description="pkg.module:function or path/to/file.py:function.")
    weights: tuple[float, ...] = Field(default=(), description="One per function; empty: 1 each.")
    seconds: float = Field(default=30.0, gt=0, description="Hard limit for scoring one group.")
    on_error: Literal["fail", "zero"] = Field(default="fail", description="Stop the run, or score 0 and count it.")
    workers: Positive = Field(default=1, description="Worker processes.")
    memory_mb: int = Field(
        default=8192, ge=0, description="What a worker process may allocate, code that it starts included; 0: no limit."
    )

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
    journal: JournalConfig = JournalConfig()
    observe: ObserveConfig = ObserveConfig()
    launch: LaunchConfig = LaunchConfig()

    @model_validator(mode="after")
    def _possible(self) -> Config:
        if self.schedule.updates_per_period > self.rollout.prompts_per_period:
            raise ValueError(
                f"schedule.updates_per_period = {self.schedule.updates_per_period} exceeds "
                f"rollout.prompts_per_period = {self.rollout.prompts_per_period}: every update needs a group"
            )
        self._check_groups()
        self._check_memory()
        self._check_launch()
        if self.engines.cpus and len(self.engines.cpus) != self.engines.count:
            raise ValueError(
                f"engines.cpus pins {len(self.engines.cpus)} engines but engines.count = {self.engines.count}"
            )
        return self

    def _check_launch(self) -> None:
        if self.launch.backend != "ray":
            return
        for key, cores in (("trainer.cpus", self.trainer.cpus), ("engines.cpus", self.engines.cpus)):
            if cores:
                raise ValueError(
                    f'{key} names cores of this machine, but launch.backend = "ray" may choose another: unset it, and '
                    f"say how many with launch.ray.{'rank' if key.startswith('t') else 'engine'}_cpus"
                )

    def _check_memory(self) -> None:
        trainer, engines = self.trainer.memory_share, self.engines.memory_share
        if trainer and engines and trainer + engines > 1:
            raise ValueError(
                f"trainer.memory_share = {trainer} and engines.memory_share = {engines} are more than the whole device"
            )
        if trainer and not engines and self.engines.backend == "vllm":
            raise ValueError(
                f"trainer.memory_share = {trainer} leaves the engine on the same device without a limit: set "
                "engines.memory_share too"
            )

    @property
    def shares_device(self) -> bool:
        """Trainer and engine are two processes on one accelerator."""
        return self.trainer.memory_share > 0

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

    @property
    def logp_gap_limit(self) -> float:
        """On a period's mean |engine - trainer| log-prob gap; infinity where the two sample differently on purpose."""
        if self.rollout.top_p < 1:
            return math.inf
        narrow = {self.model.dtype, self.trainer.dtype} != {"float32"}
        return self.journal.max_logp_gap or (0.1 if narrow else 1e-3)

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


def changed(config: Config, key: str, value: Any) -> Config:
    """The same config with another value at `section.key`."""
    tree = config.model_dump(mode="json")
    *sections, name = key.split(".")
    inner = tree
    for section in sections:
        inner = inner[section]
    inner[name] = value
    return parse_config(tree, source=key)


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
