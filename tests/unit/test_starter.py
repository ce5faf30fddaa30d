"""`rondo init`: the config it writes is one, says everything, and means the defaults."""

from __future__ import annotations

import re
import tomllib

import pytest

from rondo.config import ASSETS, parse_config
from rondo.config.starter import starter
from rondo.errors import ConfigError, DataError
from rondo.launch.first_steps import begin_rewards, columns_of
from rondo.rewards.runner import check_functions

GIVEN = {
    "name": "mine",
    "model": "some/model",
    "data": 'with "quotes".jsonl',
    "prompt": "question",
    "rewards": "a.py:b",
}


def test_it_means_the_defaults():
    plain = parse_config(
        {
            "run": {"name": "mine"},
            "model": {"path": "some/model"},
            "data": {"train": 'with "quotes".jsonl', "prompt": "question"},
            "rewards": {"functions": ["a.py:b"]},
        }
    )
    assert parse_config(tomllib.loads(starter(**GIVEN))) == plain


def test_every_key_is_there_and_every_default_is_what_it_says():
    uncommented = re.sub(r"^# ([a-z_]+ = )", r"\1", starter(**GIVEN), flags=re.MULTILINE)
    tree = tomllib.loads(uncommented)
    written = parse_config(tree)
    assert written == parse_config(tomllib.loads(starter(**GIVEN)))
    dumped = written.model_dump()
    for section, keys in dumped.items():
        for key, value in keys.items():
            assert value is None or key in tree[section], f"{section}.{key} is missing"


def test_the_reward_function_that_is_begun_is_one(tmp_path):
    columns = columns_of(ASSETS / "arithmetic" / "train.jsonl", "prompt")
    assert columns == ["answer"]
    named = begin_rewards(tmp_path / "rewards.py", [*columns, "not an identifier"])
    check_functions([named])
    with pytest.raises(ConfigError, match="is there already"):
        begin_rewards(tmp_path / "rewards.py", columns)


def test_data_without_the_column_is_named():
    with pytest.raises(DataError, match="question"):
        columns_of(ASSETS / "arithmetic" / "train.jsonl", "question")
