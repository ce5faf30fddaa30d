"""The reward of the arithmetic demo: is the sum right?"""

from __future__ import annotations

import re
from typing import Any

END_OF_TEXT = re.compile(r"<\|(endoftext|im_end|eot_id)\|>|</s>|<eos>")


def correct(prompts: list[Any], completions: list[Any], answer: list[str], **columns: Any) -> list[float]:
    """1 where the completion, up to the end of text, is the row's `answer`."""
    return [float(_said(given) == wanted) for given, wanted in zip(completions, answer, strict=True)]


def _said(completion: Any) -> str:
    text: str = completion if isinstance(completion, str) else completion[-1]["content"]
    return END_OF_TEXT.split(text, maxsplit=1)[0].strip()
