"""The config tree: what it refuses, in which words, and what survives being written."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from rondo.config import Config, asset_or_path, parse_config, read_config
from rondo.errors import ConfigError

SMALLEST = """
model.path = "rondo:arithmetic"
data.train = "rows.jsonl"
rewards.functions = ["rewards.py:f"]
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(SMALLEST)
    return path


def tree(**sections: dict[str, Any]) -> dict[str, Any]:
    smallest: dict[str, dict[str, Any]] = {
        "model": {"path": "m"},
        "data": {"train": "rows.jsonl"},
        "rewards": {"functions": ["rewards.py:f"]},
    }
    return {**smallest, **{name: {**smallest.get(name, {}), **keys} for name, keys in sections.items()}}


def test_the_required_keys_are_enough(path: Path) -> None:
    config = read_config(path)
    assert config.model.path == "rondo:arithmetic"
    assert config.run.path == Path("runs/run")
    assert config.algorithm.kl.coefficient == 0


@pytest.mark.parametrize(
    ("added", "complaint"),
    [
        ("rolout.group_size = 4", "unknown key rolout: did you mean rollout?"),
        ("rollout.groupsize = 4", "unknown key rollout.groupsize: did you mean group_size?"),
        ("algorithm.kl.coeficient = 1", "unknown key algorithm.kl.coeficient: did you mean coefficient?"),
        ("algorithm.kl.qqq = 1", "unknown key algorithm.kl.qqq: known here: coefficient, estimator, place"),
    ],
)
def test_an_unknown_key_is_refused_with_a_suggestion(path: Path, added: str, complaint: str) -> None:
    path.write_text(f"{SMALLEST}\n{added}\n")
    with pytest.raises(ConfigError) as caught:
        read_config(path)
    assert str(caught.value) == f"{path}: {complaint}"


def test_a_misspelt_section_is_named_before_what_is_missing_for_it(path: Path) -> None:
    path.write_text(SMALLEST.replace("model.path", "modell.path"))
    with pytest.raises(ConfigError, match=r"unknown key modell: did you mean model\? \(and 1 more\)$"):
        read_config(path)


@pytest.mark.parametrize(
    ("section", "keys", "complaint"),
    [
        ("rollout", {"group_size": "many"}, "rollout.group_size = 'many': input should be a valid integer"),
        ("rollout", {"group_size": 0}, "rollout.group_size = 0: input should be greater than 0"),
        ("rollout", {"temperature": float("inf")}, "temperature = inf: input should be a finite number"),
        ("rewards", {"weights": [float("nan")]}, "rewards.weights.0 = nan: input should be a finite number"),
        ("rewards", {"functions": []}, "rewards.functions = .*at least 1"),
        ("schedule", {"mode": "async"}, "schedule.mode = 'async': input should be 'periodic' or 'synchronous'"),
        ("run", {"name": "a b"}, "run.name = 'a b': string should match"),
    ],
)
def test_a_wrong_value_is_named_with_its_key(section: str, keys: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        parse_config(tree(**{section: keys}))


def test_a_value_where_a_section_belongs_is_said_so() -> None:
    with pytest.raises(ConfigError, match=r"run = 3: it is a section, write \[run\] and its keys below"):
        parse_config({**tree(), "run": 3})


def test_a_missing_key_is_named() -> None:
    with pytest.raises(ConfigError, match=r"config: data.train is missing and has no default$"):
        parse_config({**tree(), "data": {}})
    with pytest.raises(ConfigError, match=r"config: model is missing and has no default \(and 2 more\)$"):
        parse_config({})


@pytest.mark.parametrize(
    ("sections", "keys"),
    [
        ({"rollout": {"top_p": 0.9}}, ["rollout.top_p = 0.9", "rollout.off_policy_sampling"]),
        ({"rewards": {"weights": [1.0, 2.0]}}, ["rewards.weights has 2", "rewards.functions has 1"]),
        (
            {"schedule": {"updates_per_period": 5}, "rollout": {"prompts_per_period": 4}},
            ["schedule.updates_per_period = 5", "rollout.prompts_per_period = 4"],
        ),
        ({"engines": {"count": 2, "cpus": [[0]]}}, ["engines.cpus pins 1", "engines.count = 2"]),
        (
            {"algorithm": {"name": "rloo", "scale_advantages": True}},
            ['algorithm.name = "rloo"', "algorithm.scale_advantages"],
        ),
        (
            {"algorithm": {"name": "rloo"}, "rollout": {"group_size": 1}},
            ['algorithm.name = "rloo"', "rollout.group_size = 1"],
        ),
        (
            {"algorithm": {"name": "dapo"}, "rollout": {"group_size": 1}},
            ['algorithm.filter = "nonzero-spread"', "rollout.group_size = 1"],
        ),
        (
            {"algorithm": {"filter": "nonzero-spread", "max_candidates": 9}, "rollout": {"prompts_per_period": 10}},
            ["algorithm.max_candidates = 9", "rollout.prompts_per_period = 10"],
        ),
        (
            {"algorithm": {"name": "reinforce++", "kl": {"coefficient": 0.1, "place": "reward"}}},
            ["algorithm.kl.place", 'algorithm.name = "reinforce++"'],
        ),
        (
            {"algorithm": {"name": "rloo", "kl": {"coefficient": 0.1}}, "trainer": {"micro_tokens": 100}},
            ["algorithm.kl.place", "trainer.micro_tokens = 100"],
        ),
    ],
)
def test_an_impossible_combination_names_both_keys(sections: dict[str, Any], keys: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(tree(**sections))
    for key in keys:
        assert key in str(caught.value)


def test_an_algorithm_brings_its_papers_defaults_and_yields_to_what_is_set() -> None:
    def algorithm(**keys: Any) -> Any:
        return parse_config(tree(algorithm=keys)).algorithm

    def shape(found: Any) -> tuple[float, float, bool, str]:
        return found.clip_low, found.clip_high, found.scale_advantages, found.normalise

    assert shape(algorithm()) == (0.2, 0.2, True, "sequences")
    assert shape(algorithm(name="dr-grpo")) == (0.2, 0.2, False, "constant")
    assert shape(algorithm(name="dapo")) == (0.2, 0.28, True, "tokens")
    assert shape(algorithm(name="gspo")) == (3e-4, 4e-4, True, "sequences")
    assert shape(algorithm(name="rloo")) == (0.2, 0.2, False, "sequences")
    assert shape(algorithm(name="cispo")) == (1.0, 4.0, True, "tokens")
    assert shape(algorithm(name="dapo", clip=0.1, normalise="constant")) == (0.1, 0.1, True, "constant")
    assert shape(algorithm(name="dapo", clip=0.1, clip_high=0.5))[:2] == (0.1, 0.5)
    assert (algorithm(name="dapo").filter, algorithm(name="dapo", filter="none").filter) == ("nonzero-spread", "none")
    rloo = algorithm(name="rloo", kl={"coefficient": 0.5})
    assert (rloo.kl.coefficient, rloo.kl.place, rloo.kl.estimator) == (0.5, "reward", "k1")
    assert algorithm(name="rloo", kl={"place": "loss"}).kl.place == "loss"


def test_off_policy_sampling_can_be_accepted() -> None:
    config = parse_config(tree(rollout={"top_p": 0.9, "off_policy_sampling": True}))
    assert config.rollout.top_p == 0.9


def test_overrides_take_toml_values_and_bare_words(path: Path) -> None:
    config = read_config(
        path,
        [
            "run.name=first",
            "run.folder=/tmp/a b",
            "data.eval='held out.jsonl'",
            "rollout.group_size = 4",
            "rollout.temperature=0.5",
            "data.shuffle=false",
            "rewards.weights=[2]",
            "algorithm.kl.coefficient=0.1",
            "engines.device=",
        ],
    )
    assert (config.run.name, config.run.folder, config.data.eval) == ("first", "/tmp/a b", "held out.jsonl")
    assert (config.rollout.group_size, config.rollout.temperature) == (4, 0.5)
    assert config.data.shuffle is False
    assert config.rewards.weights == (2.0,)
    assert config.algorithm.kl.coefficient == 0.1
    assert config.engines.device == ""
    assert config.model.path == "rondo:arithmetic"


@pytest.mark.parametrize(
    ("override", "complaint"),
    [
        ("run.name", "--set run.name: write it as section.key=value"),
        ("name=first", "--set name=first: write it as section.key=value"),
        ("data.train.x=1", "--set data.train.x=1: train is a value, not a section"),
        ("rollout.groupsize=1", "unknown key rollout.groupsize: did you mean group_size?"),
        ("rollout.group_size=many", "rollout.group_size = 'many': input should be a valid integer"),
    ],
)
def test_a_bad_override_is_refused(path: Path, override: str, complaint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_config(path, [override])
    assert complaint in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("bad.toml", b"[run\n", "bad.toml cannot be read: "),
        ("bad.json", b"{", "bad.json cannot be read: "),
        ("bytes.toml", b"\xff\xfe", "bytes.toml cannot be read: "),
        ("list.json", b"[1]", "list.json holds a list: a config is an object with sections"),
    ],
)
def test_a_file_that_is_no_config_is_refused(tmp_path: Path, name: str, content: bytes, complaint: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=complaint):
        read_config(tmp_path / name, ["run.name=first"])


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent.toml: No such file or directory: give the path"):
        read_config(tmp_path / "absent.toml")


def test_a_config_cannot_be_changed(path: Path) -> None:
    config = read_config(path)
    with pytest.raises(ValidationError, match="frozen"):
        config.rollout.group_size = 3  # type: ignore[misc]


def test_a_written_config_reads_back_the_same(path: Path) -> None:
    config = read_config(path, ["engines.cpus=[[0],[1]]", "engines.count=2", "rollout.stop_token_ids=[1]"])
    config.write(path.with_name("config.json"))
    assert read_config(path.with_name("config.json")) == config
    config = read_config(path, ["algorithm.name=rloo", "algorithm.clip=0.1"])
    config.write(path.with_name("config.json"))
    assert read_config(path.with_name("config.json")) == config


def test_an_asset_is_a_path_inside_the_package() -> None:
    assert Path(asset_or_path("rondo:arithmetic")).is_dir()
    assert asset_or_path("models/mine") == "models/mine"


def leaves(model: type[BaseModel], above: str = "") -> Iterator[tuple[str, str | None]]:
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from leaves(field.annotation, f"{above}{name}.")
        else:
            yield f"{above}{name}", field.description


def test_every_key_has_a_description() -> None:
    keys = dict(leaves(Config))
    assert "algorithm.kl.coefficient" in keys
    assert [key for key, description in keys.items() if not description] == []
