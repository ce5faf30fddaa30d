"""A run that was killed at any moment goes on as if it had not been: the journal is cut as a kill leaves it."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rondo.config import parse_config
from rondo.errors import JournalError
from rondo.launch.rank import lead
from rondo.rollout.journal import read_period
from rondo.stream.queue import GroupQueue
from rondo.trainer.parallel import Alone

PERIODS = 4


def trained(tree, folder: Path, *, resume: bool = False) -> dict[str, torch.Tensor]:
    """Rank 0 of a run in this process; the weights that it leaves."""
    config = parse_config({**tree, "run": {**tree["run"], "folder": str(folder)}})
    folder.mkdir(exist_ok=True)
    config.write(folder / "config.json")
    torch.set_num_threads(1)
    lead(config, folder, GroupQueue(), Alone(), torch.device("cpu"), resume=resume)
    return load_file(folder / "model" / "model.safetensors")


def killed(whole: Path, folder: Path, *, period: int, share: float, checkpoint: int = 0) -> None:
    """`whole` as a kill leaves it: in this period, with so much of its journal, and no checkpoint after that one."""
    shutil.copytree(whole, folder)
    shutil.rmtree(folder / "model")
    for path in (folder / "checkpoints").glob("period-*"):
        if int(path.name.removeprefix("period-")) != checkpoint or not checkpoint:
            shutil.rmtree(path)
    for path in (folder / "journal").iterdir():
        number = int(path.stem.removeprefix("period-"))
        if number > period:
            path.unlink()
        elif number == period:
            data = path.read_bytes()
            path.write_bytes(data[: int(share * len(data))])
    for name in ("metrics.jsonl", "certificate.jsonl", "samples.jsonl"):
        lines = (folder / name).read_text().splitlines(keepends=True)
        kept = [line for line in lines if json.loads(line)["period"] < period]
        (folder / name).write_text("".join(kept)[:-9])  # the last line is torn


def lines(folder: Path, name: str) -> list[dict]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


SETTINGS = {
    "prompt order": {"schedule__order": "prompt"},
    "exact sums": {"trainer__accumulation": "exact"},
    "a filter and two updates": {
        "algorithm__name": "dapo",
        "schedule__updates_per_period": 2,
        "trainer__accumulation": "exact",
    },
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.heavy if name == "exact sums" else ()) for name in SETTINGS]
)
def test_a_killed_run_goes_on_bit_for_bit(tree, tmp_path, name):
    changes = {"schedule__periods": PERIODS, "trainer__checkpoint_every": 2, "trainer__keep_checkpoints": 9}
    made = tree(**changes, **SETTINGS[name])
    weights = trained(made, tmp_path / "whole")
    draw = random.Random(name)
    for number, (period, checkpoint) in enumerate([(3, 2), (1, 0), (3, 0)]):
        folder = tmp_path / f"killed-{number}"
        share = draw.uniform(0.2, 0.9)
        killed(tmp_path / "whole", folder, period=period, share=share, checkpoint=checkpoint)
        left = len(read_period(folder, period).settled)
        assert same(trained(made, folder, resume=True), weights), (period, share)
        told = {line["period"]: line for line in lines(folder, "certificate.jsonl")}
        assert sorted(told) == sorted(line["period"] for line in lines(folder, "metrics.jsonl")) == list(range(PERIODS))
        assert told[period]["ledger"]["reused"] == left * 4
        assert all(told[later]["ledger"]["reused"] == 0 for later in range(period + 1, PERIODS))
        for line in told.values():
            balance = line["ledger"]
            came, went = balance["asked"] + balance["reused"], balance["trained"] + balance["filtered"]
            assert came == went + balance["unneeded"]
        whole = {line["period"]: line["weights_hash"] for line in lines(tmp_path / "whole", "certificate.jsonl")}
        assert {period: line["weights_hash"] for period, line in told.items()} == whole


@pytest.mark.heavy
def test_what_cannot_be_repeated_is_generated_again_and_said(tree, tmp_path, capsys):
    made = tree(schedule__periods=3, schedule__order="prompt", rollout__prompts_per_period=4)
    weights = trained(made, tmp_path / "whole")

    def resumed(name: str, prepare=lambda folder: None, **changes) -> tuple[dict[str, torch.Tensor], str]:
        killed(tmp_path / "whole", tmp_path / name, period=2, share=0.7)
        prepare(tmp_path / name)
        capsys.readouterr()
        other = tree(
            **{"schedule__periods": 3, "schedule__order": "prompt", "rollout__prompts_per_period": 4} | changes
        )
        return trained(other, tmp_path / name, resume=True), capsys.readouterr().out

    found, said = resumed("pruned", lambda folder: (folder / "journal" / "period-000000.journal").unlink())
    assert "warning: the journal does not hold all of it (journal.keep)" in said
    assert same(found, weights)
    found, said = resumed("slower", trainer__learning_rate=5e-5)
    assert "warning: period 0 was recorded with trainer.learning_rate = 0.0001 and this run has 5e-05" in said
    assert "its groups are trained anew; periods 1 to 2 are generated again" in said
    assert lines(tmp_path / "slower", "certificate.jsonl")[0]["ledger"]["reused"] == 16
    assert not same(found, weights)
    _, said = resumed("hotter", rollout__temperature=0.9)
    assert "warning: period 0 was recorded with rollout.temperature = 1.0 and this run has 0.9" in said
    found, said = resumed("unjournalled", lambda folder: shutil.rmtree(folder / "journal"), journal__enabled=False)
    assert "warning: the journal is off" in said
    assert same(found, weights)


def test_weights_that_are_not_the_recorded_ones_stop_the_run(tree, tmp_path):
    made = tree(schedule__periods=2, schedule__order="prompt", rollout__prompts_per_period=4)
    trained(made, tmp_path / "whole")
    killed(tmp_path / "whole", tmp_path / "changed", period=1, share=0.9)
    path = tmp_path / "changed" / "journal" / "period-000000.journal"
    told = read_period(tmp_path / "changed", 0).updates[0].hashes
    forged = rewritten(path, told.weights, "0" * len(told.weights))
    path.write_bytes(forged)
    with pytest.raises(JournalError, match=f"gives weights {told.weights} after update 0 instead of 0000") as error:
        trained(made, tmp_path / "changed", resume=True)
    assert "to generate again what came after the last checkpoint" in str(error.value)


def rewritten(path: Path, old: str, new: str) -> bytes:
    """The journal with another hash in its step record, and checksums to match."""
    import zlib

    from rondo.rollout.journal import CHECK, FRAME, MAGIC, STEP, _records

    out = [MAGIC]
    for kind, payload in _records(path):
        payload = payload.replace(old.encode(), new.encode()) if kind == STEP else payload
        frame = FRAME.pack(len(payload), kind, zlib.crc32(payload))
        out += [frame, CHECK.pack(zlib.crc32(frame)), payload]
    return b"".join(out)
