"""The geometry of a packed row.

A segment is one prompt with its responses, laid out as `prompt, r1, r2, ..., rG`. Positions run 0..P-1 over the
prompt and every response restarts at P. A prompt token sees the prompt causally; a token of response i sees the
whole prompt and its own response causally, never another response. Segments do not see each other. The first
token of every response is predicted by the same hidden state: that of the last prompt token.

Suffixes: T tokens of the row, N response tokens, M responses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

TokenIds = Sequence[int]


@dataclass(frozen=True, kw_only=True)
class Span:
    """One response in the row, and the prompt it continues."""

    prompt: int  # where its prompt starts
    prompt_length: int
    start: int
    length: int


@dataclass(frozen=True, kw_only=True)
class Layout:
    """One row, ready to be computed."""

    tokens_T: torch.Tensor
    positions_T: torch.Tensor
    source_N: torch.Tensor  # index into T of the hidden state that predicts each response token
    target_N: torch.Tensor  # the response tokens
    lengths_M: torch.Tensor  # tokens per response
    prompts: tuple[tuple[int, int], ...]  # (start, length) of every prompt
    spans: tuple[Span, ...]  # every response, in order

    def to(self, device: torch.device) -> Layout:
        if self.tokens_T.device == device:
            return self
        moved = {
            name: getattr(self, name).to(device)
            for name in ("tokens_T", "positions_T", "source_N", "target_N", "lengths_M")
        }
        return Layout(**moved, prompts=self.prompts, spans=self.spans)


def shared_prompt_layout(segments: Sequence[tuple[TokenIds, Sequence[TokenIds]]]) -> Layout:
    """Each (prompt, responses) as one segment, its prompt computed once."""
    tokens: list[int] = []
    positions: list[int] = []
    source: list[int] = []
    target: list[int] = []
    prompts: list[tuple[int, int]] = []
    spans: list[Span] = []
    for prompt_ids, responses in segments:
        prompt_start, prompt_length = len(tokens), len(prompt_ids)
        assert prompt_length > 0, "a response needs a prompt token to be predicted from"
        prompts.append((prompt_start, prompt_length))
        tokens.extend(prompt_ids)
        positions.extend(range(prompt_length))
        for response_ids in responses:
            start, length = len(tokens), len(response_ids)
            assert length > 0, "a response has at least one token"
            spans.append(Span(prompt=prompt_start, prompt_length=prompt_length, start=start, length=length))
            tokens.extend(response_ids)
            positions.extend(range(prompt_length, prompt_length + length))
            source.append(prompt_start + prompt_length - 1)
            source.extend(range(start, start + length - 1))
            target.extend(response_ids)
    return Layout(
        tokens_T=torch.tensor(tokens),
        positions_T=torch.tensor(positions),
        source_N=torch.tensor(source),
        target_N=torch.tensor(target),
        lengths_M=torch.tensor([span.length for span in spans]),
        prompts=tuple(prompts),
        spans=tuple(spans),
    )


def separate_layout(segments: Sequence[tuple[TokenIds, Sequence[TokenIds]]]) -> Layout:
    """Every response with a prompt of its own: the usual way, for comparison."""
    return shared_prompt_layout([(prompt, [response]) for prompt, responses in segments for response in responses])
