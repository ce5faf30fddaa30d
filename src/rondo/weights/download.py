"""Fetching a publication over HTTP, with nothing but the standard library: it runs inside vLLM's workers too."""

from __future__ import annotations

import urllib.request

import torch

from rondo.weights.safe import UnreadableWeightsError


def download(url: str, *, token: str = "", seconds: float = 600.0) -> torch.Tensor:
    """The bytes at `url` ([N] uint8), all of them."""
    if not url.startswith(("http://", "https://")):
        raise UnreadableWeightsError(f"weights cannot be fetched from {url[:100]}: it is no http address")
    try:
        request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"} if token else {})
        with urllib.request.urlopen(request, timeout=seconds) as reply:
            size = int(reply.headers["Content-Length"])
            raw = torch.empty(size, dtype=torch.uint8)
            view, filled = memoryview(raw.numpy().data), 0
            while filled < size and (count := reply.readinto(view[filled:])):
                filled += count
    except (OSError, ValueError, TypeError) as error:
        raise UnreadableWeightsError(f"weights cannot be fetched from {url}: {error}") from error
    if filled < size:
        raise UnreadableWeightsError(f"weights cannot be fetched from {url}: it ended after {filled} of {size} bytes")
    return raw
