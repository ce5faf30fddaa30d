"""One short file per algorithm; by name here."""

from __future__ import annotations

from rondo.trainer.objective.base import Surrogate
from rondo.trainer.objective.cispo import CISPO
from rondo.trainer.objective.dapo import DAPO
from rondo.trainer.objective.dr_grpo import DrGRPO
from rondo.trainer.objective.grpo import GRPO
from rondo.trainer.objective.gspo import GSPO
from rondo.trainer.objective.reinforce_pp import ReinforcePP
from rondo.trainer.objective.rloo import RLOO

_SURROGATES: dict[str, type[GRPO | GSPO | RLOO | CISPO]] = {
    "grpo": GRPO,
    "dr-grpo": DrGRPO,
    "dapo": DAPO,
    "gspo": GSPO,
    "rloo": RLOO,
    "reinforce++": ReinforcePP,
    "cispo": CISPO,
}


def surrogate(name: str, *, clip_low: float, clip_high: float) -> Surrogate:
    return _SURROGATES[name](clip_low=clip_low, clip_high=clip_high)
