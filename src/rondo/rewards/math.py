"""Is the answer right, as mathematics? A reward over math-verify (`pip install 'rondo-rl[math]'`).

    [rewards]
    functions = ["rondo.rewards.math:correct"]

The row's `answer` is the truth, as LaTeX or plain text. math-verify sets alarms, which work in a process's main thread
only: reward workers have one.
"""

from __future__ import annotations

from typing import Any

from rondo.errors import RewardError

try:
    from math_verify import parse, verify
except ModuleNotFoundError:
    raise RewardError("rondo.rewards.math needs math-verify: pip install 'rondo-rl[math]'") from None

SECONDS = 5  # for one answer


def correct(prompts: list[Any], completions: list[Any], answer: list[Any], **columns: Any) -> list[float]:
    """1 where the last answer in the completion equals the row's `answer`."""
    wanted_texts = [str(wanted) for wanted in answer]
    truths = {wanted: parse(_marked(wanted), parsing_timeout=SECONDS) for wanted in set(wanted_texts)}
    for wanted, truth in truths.items():
        if not truth:
            raise RewardError(f"the row's answer {wanted!r} is no mathematics that math-verify can read")
    return [_score(truths[wanted], _text(given)) for given, wanted in zip(completions, wanted_texts, strict=True)]


def _score(truth: Any, said: str) -> float:
    given = parse(said, parsing_timeout=SECONDS)
    return float(bool(given) and bool(verify(truth, given, timeout_seconds=SECONDS)))


def _marked(answer: str) -> str:
    return answer if "$" in answer or "\\boxed" in answer else f"${answer}$"


def _text(completion: Any) -> str:
    return completion if isinstance(completion, str) else str(completion[-1]["content"])
