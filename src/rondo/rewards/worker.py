"""The process in which reward functions run: `python -m rondo.rewards.worker`.

JSON lines in, JSON lines out. The first line in is {"functions": [...], "memory_mb": ...}, answered by {"ready": true}
or {"error": sentence}. Then each {"id", "prompt", "completions", "completion_ids", "columns"} is answered by one
{"id", "running": name} per function, as it starts, and at last by {"id", "parts": {name: [...]}} or
{"id", "error": sentence, "traceback": text}. The end of stdin is the end of the process.

One thread, one request at a time: it waits for the next line and nothing else. User code finds stdin empty
and stdout pointing at stderr, so that what it reads or prints cannot touch the protocol. Time limits are the
parent's; the memory limit is the kernel's, set before any user code is imported.
"""

from __future__ import annotations

import ctypes
import inspect
import json
import os
import resource
import signal
import sys
import traceback
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, BinaryIO

from rondo.errors import RewardError
from rondo.rewards.base import RewardFunction, call_arguments, check_applies, checked, described, resolve_all

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop

PR_SET_PDEATHSIG = 1


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    _die_with_parent()
    requests, answers = _take_over_pipes()

    def answer(**fields: Any) -> None:
        answers.write(json.dumps(fields).encode() + b"\n")
        answers.flush()

    serve(requests, answer)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # a thread that user code left behind must not keep the process


def serve(requests: BinaryIO, answer: Callable[..., None]) -> None:
    """Resolve the functions, then score one group per line until the lines end."""
    first = requests.readline()
    if not first:
        return
    told = json.loads(first)
    _limit_memory(told.get("memory_mb", 0))
    try:
        functions = resolve_all(told["functions"])
    except RewardError as error:
        answer(error=str(error), traceback=traceback.format_exc())
        return
    answer(ready=True)
    awaiting = _Awaiting()
    for line in requests:
        request = json.loads(line)
        ticket = request.pop("id")
        try:
            parts = _score(functions, request, awaiting, partial(answer, id=ticket), told.get("memory_mb", 0))
        except BaseException as error:  # user code, SystemExit included: the failure becomes an answer
            answer(id=ticket, error=str(error), traceback=traceback.format_exc())
        else:
            answer(id=ticket, parts=parts)


def _score(
    functions: Mapping[str, RewardFunction],
    request: dict[str, Any],
    awaiting: _Awaiting,
    answer: Callable[..., None],
    memory_mb: int,
) -> dict[str, list[float | None]]:
    arguments = call_arguments(**request)
    parts = {}
    for name, function in functions.items():
        answer(running=name)
        try:
            outcome = function(**arguments)
            if inspect.isawaitable(outcome):
                outcome = awaiting.run(outcome)
        except MemoryError as error:
            raise RewardError(f"reward {name} needed more than {memory_mb} MB (rewards.memory_mb)") from error
        except BaseException as error:
            raise RewardError(f"reward {name} raised {described(error)}") from error
        parts[name] = checked(name, outcome, len(request["completions"]))
    check_applies(parts)
    return parts


class _Awaiting:
    """One event loop for all calls, since user code may keep a client that is tied to it."""

    def __init__(self) -> None:
        self._loop: AbstractEventLoop | None = None

    def run(self, outcome: Awaitable[Any]) -> Any:
        import asyncio  # a third of the start-up time, and most rewards are plain

        async def awaited() -> Any:
            return await outcome

        self._loop = self._loop or asyncio.new_event_loop()
        return self._loop.run_until_complete(awaited())


def _take_over_pipes() -> tuple[BinaryIO, BinaryIO]:
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # prints survive a kill
    return requests, answers


def _limit_memory(megabytes: int) -> None:
    """Of what a process writes to; what it merely maps (libraries, a device's address space) does not count."""
    if megabytes:
        resource.setrlimit(resource.RLIMIT_DATA, (megabytes << 20, megabytes << 20))


def _die_with_parent() -> None:
    """A function that hangs would outlive a killed parent: it never gets to the end of stdin."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    main()
