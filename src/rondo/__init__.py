"""Rondo: on-policy reinforcement learning for language models, at asynchronous speed.

    import rondo

    config = rondo.read_config("run.toml", ["schedule.periods=10"])
    folder = rondo.train(config)

Nothing heavy is imported until it is used.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rondo.errors import RondoError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from transformers import PreTrainedModel

    from rondo.config import Config

__version__ = "0.1.0"
__all__ = ["RondoError", "read_config", "score", "train"]


def read_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """The config in a TOML file, with `section.key=value` overrides on top."""
    from rondo.config import read_config as read

    return read(Path(path), overrides)


def train(config: Config, *, resume: bool = False) -> Path:
    """Run `config` to its end: starts engines and trainer, watches them, tears them down.

    Returns the run's folder. Raises RondoError (its text is one sentence) when the run cannot go on.
    """
    from rondo.launch.start import launch

    return launch(config, resume=resume)


def score(
    model: PreTrainedModel,
    groups: Sequence[tuple[Sequence[int], Sequence[Sequence[int]]]],
    *,
    attention: str = "shared-prompt",
    temperature: float = 1.0,
) -> list[list[torch.Tensor]]:
    """Log-probs of responses under any transformers causal LM, each group's prompt computed once.

    `groups` holds (prompt_ids, [response_ids, ...]); the result, for every group, one 1-D tensor per response,
    differentiable when gradients are on.
    """
    from rondo.trainer.score import score as score_groups

    return score_groups(model, groups, attention=attention, temperature=temperature)
