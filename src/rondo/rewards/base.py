"""Reward functions: how they are named, found, called and checked.

A reward function is TRL's: `def reward(prompts, completions, **columns) -> list[float]`, plain or async.
Every argument is a list with one entry per completion; the row's columns are repeated, and `completion_ids`
is among the keywords. Where the data holds chat messages, a prompt is a list of messages and a completion is
a list with one assistant message; elsewhere both are strings. An entry of None says that the function does
not apply to that completion.

Imported by the worker process, which has to start fast: nothing heavy in here.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import os
import reprlib
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from pathlib import Path
from types import ModuleType
from typing import Any
from zlib import crc32

from rondo.errors import RewardError

RewardFunction = Callable[..., Any]
RESERVED = ("prompts", "completions", "completion_ids")


def part_names(functions: Sequence[str]) -> tuple[str, ...]:
    """One distinct name per function: its own, or all of `pkg.module:function` where two share theirs."""
    short = [function.rpartition(":")[2] for function in functions]
    return tuple(full if short.count(name) > 1 else name for name, full in zip(short, functions, strict=True))


def resolve_all(functions: Sequence[str]) -> dict[str, RewardFunction]:
    """The callables by part name, in the order given."""
    for function in functions:
        if functions.count(function) > 1:
            raise RewardError(f"reward {function} is listed twice: list it once and raise its weight")
    return {name: resolve(function) for name, function in zip(part_names(functions), functions, strict=True)}


def resolve(function: str) -> RewardFunction:
    """The callable that `pkg.module:function` or `path/to/file.py:function` names."""
    target, _, name = function.rpartition(":")
    if not target or not name:
        raise RewardError(f"reward {function}: write it as pkg.module:function or path/to/file.py:function")
    module = _file(function, Path(target)) if target.endswith(".py") else _module(function, target)
    if not hasattr(module, name):
        raise RewardError(f"reward {function}: {target} has no {name}")
    found = getattr(module, name)
    if not callable(found):
        raise RewardError(f"reward {function}: {name} is a {type(found).__name__}, not a function")
    return found  # type: ignore[no-any-return]


def call_arguments(
    prompt: str | list[dict[str, Any]],
    completions: list[str],
    completion_ids: list[list[int]],
    columns: Mapping[str, Any],
) -> dict[str, list[Any]]:
    """The keywords of one call."""
    for name in RESERVED:
        if name in columns:
            raise RewardError(f"the data has a column {name}, a keyword that reward functions get anyway: rename it")
    chat = not isinstance(prompt, str)
    return {
        "prompts": [prompt] * len(completions),
        "completions": [[{"role": "assistant", "content": text}] for text in completions] if chat else completions,
        "completion_ids": completion_ids,
        **{name: [value] * len(completions) for name, value in columns.items()},
    }


def checked(name: str, outcome: Any, count: int) -> list[float | None]:
    """What function `name` returned, as `count` finite floats (None: does not apply)."""
    if hasattr(outcome, "tolist"):  # numpy and torch, without importing either
        outcome = outcome.tolist()
    if not isinstance(outcome, Sequence) or isinstance(outcome, str | bytes):
        raise RewardError(f"reward {name} returned {_article(outcome)}, not a list of {count} numbers")
    if len(outcome) != count:
        raise RewardError(f"reward {name} returned {len(outcome)} numbers for {count} completions")
    return [
        _number(value, f"reward {name} returned {reprlib.repr(value)} for completion {place} of {count}")
        for place, value in enumerate(outcome, start=1)
    ]


def check_applies(parts: Mapping[str, Sequence[float | None]]) -> None:
    for place, values in enumerate(zip(*parts.values(), strict=True), start=1):
        if all(value is None for value in values):
            raise RewardError(
                f"reward {', '.join(parts)} returned None for completion {place}: none is left to score it"
            )


def described(error: BaseException) -> str:
    """An exception of the user's code on one line, with the place that raised it."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_theirs(frame.filename)]
    place = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    text = " ".join(str(error).split())
    return type(error).__name__ + (f": {text}" if text else "") + place


def _is_theirs(filename: str) -> bool:
    return not filename.startswith("<") and filename not in (
        __file__,
        str(Path(__file__).with_name("worker.py")),
    )


def _number(value: Any, complaint: str) -> float | None:
    if value is None:
        return None
    if hasattr(value, "tolist"):  # a numpy or torch scalar
        value = value.tolist()
    if not isinstance(value, Real):
        raise RewardError(f"{complaint}, which is not a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise RewardError(f"{complaint}, which is not finite")
    return number


def _article(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__name__}"


def _module(function: str, target: str) -> ModuleType:
    try:
        return importlib.import_module(target)
    except ModuleNotFoundError as error:
        # Said of the module itself or of a package above it; otherwise it is there and lacks another.
        if error.name and f"{target}.".startswith(f"{error.name}."):
            raise RewardError(
                f"reward {function}: there is no module {error.name}; a file is written path/to/file.py:function"
            ) from None
        raise RewardError(f"reward {function}: importing {target} failed: {described(error)}") from error
    except BaseException as error:  # user code: SystemExit included
        raise RewardError(f"reward {function}: importing {target} failed: {described(error)}") from error


def _file(function: str, path: Path) -> ModuleType:
    if not path.is_file():
        raise RewardError(f"reward {function}: there is no file {path} in {os.getcwd()}")
    path = path.resolve()
    name = f"rondo_reward_{path.stem}_{crc32(str(path).encode()):08x}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))  # its neighbours, last: a json.py among them must not shadow ours
    try:
        spec.loader.exec_module(module)
    except BaseException as error:  # user code: SystemExit included
        del sys.modules[name]
        raise RewardError(f"reward {function}: importing {path} failed: {described(error)}") from error
    return module
