"""A way for buckets to reach an engine: the sender's half is a Transport, the engine's half is in receive.py.

What is said about a bucket is one JSON object; bytes go beside it as safetensors, as device memory shared by handle, or
as a broadcast. Nothing is ever unpickled.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from rondo.weights.bucket import Bucket, Named


@dataclass(frozen=True, kw_only=True)
class Offer:
    """A bucket, ready to be taken."""

    info: Mapping[str, Any]  # what an engine must be told to take it; JSON
    tensors: tuple[Named, ...]  # the bucket as published, in its dtype: what the checksum is taken of
    bytes: int  # on their way
    deliver: Callable[[], None] | None = None  # to be called once every engine has been told


class Transport(Protocol):
    name: str

    def begin(self, *, version: int, receivers: Sequence[str], full: bool) -> None:
        """A publication starts, to these addresses; `full`: to engines that may hold nothing of the last one."""

    def offer(self, bucket: Bucket) -> Offer:
        """At most two offers are untaken at any time."""

    def confirmed(self) -> None:
        """Every engine holds this publication."""

    def close(self) -> None: ...


def described(tensors: Sequence[Named], dtype: torch.dtype) -> list[tuple[str, str, list[int]]]:
    """Name, dtype and shape of each, for an `info`."""
    return [(name, str(dtype).removeprefix("torch."), list(tensor.shape)) for name, tensor in tensors]
