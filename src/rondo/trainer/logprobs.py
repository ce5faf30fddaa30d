"""Log-probs of given tokens, without ever holding a [tokens, vocabulary] tensor.

The head is applied chunk by chunk, only at the positions asked for, and each chunk is computed again in the
backward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch.utils.checkpoint import checkpoint

CHUNK_ELEMENTS = 1 << 24  # logits per chunk on a CPU: 64 MB in float32
ACCELERATOR_CHUNK_ELEMENTS = 1 << 28  # 0.5 GB in bfloat16: narrower products leave the device idle


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
    on_cpu = hidden_NC.device.type == "cpu"
    chosen = select if on_cpu else _compiled_select()

    def chunk_logps(hidden: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return chosen(head(hidden), target, temperature, entropy)

    rows = max(1, (CHUNK_ELEMENTS if on_cpu else ACCELERATOR_CHUNK_ELEMENTS) // vocabulary)
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


def warm_up(
    *, tokens: int, vocabulary: int, dtype: torch.dtype, device: torch.device, temperature: float, entropy: bool
) -> None:
    """Compile ahead what the first step would wait for, about a minute: in the shapes to come, with gradient and
    without. What it takes of the device's memory is kept for the trainer, so that an engine which measures what is free
    never sees it rise."""
    if device.type == "cpu":
        return
    rows = max(2, min(tokens, ACCELERATOR_CHUNK_ELEMENTS // vocabulary))
    logits = torch.zeros(rows, vocabulary, dtype=dtype, device=device, requires_grad=True)
    target = torch.zeros(rows, dtype=torch.long, device=device)
    with torch.no_grad():
        _compiled_select()(logits.detach(), target, temperature, False)
    torch.autograd.backward(_compiled_select()(logits, target, temperature, entropy).sum())


def select(logits: torch.Tensor, target: torch.Tensor, temperature: float, entropy: bool) -> torch.Tensor:
    wide = (logits if logits.dtype == torch.float64 else logits.float()) / temperature
    norm = wide.logsumexp(-1)
    logps = wide.gather(-1, target[:, None])[:, 0] - norm
    return torch.stack([logps, norm - (wide.softmax(-1) * wide).sum(-1)]) if entropy else logps


def select_in_one_pass(logits: torch.Tensor, target: torch.Tensor, temperature: float, entropy: bool) -> torch.Tensor:
    """The same, in words that a compiler fuses: a gather's gradient would be a scatter into zeros of its own."""
    wide = (logits if logits.dtype == torch.float64 else logits.float()) / temperature
    norm = wide.logsumexp(-1)
    chosen = torch.arange(wide.shape[-1], device=wide.device) == target[:, None]
    logps = torch.where(chosen, wide, 0.0).sum(-1) - norm
    return torch.stack([logps, norm - (wide.softmax(-1) * wide).sum(-1)]) if entropy else logps


@cache
def _compiled_select() -> Callable[..., torch.Tensor]:
    """One pass over the logits instead of a dozen, and none of them in float32 in memory."""
    compiled = torch.compile(select_in_one_pass)

    def called(logits: torch.Tensor, target: torch.Tensor, temperature: float, entropy: bool) -> torch.Tensor:
        # Rows vary from call to call; the vocabulary does not, and a kernel that knows it is several times faster.
        for tensor in (logits, target):
            torch._dynamo.maybe_mark_dynamic(tensor, 0)
        selected: torch.Tensor = compiled(logits, target, temperature, entropy)
        return selected

    return called
