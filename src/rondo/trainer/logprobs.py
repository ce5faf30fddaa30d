"""Log-probs of given tokens, without ever holding a [tokens, vocabulary] tensor.

The head is applied chunk by chunk, only at the positions asked for, and each chunk is computed again in the
backward pass.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.utils.checkpoint import checkpoint

CHUNK_ELEMENTS = 1 << 24  # logits per chunk: 64 MB in float32


def token_logps(
    head: Callable[[torch.Tensor], torch.Tensor],
    hidden_NC: torch.Tensor,
    target_N: torch.Tensor,
    *,
    temperature: float,
    vocabulary: int,
    entropy: bool = False,
) -> torch.Tensor:
    """log softmax(head(hidden) / temperature) at the targets, [N] in float32 (float64 for float64 models).

    With `entropy`, [2, N]: below them the entropy of each whole distribution, in nats.
    """

    def chunk_logps(hidden: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        logits = head(hidden)
        logits = (logits if logits.dtype == torch.float64 else logits.float()) / temperature
        norm = logits.logsumexp(-1)
        logps = logits.gather(-1, target[:, None])[:, 0] - norm
        if not entropy:
            return logps
        return torch.stack([logps, norm - (logits.softmax(-1) * logits).sum(-1)])

    rows = max(1, CHUNK_ELEMENTS // vocabulary)
    if hidden_NC.shape[0] <= rows:
        return chunk_logps(hidden_NC, target_N)
    recompute = torch.is_grad_enabled()
    chunks = [
        checkpoint(chunk_logps, hidden, target, use_reentrant=False, preserve_rng_state=False)
        if recompute
        else chunk_logps(hidden, target)
        for hidden, target in zip(torch.split(hidden_NC, rows), torch.split(target_N, rows), strict=True)
    ]
    return torch.cat(chunks, dim=-1)
