"""The embedded engine: continuous batching over any decoder-only model that transformers loads.

`submit` puts a request in line; `step` admits, decodes one token for every running sample and returns what
finished. A prompt is run once for all of its samples; a slot that falls free is refilled in the next step.

With `batch_invariant` every pass has the same shapes (one prompt per prefill; all slots and the full key
length per decode), so a sample's bits do not depend on its batch mates. Otherwise only what is in use is
computed.

One thread at a time: the engine holds no locks.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from transformers import PreTrainedModel

from rondo.engines.keyvalues import Decode, KeyValues, PromptState
from rondo.engines.sampling import sample
from rondo.engines.servable import longest_sequence, make_servable, run_prompts, run_tokens, score_prompt
from rondo.engines.slots import Finish, Slots
from rondo.types import Sampling

BASE_VERSION = -1  # the weights the engine was started with

_DEFAULT_LENGTH = 4096
_KEY_BUCKET = 16  # decoded key lengths are rounded up: few shapes, little waste
_PREFILL_TOKENS = 4096  # padded tokens of one prefill pass


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    prompt: tuple[int, ...]  # [P]
    n: int = 1
    seed: int  # sample i is drawn with seed + i
    sampling: Sampling


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    token_ids: list[int]  # [R], the stop token included
    logps: list[float]  # [R]
    finish: Finish


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    ticket: int
    samples: tuple[Sample, ...]  # [n], in sample order
    version: tuple[int, int]  # weights when the prompt was run and when the last sample ended
    queued_seconds: float
    running_seconds: float
    moments: tuple[float, float, float]  # admitted, first token, finished; on this process's monotonic clock


@dataclass(kw_only=True, slots=True, eq=False)
class _Job:
    """A request under way."""

    ticket: int
    request: Request
    submitted: float
    started: float = 0.0
    first_token: float = 0.0
    version: int = BASE_VERSION
    prompt: PromptState | None = None
    admitted: int = 0  # samples that were given a slot
    samples: dict[int, Sample] = field(default_factory=dict)  # those that ended


class EmbeddedEngine:
    def __init__(
        self,
        model: PreTrainedModel,
        *,
        slots: int = 64,
        max_model_len: int = 0,
        batch_invariant: bool = False,
    ) -> None:
        self.model = model
        self.max_model_len = max_model_len or min(longest_sequence(model), _DEFAULT_LENGTH)
        self.batch_invariant = batch_invariant
        self.version = BASE_VERSION
        self.paused = False
        self.busy_seconds = 0.0
        self.tokens = 0
        self.slots = Slots(slots, self.max_model_len)
        example = make_servable(model, self.max_model_len, batch_invariant=batch_invariant)
        length = self.max_model_len if batch_invariant else min(self.max_model_len, 256)
        self._cache = KeyValues(like=example, slots=slots, length=length)
        self._device = example.logits.device
        self._dtype = example.layers[0][0].dtype
        self._tickets = itertools.count()
        self._waiting: deque[_Job] = deque()  # not begun
        self._partial: deque[_Job] = deque()  # begun, with samples that have no slot yet
        self._jobs: dict[int, _Job] = {}  # begun
        self._unfit = False  # a NaN was seen: the buffers may hold some

    @property
    def running(self) -> int:
        """Requests begun."""
        return len(self._jobs)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def idle(self) -> bool:
        """Nothing that a step could do."""
        return not self._jobs and (self.paused or not self._waiting)

    def submit(self, request: Request) -> int:
        ticket = next(self._tickets)
        self._waiting.append(_Job(ticket=ticket, request=request, submitted=time.monotonic()))
        return ticket

    def abort(self, ticket: int) -> None:
        """Forget a request; its slots are free in the next step. Unknown and finished ones are ignored."""
        self._waiting = deque(job for job in self._waiting if job.ticket != ticket)
        self._partial = deque(job for job in self._partial if job.ticket != ticket)
        if self._jobs.pop(ticket, None):
            self.slots.release(self.slots.rows_of(ticket))

    def abort_running(self) -> list[Result]:
        """End everything that has begun, with what it has drawn so far."""
        results = []
        for job in list(self._jobs.values()):
            for row in self.slots.rows_of(job.ticket):
                self._end(job, row, "abort")
            for index in range(job.admitted, job.request.n):
                job.samples[index] = Sample(token_ids=[], logps=[], finish="abort")
            results.append(self._result(job))
            self.abort(job.ticket)
        return results

    def weights_changed(self, version: int) -> None:
        assert not self._jobs, "weights may change only between requests"
        self.version = version
        if self._unfit:
            self._cache.clear()
            self._unfit = False

    @torch.inference_mode()
    def prompt_logps(self, prompt: Sequence[int]) -> list[float]:
        """Log-probs (temperature 1) of each token but the first, given those before it."""
        return score_prompt(self.model, prompt, self.max_model_len, self._device)

    @torch.inference_mode()
    def step(self) -> list[Result]:
        began = time.monotonic()
        results: list[Result] = []
        if self.slots.free and (self._partial or (self._waiting and not self.paused)):
            results += self._admit()
        if self.slots.running:
            results += self._decode()
        self.busy_seconds += time.monotonic() - began
        return results

    def _admit(self) -> list[Result]:
        """Give free slots to samples in order of arrival, and draw their first tokens."""
        rows: list[int] = []
        logits: list[torch.Tensor] = []
        jobs = self._next_jobs()
        for job, count in jobs:
            assert job.prompt is not None
            request, taken = job.request, self.slots.take(count)
            self.slots.start(
                taken,
                owner=job.ticket,
                first_sample=job.admitted,
                seed=request.seed,
                prompt_tokens=len(request.prompt),
                sampling=request.sampling,
            )
            self._cache.grow(len(request.prompt))
            self._cache.fill(taken, job.prompt)
            rows += taken
            logits.append(job.prompt.logits.expand(count, -1))
            job.admitted += count
            if job.admitted == request.n:
                job.prompt = None
            else:
                self._partial.append(job)
        return self._draw(np.asarray(rows), torch.cat(logits), begun=[job for job, _ in jobs])

    def _next_jobs(self) -> list[tuple[_Job, int]]:
        """Jobs whose samples are next in line and how many of each fit; their prompts have been run."""
        room = self.slots.free
        chosen: list[tuple[_Job, int]] = []
        begun: list[_Job] = []
        while room and (self._partial or (self._waiting and not self.paused)):
            if self._partial:
                job = self._partial.popleft()
            else:
                job = self._waiting.popleft()
                begun.append(job)
            count = min(room, job.request.n - job.admitted)
            chosen.append((job, count))
            room -= count
        while begun:
            batch = [begun.pop(0)]
            while begun and not self.batch_invariant and _fits(batch, begun[0]):
                batch.append(begun.pop(0))
            self._prefill(batch)
        return chosen

    def _prefill(self, jobs: list[_Job]) -> None:
        now = time.monotonic()
        prompts = run_prompts(self.model, [job.request.prompt for job in jobs], self.max_model_len, self._device)
        for job, prompt in zip(jobs, prompts, strict=True):
            job.prompt, job.started, job.version = prompt, now, self.version
            self._jobs[job.ticket] = job

    def _decode(self) -> list[Result]:
        slots = self.slots
        slots.close_holes(self._move)
        active = slots.active
        longest = int(slots.lengths[:active].max()) + 1
        if self.batch_invariant:
            rows, key_length = slots.count, self._cache.length
            slots.lengths[active:] = 0  # unused rows compute something harmless
            slots.last[active:] = 0
        else:
            rows, key_length = active, min(-(-longest // _KEY_BUCKET) * _KEY_BUCKET, self.max_model_len)
            self._cache.grow(key_length)
        positions_R = torch.from_numpy(slots.lengths[:rows]).to(self._device)
        logits_RV = run_tokens(
            self.model,
            torch.from_numpy(slots.last[:rows]).to(self._device),
            positions_R,
            Decode(self._cache, positions_R, key_length, self._dtype),
        )
        slots.lengths[:active] += 1
        return self._draw(slice(0, active), logits_RV[:active])

    def _draw(self, rows: slice | np.ndarray, logits: torch.Tensor, begun: Sequence[_Job] = ()) -> list[Result]:
        tokens, logps = sample(logits.float(), self.slots.draws(rows))
        self.tokens += len(tokens)
        done = self.slots.record(rows, tokens.cpu().numpy(), logps.cpu().numpy()).tolist()
        for job in begun:
            job.first_token = job.first_token or time.monotonic()
        results = []
        for row in done:
            job = self._jobs[int(self.slots.owners[row])]
            self._end(job, row, self.slots.finish(row))
            if len(job.samples) == job.request.n:
                results.append(self._result(job))
                del self._jobs[job.ticket]
        self.slots.release(done)
        return results

    def _end(self, job: _Job, row: int, finish: Finish) -> None:
        token_ids, logps = self.slots.response(row)
        self._unfit |= not np.isfinite(logps).all()
        job.samples[int(self.slots.samples[row])] = Sample(token_ids=token_ids, logps=logps, finish=finish)

    def _result(self, job: _Job) -> Result:
        now = time.monotonic()
        return Result(
            ticket=job.ticket,
            samples=tuple(job.samples[index] for index in range(job.request.n)),
            version=(job.version, self.version),
            queued_seconds=job.started - job.submitted,
            running_seconds=now - job.started,
            moments=(job.started, job.first_token or now, now),
        )

    def _move(self, source: int, target: int) -> None:
        self._cache.move(source, target, int(self.slots.lengths[target]))


def _fits(batch: list[_Job], job: _Job) -> bool:
    """Whether a prompt may join a prefill pass: bounded in size, and at most a quarter of it padding."""
    lengths = [len(member.request.prompt) for member in (*batch, job)]
    padded = len(lengths) * max(lengths)
    return padded <= _PREFILL_TOKENS and sum(lengths) >= 0.75 * padded
