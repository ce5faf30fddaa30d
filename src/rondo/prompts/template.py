"""Rows to prompts: strings as they are, chat messages through the tokenizer's own template."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rondo.errors import DataError
from rondo.prompts.dataset import Messages, Row
from rondo.types import Prompt

EXCERPT = 60


class Template:
    """Renders rows with one tokenizer, and refuses what would not fit the model's context."""

    def __init__(self, *, tokenizer: Any, max_new_tokens: int, max_context: int) -> None:
        self._tokenizer = tokenizer  # a transformers tokenizer
        self._max_new_tokens = max_new_tokens
        self._max_context = max_context

    def render(self, row: Row) -> Prompt:
        if isinstance(row.prompt, str):
            text, messages = row.prompt, None
            encoded = self._tokenizer(text)
        else:
            messages = row.prompt
            text, encoded = self._chat(row.ordinal, messages)
        # transformers 5 returns a mapping where 4 returned the ids alone.
        token_ids = tuple(encoded["input_ids"] if isinstance(encoded, Mapping) else encoded)
        self._check_length(_named(row.ordinal, text), len(token_ids))
        return Prompt(ordinal=row.ordinal, text=text, token_ids=token_ids, columns=row.columns, messages=messages)

    def _chat(self, ordinal: int, messages: Messages) -> tuple[str, Any]:
        named = _named(ordinal, str(messages[-1]["content"]))
        if not getattr(self._tokenizer, "chat_template", None):
            raise DataError(
                f"{named} holds chat messages, but the model's tokenizer has no chat template: "
                "use a model that has one, or write the prompts as strings"
            )
        render = self._tokenizer.apply_chat_template
        try:
            text = render(list(messages), add_generation_prompt=True, tokenize=False)
            return text, render(list(messages), add_generation_prompt=True, tokenize=True)
        except Exception as error:  # templates raise what they like about messages they do not take
            raise DataError(f"{named}: the tokenizer's chat template refuses the messages: {error}") from error

    def _check_length(self, named: str, length: int) -> None:
        if not length:
            raise DataError(f"{named}: the prompt has no tokens: give it some text")
        if length + self._max_new_tokens > self._max_context:
            raise DataError(
                f"{named}: {length} prompt tokens and rollout.max_new_tokens = {self._max_new_tokens} exceed "
                f"the model's context of {self._max_context}: shorten the prompt, "
                "or lower rollout.max_new_tokens"
            )


def _named(ordinal: int, text: str) -> str:
    excerpt = text if len(text) <= EXCERPT else f"{text[:EXCERPT]}..."
    return f"data row {ordinal} ({excerpt!r})"
