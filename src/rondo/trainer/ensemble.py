"""All ranks as one trainer: what rank 0's loop calls, every rank does.

Rank 0 holds an `Ensemble` where a single rank would hold its `Trainer`. Each call is told to the other ranks as an
order, with the rank's own pack where it takes one, and then done here too; the others `follow`, waiting on the CPU
group for the next order as long as it takes. Orders that gather or sum over ranks meet inside the trainer's own calls.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from rondo.observe.metrics import Tally
from rondo.stream.scatter import decode, divide, encode
from rondo.trainer.parallel import Joined
from rondo.trainer.trainer import Trainer
from rondo.types import MicroBatch, StepHashes


class AnyTrainer(Protocol):
    """What the loop, the publisher and the checkpoints ask of a trainer: of one rank's, or of all ranks'."""

    @property
    def tally(self) -> Tally: ...
    @property
    def steps(self) -> int: ...
    @property
    def hashes(self) -> StepHashes | None: ...

    def begin_period(self) -> None: ...
    def accumulate(self, micro: MicroBatch) -> None: ...
    def step(self) -> None: ...
    def gradient(self) -> Iterator[tuple[str, torch.Tensor]]: ...
    def discard(self) -> None: ...
    def weights(self) -> Iterator[tuple[str, torch.Tensor]]: ...
    def score(self, token_ids: Sequence[int]) -> list[float]: ...
    def write(self, folder: Path) -> None: ...
    def read(self, folder: Path, *, steps: int) -> None: ...
    def close(self) -> None: ...


class Ensemble:
    def __init__(self, *, own: Trainer, ranks: Joined, micro_tokens: int) -> None:
        self._own = own
        self._ranks = ranks
        self.micro_tokens = micro_tokens  # budget of one rank's pack

    @property
    def tally(self) -> Tally:
        return self._own.tally

    @property
    def steps(self) -> int:
        return self._own.steps

    @property
    def hashes(self) -> StepHashes | None:
        return self._own.hashes

    def begin_period(self) -> None:
        self._tell("begin_period")
        self._own.begin_period()

    def accumulate(self, micro: MicroBatch) -> None:
        """One round."""
        if not micro.parts:
            self._own.count(micro)
            return
        mine, *others = divide(micro, ranks=self._ranks.size, budget=self.micro_tokens)
        self._ranks.tell([{"do": "accumulate", "micro": encode(pack)} for pack in others])
        self._own.accumulate(mine)

    def step(self) -> None:
        self._tell("step")
        self._own.step()

    def gradient(self) -> Iterator[tuple[str, torch.Tensor]]:
        self._tell("gradient")
        yield from self._own.gradient()

    def discard(self) -> None:
        self._tell("discard")
        self._own.discard()

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        self._tell("weights")
        yield from self._own.weights()

    def score(self, token_ids: Sequence[int]) -> list[float]:
        self._tell("score", token_ids=list(token_ids))
        return self._own.score(token_ids)

    def write(self, folder: Path) -> None:
        self._tell("write", folder=str(folder))
        self._own.write(folder)

    def read(self, folder: Path, *, steps: int) -> None:
        self._tell("read", folder=str(folder), steps=steps)
        self._own.read(folder, steps=steps)

    def close(self) -> None:
        """Lets the other ranks go; not called when something failed, for then they may not be listening."""
        self._tell("end")

    def _tell(self, order: str, **details: Any) -> None:
        self._ranks.tell([{"do": order, **details}] * (self._ranks.size - 1))


def follow(trainer: Trainer, ranks: Joined) -> None:
    """What a rank other than 0 does all its life."""
    while (order := ranks.hear())["do"] != "end":
        match order["do"]:
            case "begin_period":
                trainer.begin_period()
            case "accumulate":
                trainer.accumulate(decode(order["micro"]))
            case "step":
                trainer.step()
            case "gradient":
                for _ in trainer.gradient():
                    pass
            case "discard":
                trainer.discard()
            case "weights":
                for _ in trainer.weights():
                    pass
            case "score":
                trainer.score(order["token_ids"])
            case "write":
                trainer.write(Path(order["folder"]))
            case "read":
                trainer.read(Path(order["folder"]), steps=order["steps"])
            case unknown:
                raise AssertionError(unknown)
