"""The receiving side of a publication: one update's tensors, whatever way they came.

Imports torch and safetensors alone: it also runs inside vLLM's workers, in vLLM's own environment.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from rondo.errors import PublicationError


def receive(update: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Named tensors in the order in which they were published; each is valid until the next is asked for."""
    if update["transport"] != "files":
        raise PublicationError(f"transport {update['transport']} is not known to this engine: use files")
    path = Path(update["path"])
    try:
        with safe_open(path, framework="pt") as file:
            order = (file.metadata() or {}).get("order", "").split("\n")
            for name in order:
                yield name, file.get_tensor(name)
    except (OSError, SafetensorError) as error:
        raise PublicationError(f"weights cannot be read from {path}: {error}") from error
