"""Reading safetensors out of memory, without a copy: of a mapped file, or of bytes that came over the network.

The bytes may be anyone's: every length and offset of the header is checked before it is used.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch

from rondo.errors import PublicationError

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_LONGEST_HEADER = 100_000_000  # as in the format's own reader


class UnreadableWeightsError(PublicationError):
    """The bytes are missing or damaged; nothing was changed."""


def map_file(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a file, as views of its mapped pages."""
    try:
        size = path.stat().st_size
        raw = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)
    except (OSError, RuntimeError) as error:  # torch raises the latter for a file it cannot map
        raise UnreadableWeightsError(f"weights cannot be read from {path}: {str(error).splitlines()[0]}") from error
    return parse(raw, source=str(path))


def parse(raw: torch.Tensor, *, source: str) -> dict[str, torch.Tensor]:
    """The tensors in these bytes ([N] uint8), as views of them."""
    try:
        return _parse(raw)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise UnreadableWeightsError(f"weights cannot be read from {source}: no whole safetensors ({error})") from error


def _parse(raw: torch.Tensor) -> dict[str, torch.Tensor]:
    if raw.numel() < 8:
        raise ValueError(f"{raw.numel()} bytes")
    length = int.from_bytes(raw[:8].numpy().tobytes(), "little")
    if length > min(raw.numel() - 8, _LONGEST_HEADER):
        raise ValueError(f"a header of {length} bytes in {raw.numel()}")
    header = json.loads(raw[8 : 8 + length].numpy().tobytes())
    data = raw[8 + length :]
    return {name: _view(data, entry) for name, entry in header.items() if name != "__metadata__"}


def _view(data: torch.Tensor, entry: dict[str, Any]) -> torch.Tensor:
    dtype, shape, (start, end) = _DTYPES[entry["dtype"]], entry["shape"], entry["data_offsets"]
    if not all(type(number) is int and number >= 0 for number in (*shape, start, end)):
        raise ValueError("a shape or an offset that is none")
    if end > data.numel() or end - start != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"a tensor of shape {shape} in bytes {start} to {end} of {data.numel()}")
    part = data[start:end]
    if part.storage_offset() % dtype.itemsize:
        part = part.clone()
    return part.view(dtype).view(shape)
