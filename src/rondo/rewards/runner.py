"""Scores groups in worker processes, under a hard time limit.

Three kinds of concurrent pieces, all in one event loop:

- `score` consumes a free worker and a group, and produces its Scores. It waits for a worker (woken by the
  `score` that returns one) and then for its answer (woken by the answer, the worker's end or the time limit).
- A worker process consumes request lines and produces answer lines; it waits for its stdin. Its output and
  its end wake the `score` that holds it. See worker.py.
- `close` kills every process, which wakes every `score` that holds one; each returns its place and so wakes
  the next that waits. `close` waits for all places and for the end of all processes: nothing is left.

A worker's place is in the queue `_free` or held by exactly one `score`; None is a place whose process is yet
to be started, at first and after a kill.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from rondo.errors import DiedError, RewardError
from rondo.rewards.base import part_names

START_SECONDS = 120.0  # a reward function may import a large library
DEATHS = 3  # of workers, before the group they were scoring is to blame
EVIDENCE_KEPT = 20  # files that on_error = "zero" writes; "fail" stops at its first


@dataclass(frozen=True, kw_only=True, slots=True)
class Scores:
    """The rewards of one group."""

    rewards: tuple[float, ...]  # [G], the weighted sum
    parts: Mapping[str, tuple[float, ...]]  # per function, [G], unweighted; nan where it did not apply
    failed: bool  # the functions failed and on_error = "zero" made up these zeros


class RewardRunner:
    """Worker processes that score one group at a time each."""

    def __init__(
        self,
        functions: Sequence[str],
        weights: Sequence[float],
        seconds: float,
        on_error: str,
        workers: int,
        log: Path,
        evidence: Path,
        memory_mb: int = 0,
        on_retry: Callable[[str], None] = lambda sentence: None,
    ) -> None:
        self.failures = 0  # groups that could not be scored
        self.retries = 0  # groups that were scored again because a worker died
        self._memory_mb = memory_mb
        self._on_retry = on_retry
        self._functions = tuple(functions)
        self._weights = dict(zip(part_names(functions), weights or [1.0] * len(functions), strict=True))
        self._seconds = seconds
        self._on_error = on_error
        self._places = workers
        self._log = log
        self._evidence = evidence
        self._closed = False
        self._closing = asyncio.Lock()  # two that collect places would starve each other
        self._processes: set[_Worker] = set()
        self._free: asyncio.Queue[_Worker | None] = asyncio.Queue()
        for _ in range(workers):
            self._free.put_nowait(None)

    async def start(self) -> None:
        """Start every worker; RewardError if the functions cannot be found."""
        try:
            await asyncio.gather(*(self._warm() for _ in range(self._places)))
        except BaseException:
            await self.close()
            raise

    async def score(
        self,
        prompt: str | list[dict[str, Any]],
        completions: list[str],
        completion_ids: list[list[int]],
        columns: Mapping[str, Any],
    ) -> Scores:
        request = {
            "prompt": prompt,
            "completions": completions,
            "completion_ids": completion_ids,
            "columns": dict(columns),
        }
        try:
            return self._scores(await self._ask(request))
        except _ScoringError as failure:
            return self._fail(failure, request)

    async def close(self) -> None:
        """End every process, also those that are in the middle of a group."""
        self._closed = True
        for worker in self._processes:
            worker.kill()
        async with self._closing, AsyncExitStack() as places:
            for _ in range(self._places):
                await self._free.get()
                places.callback(self._free.put_nowait, None)  # a late `score` must find one to be refused
            if self._processes:
                await asyncio.wait([worker.gone for worker in self._processes])

    async def _ask(self, request: Mapping[str, Any]) -> dict[str, list[float | None]]:
        """A worker that somebody killed is no verdict on the function: the group goes to a fresh one. A group that ends
        every worker it meets is."""
        for attempt in range(DEATHS):
            try:
                async with self._worker() as worker:
                    return await worker.ask(request, self._seconds)
            except _WorkerDied as death:
                if attempt == DEATHS - 1:
                    raise _ScoringError(f"{death}, {DEATHS} times") from None
                self.retries += 1
                self._on_retry(f"{death}: the group is scored again")
        raise AssertionError("unreachable")

    async def _warm(self) -> None:
        async with self._worker():
            pass

    @asynccontextmanager
    async def _worker(self) -> AsyncIterator[_Worker]:
        worker = await self._free.get()
        try:
            if self._closed:
                raise _closed()
            worker = worker or await self._spawn()
            yield worker
        except _ScoringError:
            if self._closed:  # that was `close`, not the functions
                raise _closed() from None
            raise
        finally:
            self._free.put_nowait(worker if worker and worker.alive else None)

    async def _spawn(self) -> _Worker:
        worker = await _spawn(self._log)
        self._processes.add(worker)
        worker.gone.add_done_callback(lambda _: self._processes.discard(worker))
        if self._closed:  # `close` looked while this process was being started
            worker.kill()
        await worker.introduce(self._functions, self._memory_mb)
        return worker

    def _scores(self, parts: Mapping[str, Sequence[float | None]]) -> Scores:
        columns_G = zip(*(parts[name] for name in self._weights), strict=True)
        return Scores(
            rewards=tuple(
                sum(w * value for w, value in zip(self._weights.values(), values, strict=True) if value is not None)
                for values in columns_G
            ),
            parts={
                name: tuple(float("nan") if value is None else value for value in values)
                for name, values in parts.items()
            },
            failed=False,
        )

    def _fail(self, failure: _ScoringError, request: Mapping[str, Any]) -> Scores:
        self.failures += 1
        kept = ""
        if self._on_error == "fail" or self.failures <= EVIDENCE_KEPT:
            kept = f"; prompt, completions and traceback are in {self._keep(failure, request)}"
        if self._on_error == "fail":
            raise RewardError(f"{failure}{kept}") from None
        zeros = (0.0,) * len(request["completions"])
        return Scores(rewards=zeros, parts=dict.fromkeys(self._weights, zeros), failed=True)

    def _keep(self, failure: _ScoringError, request: Mapping[str, Any]) -> Path:
        self._evidence.mkdir(parents=True, exist_ok=True)
        names = (self._evidence / f"reward-error-{number:04}.txt" for number in count(1))
        path = next(name for name in names if not name.exists())
        path.write_text(_evidence(failure, request), encoding="utf-8")
        return path


def check_functions(functions: Sequence[str]) -> None:
    """RewardError unless a worker process finds all functions. User code is never imported here."""

    async def check() -> None:
        worker = await _spawn(Path(os.devnull))
        try:
            await worker.introduce(functions)
        finally:
            worker.kill()
            await worker.gone

    asyncio.run(check())


class _ScoringError(RewardError):
    """A group that could not be scored, or a worker that could not start."""

    def __init__(self, sentence: str, traceback: str = "") -> None:
        super().__init__(sentence)
        self.traceback = traceback


class _WorkerDied(_ScoringError):  # noqa: N818
    """The process ended before it answered."""


class _Worker(asyncio.SubprocessProtocol):
    """One worker process: a request in, its answer out. Made and used in one event loop.

    A protocol rather than asyncio's streams: those have a longest line, and their `wait` outlasts the process
    for as long as a grandchild holds the pipe.
    """

    def __init__(self) -> None:
        self.gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.alive = True
        self._buffer = bytearray()
        self._lines: asyncio.Queue[bytes | None] = asyncio.Queue()  # None: there will be no more
        self._tickets = count(1)
        self._exit_status: int | None = None

    async def introduce(self, functions: Sequence[str], memory_mb: int = 0) -> None:
        answer = await self._exchange(
            {"functions": list(functions), "memory_mb": memory_mb},
            f"importing {', '.join(functions)}",
            START_SECONDS,
            "to start",
        )
        if "error" in answer:
            self.kill()
            raise _ScoringError(answer["error"], answer["traceback"])

    async def ask(self, request: Mapping[str, Any], seconds: float) -> dict[str, list[float | None]]:
        request = {"id": next(self._tickets), **request}
        answer = await self._exchange(request, "a reward function", seconds, "for one group (rewards.seconds)")
        if "error" in answer:
            raise _ScoringError(answer["error"], answer["traceback"])
        return answer["parts"]  # type: ignore[no-any-return]

    def kill(self) -> None:
        """End the process and all that it started; `gone` says when that is done."""
        self.alive = False
        if self._exit_status is None:
            self._kill_group()
        else:
            self._transport.close()

    async def _exchange(self, message: Mapping[str, Any], what: str, seconds: float, limit: str) -> dict[str, Any]:
        """Send a line, wait for its answer. However this ends early, the worker is killed: it may be busy."""
        sent = json.dumps(message).encode() + b"\n"
        pipe = self._transport.get_pipe_transport(0)
        assert isinstance(pipe, asyncio.WriteTransport)
        try:
            async with asyncio.timeout(seconds):
                pipe.write(sent)
                while (line := await self._lines.get()) is not None:
                    answer: dict[str, Any] = json.loads(line)
                    if "running" not in answer:
                        return answer
                    what = f"reward {answer['running']}"
        except TimeoutError:
            self.kill()
            raise _ScoringError(f"{what} took over {seconds:g} s {limit} and was killed") from None
        except BaseException:
            self.kill()
            raise
        self.alive = False
        raise _WorkerDied(f"{what} ended its worker process ({_status(self._exit_status)})")

    def _kill_group(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._transport.get_pid(), signal.SIGKILL)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.SubprocessTransport)
        self._transport = transport

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        *lines, rest = data.split(b"\n")
        for line in lines:
            self._lines.put_nowait(bytes(self._buffer) + line)
            self._buffer.clear()
        self._buffer += rest

    def process_exited(self) -> None:
        self._exit_status = self._transport.get_returncode()
        self._kill_group()  # what user code started dies too, and with it the last holder of our pipes
        if not self.alive:
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport.close()  # a no-op by now, but asyncio warns of one that nobody closed
        self._lines.put_nowait(None)
        if not self.gone.done():  # cancelled with the one who waited for it
            self.gone.set_result(None)


async def _spawn(log: Path) -> _Worker:
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as errors:
        _, worker = await asyncio.get_running_loop().subprocess_exec(
            _Worker, sys.executable, "-m", "rondo.rewards.worker", stderr=errors, start_new_session=True
        )
    return worker


def _closed() -> DiedError:
    return DiedError("the reward workers were closed before this group was scored")


def _status(status: int | None) -> str:
    if status is None or status >= 0:
        return f"exit status {status}"
    return f"killed by {signal.Signals(-status).name}"


def _evidence(failure: _ScoringError, request: Mapping[str, Any]) -> str:
    prompt = request["prompt"]
    sections = {"prompt": prompt if isinstance(prompt, str) else json.dumps(prompt, indent=2, ensure_ascii=False)}
    for place, completion in enumerate(request["completions"], start=1):
        sections[f"completion {place} of {len(request['completions'])}"] = completion
    sections["columns"] = json.dumps(request["columns"], indent=2, ensure_ascii=False)
    sections["traceback"] = failure.traceback or "none: the worker process ended"
    return f"{failure}\n" + "".join(f"\n== {title} ==\n{text}\n" for title, text in sections.items())
