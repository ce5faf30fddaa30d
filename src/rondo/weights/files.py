"""Weights as safetensors files, in shared memory or on a shared disk."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from rondo.errors import PublicationError


def write_weights(folder: Path, version: int, tensors: dict[str, torch.Tensor]) -> Path:
    """The tensors as `folder/VERSION.safetensors`, written aside and renamed: a reader sees all of it or none."""
    path = folder / f"{version:08d}.safetensors"
    aside = path.with_suffix(".partial")
    try:
        save_file(tensors, aside, metadata={"order": "\n".join(tensors)})  # safetensors sorts, checksums do not
    except Exception as error:  # safetensors raises its own type for a full disk
        aside.unlink(missing_ok=True)
        free = shutil.disk_usage(folder).free / 1e9
        raise PublicationError(
            f"weights of version {version} could not be written to {folder} ({error}); {free:.2f} GB are free there: "
            "make room or set weights.folder"
        ) from error
    os.replace(aside, path)
    return path


def read_weights(path: Path) -> dict[str, torch.Tensor]:
    return dict(load_file(path))


def copy_into(parameters: dict[str, torch.Tensor], tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Copy published tensors into a model's own, by name; the two sets must match in names and shapes."""
    seen = set()
    with torch.no_grad():
        for name, tensor in tensors:
            target = parameters.get(name)
            if target is None or target.shape != tensor.shape:
                held = "no such tensor" if target is None else f"shape {tuple(target.shape)}"
                raise PublicationError(f"published {name} has shape {tuple(tensor.shape)} but the engine holds {held}")
            target.copy_(tensor)
            seen.add(name)
    if missing := sorted(parameters.keys() - seen):
        raise PublicationError(f"the publication lacks {len(missing)} of the engine's tensors, {missing[0]} first")
