"""The geometry of a packed row.

A segment is one prompt with its responses: `prompt, r1, r2, ..., rG`. Several segments share a row, all prompts first
and then all responses, so that kernels which treat the two apart find each in one piece. Positions run 0..P-1 over a
prompt and every response restarts at P. A prompt token sees the prompt causally; a token of response i sees the whole
prompt and its own response causally, never another response. Segments do not see each other. The first token of every
response is predicted by the same hidden state: that of the last prompt token.

Suffixes: T tokens of the row, N response tokens, M responses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

TokenIds = Sequence[int]
Segments = Sequence[tuple[TokenIds, Sequence[TokenIds]]]  # prompts with their responses


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
    padding: range = range(0)  # tokens that nobody reads: one of the prompts, without responses

    @property
    def rows(self) -> tuple[range, ...] | None:
        """Every response stands behind a prompt of its own: the tokens of each such row. None: prompts are shared."""
        if any(span.start != span.prompt + span.prompt_length for span in self.spans):
            return None
        rows = tuple(range(span.prompt, span.start + span.length) for span in self.spans)
        return (*rows, self.padding) if self.padding else rows

    def to(self, device: torch.device | str) -> Layout:
        if self.tokens_T.device == torch.device(device):
            return self
        moved = {
            name: getattr(self, name).to(device)
            for name in ("tokens_T", "positions_T", "source_N", "target_N", "lengths_M")
        }
        return replace(self, **moved)


def shared_prompt_layout(segments: Segments, *, multiple: int = 1) -> Layout:
    """Each (prompt, responses) as one segment, its prompt computed once; all prompts stand at the head of the row, and
    behind them what pads the row to the multiple."""
    row = _Row()
    starts = [row.prompt(prompt_ids) for prompt_ids, _ in segments]
    row.pad(sum(len(ids) for _, responses in segments for ids in responses), multiple)
    for start, (prompt_ids, responses) in zip(starts, segments, strict=True):
        row.responses(start, len(prompt_ids), responses)
    return row.layout()


def separate_layout(segments: Segments, *, multiple: int = 1) -> Layout:
    """Every response behind a prompt of its own: the usual way, for comparison."""
    row = _Row()
    for prompt_ids, responses in segments:
        for response_ids in responses:
            row.responses(row.prompt(prompt_ids), len(prompt_ids), [response_ids])
    row.pad(0, multiple)
    return row.layout()


def auto_layout(segments: Segments, *, multiple: int = 1) -> Layout:
    """Whichever costs less: sharing never computes more tokens, but for single responses it saves none and asks for
    more, smaller pieces."""
    shared = any(len(responses) > 1 for _, responses in segments)
    return (shared_prompt_layout if shared else separate_layout)(segments, multiple=multiple)


class _Row:
    """A row under construction."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._positions: list[int] = []
        self._source: list[int] = []
        self._target: list[int] = []
        self._prompts: list[tuple[int, int]] = []
        self._spans: list[Span] = []
        self._padding = range(0)

    def prompt(self, ids: TokenIds) -> int:
        """Appends a prompt; where it starts."""
        assert len(ids) > 0, "a response needs a prompt token to be predicted from"
        start = len(self._tokens)
        self._prompts.append((start, len(ids)))
        self._tokens.extend(ids)
        self._positions.extend(range(len(ids)))
        return start

    def responses(self, prompt: int, prompt_length: int, responses: Sequence[TokenIds]) -> None:
        for ids in responses:
            assert len(ids) > 0, "a response has at least one token"
            start, length = len(self._tokens), len(ids)
            self._spans.append(Span(prompt=prompt, prompt_length=prompt_length, start=start, length=length))
            self._tokens.extend(ids)
            self._positions.extend(range(prompt_length, prompt_length + length))
            self._source.append(prompt + prompt_length - 1)
            self._source.extend(range(start, start + length - 1))
            self._target.extend(ids)

    def pad(self, to_come: int, multiple: int) -> None:
        """Appends what the row lacks to a multiple, once so many tokens will have come."""
        lacking = -(len(self._tokens) + to_come) % multiple
        if lacking:
            start = self.prompt([0] * lacking)
            self._padding = range(start, start + lacking)

    def layout(self) -> Layout:
        return Layout(
            tokens_T=torch.tensor(self._tokens),
            positions_T=torch.tensor(self._positions),
            source_N=torch.tensor(self._source),
            target_N=torch.tensor(self._target),
            lengths_M=torch.tensor([span.length for span in self._spans]),
            prompts=tuple(self._prompts),
            spans=tuple(self._spans),
            padding=self._padding,
        )
