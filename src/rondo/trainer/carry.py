"""Files of a folder on rank 0's machine, carried to and from machines that share no disk with it.

Who sees the folder is tried, not configured. All ranks call together; each file travels once per rank that needs it, in
pieces, over the CPU process group.
"""

from __future__ import annotations

import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from rondo.trainer.parallel import Joined

PIECE = 4 << 20  # bytes


@contextmanager
def written(folder: Path, ranks: Joined) -> Iterator[Path]:
    """Where this rank writes; when all have, every file is in rank 0's `folder`."""
    if ranks.rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
    sees = _who_sees(folder, ranks)
    with _own(folder, sees[ranks.rank]) as own:
        yield own
        for rank in _blind(sees):
            _carry(own, folder, ranks, source=rank, target=0)


@contextmanager
def readable(folder: Path, ranks: Joined) -> Iterator[Path]:
    """Where this rank finds the files of rank 0's `folder`."""
    sees = _who_sees(folder, ranks)
    with _own(folder, sees[ranks.rank]) as own:
        for rank in _blind(sees):
            _carry(folder, own, ranks, source=0, target=rank)
        yield own


def _who_sees(folder: Path, ranks: Joined) -> list[bool]:
    """By rank: whether it finds what rank 0 just put there."""
    mark, word = folder / ".seen-by", secrets.token_hex(8)
    if ranks.rank == 0:
        mark.write_text(word)
    word = ranks.exchange(word)[0]
    sees: list[bool] = ranks.exchange(mark.exists() and mark.read_text() == word)
    if ranks.rank == 0:
        mark.unlink()
    return sees


def _blind(sees: list[bool]) -> list[int]:
    return [rank for rank, sight in enumerate(sees) if not sight]


@contextmanager
def _own(folder: Path, sees: bool) -> Iterator[Path]:
    if sees:
        yield folder
        return
    own = Path(tempfile.mkdtemp(prefix="rondo-state-"))
    try:
        yield own
    finally:
        shutil.rmtree(own)


def _carry(origin: Path, destination: Path, ranks: Joined, *, source: int, target: int) -> None:
    """All files of a folder, from one rank to another; the others only hear which."""
    files = [[path.name, path.stat().st_size] for path in sorted(origin.iterdir())] if ranks.rank == source else None
    for name, size in ranks.exchange(files)[source]:
        if ranks.rank == source:
            with (origin / name).open("rb") as stream:
                for _ in range(0, size, PIECE):
                    ranks.send(torch.frombuffer(bytearray(stream.read(PIECE)), dtype=torch.uint8), to=target)
        elif ranks.rank == target:
            with (destination / Path(name).name).open("wb") as stream:
                for start in range(0, size, PIECE):
                    piece = torch.empty(min(PIECE, size - start), dtype=torch.uint8)
                    ranks.receive(piece, source=source)
                    stream.write(piece.numpy().data)
