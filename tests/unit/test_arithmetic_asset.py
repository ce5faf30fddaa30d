"""The demo's model, tokenizer and data are what the demo counts on."""

import json
import re
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

import rondo

ASSET = Path(rondo.__file__).parent / "assets" / "arithmetic"


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(ASSET)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(ASSET)


def rows(name: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in (ASSET / name).read_text().splitlines()]


def test_every_character_survives_a_round_trip(tokenizer: PreTrainedTokenizerBase) -> None:
    characters = [tokenizer.decode([i]) for i in range(len(tokenizer)) if i not in tokenizer.all_special_ids]
    assert {*"0123456789+-= \n"} <= {*characters}
    assert all(len(character) == 1 for character in characters)
    text = "".join(characters)
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == len(characters)
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=True) == text
    assert all(tokenizer.decode(tokenizer(character)["input_ids"]) == character for character in characters)


def test_a_prompt_is_one_token_per_character(tokenizer: PreTrainedTokenizerBase) -> None:
    for row in rows("eval.jsonl"):
        ids = tokenizer(row["prompt"])["input_ids"]
        assert tokenizer.convert_ids_to_tokens(ids) == list(row["prompt"])


def test_the_end_token_is_one_special_token_that_model_and_tokenizer_agree_on(
    tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel
) -> None:
    assert tokenizer("58<eos>")["input_ids"][-1] == tokenizer.eos_token_id
    assert tokenizer.eos_token_id != tokenizer.pad_token_id
    assert model.config.eos_token_id == model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert model.config.pad_token_id == tokenizer.pad_token_id


def test_every_id_of_the_model_is_a_token(tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel) -> None:
    assert model.config.vocab_size == len(tokenizer)


def test_the_model_has_a_head_size_that_engines_serve(model: PreTrainedModel) -> None:
    assert model.config.hidden_size // model.config.num_attention_heads in (32, 64)
    assert model.dtype == torch.float32


def test_the_folder_is_small() -> None:
    assert sum(path.stat().st_size for path in ASSET.iterdir()) < 4 * 2**20


def test_no_held_out_problem_is_trained_on() -> None:
    train = [row["prompt"] for row in rows("train.jsonl")]
    held_out = [row["prompt"] for row in rows("eval.jsonl")]
    assert len(set(train)) == len(train)
    assert len(set(held_out)) == len(held_out) == 256
    assert not set(train) & set(held_out)


@pytest.mark.parametrize("name", ["train.jsonl", "eval.jsonl"])
def test_every_answer_is_right_and_reversed(name: str) -> None:
    for row in rows(name):
        match = re.fullmatch(r"(\d\d)([+-])(\d\d)=", row["prompt"])
        assert match, row
        a, operator, b = int(match[1]), match[2], int(match[3])
        value = a + b if operator == "+" else a - b
        assert row["answer"] == str(value)[::-1], row


def test_the_base_model_has_begun_to_learn_and_has_room_to(
    tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel
) -> None:
    """The probability of the right answer, averaged over the held-out problems, is its sampled accuracy."""
    problems = rows("eval.jsonl")
    texts = [row["prompt"] + row["answer"] + tokenizer.eos_token for row in problems]
    batch = tokenizer(texts, padding=True, return_tensors="pt")
    with torch.no_grad():
        logps = model(**batch).logits[:, :-1].log_softmax(-1)
    targets = batch["input_ids"][:, 1:]
    logps = logps.gather(-1, targets[..., None])[..., 0]
    logps = logps.masked_fill(targets == tokenizer.pad_token_id, 0.0)[:, len(problems[0]["prompt"]) - 1 :]
    assert 0.2 < logps.sum(-1).exp().mean().item() < 0.45
