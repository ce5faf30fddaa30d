"""Rows to token ids, with the demo's own tokenizer."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoTokenizer

from rondo.config import asset_or_path
from rondo.errors import DataError
from rondo.prompts.dataset import Row
from rondo.prompts.template import Template

CHAT = "{% for message in messages %}{{ message['content'] }};{% endfor %}{% if add_generation_prompt %}={% endif %}"


@pytest.fixture
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(asset_or_path("rondo:arithmetic"))


def make_template(tokenizer: Any, max_new_tokens: int = 4, max_context: int = 16) -> Template:
    return Template(tokenizer=tokenizer, max_new_tokens=max_new_tokens, max_context=max_context)


def chat_row(**columns: Any) -> Row:
    return Row(ordinal=3, prompt=({"role": "user", "content": "1+2"},), columns=columns)


def test_a_string_is_tokenised_as_it_is(tokenizer: Any) -> None:
    prompt = make_template(tokenizer).render(Row(ordinal=7, prompt="12+34=", columns={"answer": "64"}))
    assert prompt.ordinal == 7
    assert prompt.text == "12+34="
    assert tokenizer.decode(prompt.token_ids) == "12+34="
    assert all(type(token) is int for token in prompt.token_ids)
    assert prompt.columns == {"answer": "64"}


def test_messages_go_through_the_chat_template_and_stay_at_hand(tokenizer: Any) -> None:
    tokenizer.chat_template = CHAT
    prompt = make_template(tokenizer).render(chat_row(answer="3"))
    assert prompt.text == "1+2;="
    assert tokenizer.decode(prompt.token_ids) == "1+2;="
    assert all(type(token) is int for token in prompt.token_ids)
    assert prompt.columns == {"answer": "3"}
    assert prompt.messages == ({"role": "user", "content": "1+2"},)


class OldTokenizer:
    """transformers 4 returned the ids alone from apply_chat_template."""

    chat_template = CHAT

    def apply_chat_template(self, messages: Any, *, add_generation_prompt: bool, tokenize: bool) -> Any:
        return [5, 6] if tokenize else "text"


def test_a_template_that_returns_plain_ids_is_understood() -> None:
    assert make_template(OldTokenizer()).render(chat_row()).token_ids == (5, 6)


def test_messages_without_a_chat_template_are_refused(tokenizer: Any) -> None:
    with pytest.raises(DataError, match=r"data row 3 \('1\+2'\) holds chat messages.*has no chat template"):
        make_template(tokenizer).render(chat_row())


def test_a_chat_template_s_own_refusal_is_passed_on(tokenizer: Any) -> None:
    tokenizer.chat_template = "{{ raise_exception('a system message first, please') }}"
    with pytest.raises(DataError, match=r"data row 3 .* refuses the messages: a system message first, please"):
        make_template(tokenizer).render(chat_row())


def test_a_messages_column_beside_a_string_prompt_is_kept(tokenizer: Any) -> None:
    prompt = make_template(tokenizer).render(Row(ordinal=0, prompt="1+1=", columns={"messages": "mine"}))
    assert prompt.columns == {"messages": "mine"}
    assert prompt.messages is None


def test_a_prompt_that_just_fits_the_context_is_taken(tokenizer: Any) -> None:
    row = Row(ordinal=0, prompt="12+34=", columns={})
    assert len(make_template(tokenizer, max_context=10).render(row).token_ids) == 6


def test_a_prompt_that_leaves_no_room_for_the_response_is_refused(tokenizer: Any) -> None:
    row = Row(ordinal=9, prompt="12+34=" * 40, columns={})
    with pytest.raises(DataError) as caught:
        make_template(tokenizer).render(row)
    assert str(caught.value) == (
        f"data row 9 ('{'12+34=' * 10}...'): 240 prompt tokens and rollout.max_new_tokens = 4 exceed the model's "
        "context of 16: shorten the prompt, or lower rollout.max_new_tokens"
    )


def test_a_prompt_without_tokens_is_refused(tokenizer: Any) -> None:
    tokenizer.chat_template = "{{ '' }}"
    with pytest.raises(DataError, match=r"data row 3 .*: the prompt has no tokens"):
        make_template(tokenizer).render(chat_row())
