"""Does the program do what its tests ask? Runs code that a model wrote, locked in (see sandbox.py).

    [rewards]
    functions = ["rondo.rewards.code:passes"]         # 1 where every test passes; passed_share: how many of them
    seconds = 120                                     # for a whole group: every program may take seconds per test

The row's column `tests` is a list: of statements such as "assert add(1, 2) == 3", run after the program; or of
{"input": ..., "output": ...}, what the program reads and must print. The program is the completion's last fenced block,
or all of it.

A program that ends early passes nothing. Statements run in the program's own interpreter, so one that sets out to
deceive them can: where that matters, use inputs and outputs, which are compared outside. On a machine that cannot lock
programs in, a run that names this reward does not start.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rondo.errors import RewardError
from rondo.rewards.sandbox import Limits, SandboxRefused, refusal, run_python

if why := refusal():  # before anything is generated for it
    raise SandboxRefused(why)

LIMITS = Limits()
FENCED = re.compile(r"```[ \t]*(?:python3?|py)?[ \t]*\n(.*?)```", re.DOTALL | re.IGNORECASE)
# The word that says "all of it ran" is read after the program: one that exits before has not seen it.
STATEMENT = """
import sys as _sys
_word = open("word").read()
{test}
_sys.__stdout__.write("\\n" + _word)
_sys.__stdout__.flush()
"""


def passes(prompts: list[Any], completions: list[Any], tests: list[list[Any]], **columns: Any) -> list[float]:
    """1 where every test passes."""
    return [float(share == 1.0) for share in passed_share(prompts, completions, tests)]


def passed_share(prompts: list[Any], completions: list[Any], tests: list[list[Any]], **columns: Any) -> list[float]:
    """The share of the tests that pass."""
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        return list(pool.map(_share, map(program_of, completions), tests))


def program_of(completion: Any) -> str:
    text = completion if isinstance(completion, str) else str(completion[-1]["content"])
    blocks = FENCED.findall(text)
    return str(blocks[-1]) if blocks else text


def _share(program: str, tests: list[Any]) -> float:
    if not isinstance(tests, list) or not tests:
        raise RewardError('the column tests must be a list of statements or of {"input": ..., "output": ...}')
    return sum(_passes(program, test) for test in tests) / len(tests)


def _passes(program: str, test: Any) -> bool:
    if isinstance(test, str):
        word = secrets.token_hex(8)
        ended = run_python(program + STATEMENT.format(test=test), files={"word": word}, limits=LIMITS)
        return ended.code == 0 and ended.out.endswith("\n" + word)
    if not isinstance(test, Mapping) or not {"input", "output"} <= test.keys():
        raise RewardError(f'a test is a statement or {{"input": ..., "output": ...}}, not {test!r}')
    ended = run_python(program, stdin=str(test["input"]), limits=LIMITS)
    return ended.code == 0 and ended.out.split() == str(test["output"]).split()
