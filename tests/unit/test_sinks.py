"""Sinks: what they are told, what Prometheus reads, and that a failing one does not fail the run."""

from __future__ import annotations

import importlib.util
import urllib.request

import pytest

from rondo.config.observe import ObserveConfig
from rondo.errors import AddressError, UserError
from rondo.observe.sinks import PrometheusSink, Sinks, TensorBoardSink, TrackioSink, WandbSink, exposition, numbers_of
from rondo.rollout.background import Background

LINE = {
    "period": 3, "version": 3, "reward_mean": 0.5, "reward/correct": 0.25, "loss": float("nan"), "note": "text",
    "trainer_seconds": {"waiting for groups": 1.5}, "engine_seconds": [{"idle tail": 2.0}, {"idle tail": 3.0}],
}  # fmt: skip


class Heard:
    def __init__(self, fails: bool = False) -> None:
        self.told: list[tuple[int, dict[str, float]]] = []
        self.fails = fails
        self.closed = False

    def write(self, step, numbers):
        if self.fails:
            raise OSError("the line is dead")
        self.told.append((step, dict(numbers)))

    def close(self):
        self.closed = True


def test_nothing_is_told_to_anyone_unless_asked_for():
    assert ObserveConfig().sinks == ()
    assert ObserveConfig().wandb_mode == "offline"
    assert ObserveConfig().prometheus_host == "127.0.0.1"


def test_a_line_becomes_flat_finite_numbers():
    assert numbers_of(LINE) == {
        "period": 3.0, "version": 3.0, "reward_mean": 0.5, "reward/correct": 0.25,
        "seconds/trainer/waiting_for_groups": 1.5, "seconds/engine-0/idle_tail": 2.0, "seconds/engine-1/idle_tail": 3.0,
    }  # fmt: skip


def test_a_sink_that_fails_is_named_and_left_out_and_the_others_go_on():
    good, bad, warnings = Heard(), Heard(fails=True), []
    sinks = Sinks([bad, good], warn=warnings.append)
    sinks.write({"version": 0, "eval_reward": 0.1})  # no period: nothing to tell
    sinks.write(LINE)
    sinks.write(LINE | {"period": 4})
    sinks.close()
    assert [step for step, _ in good.told] == [3, 4]
    assert warnings == ["Heard failed and is told no more: OSError: the line is dead"]
    assert (good.closed, bad.closed) == (True, False)


def test_prometheus_reads_the_last_period_from_a_local_endpoint():
    background = Background("test")
    sink = PrometheusSink(host="127.0.0.1", port=0, call=background.call, run='a "b"')
    port = int(sink.url.split(":")[2].split("/")[0])
    with pytest.raises(AddressError, match=r"observe.prometheus_port: cannot listen on 127.0.0.1"):
        PrometheusSink(host="127.0.0.1", port=port, call=background.call, run="second")
    sink.write(3, numbers_of(LINE))
    with urllib.request.urlopen(sink.url) as reply:
        text, kind = reply.read().decode(), reply.headers["Content-Type"]
    sink.close()
    background.close()
    assert kind == "text/plain; version=0.0.4; charset=utf-8"
    assert text == exposition({"period": 3.0, **numbers_of(LINE)}, run='a "b"')
    lines = text.splitlines()
    assert 'rondo_reward_mean{run="a \\"b\\""} 0.5' in lines
    assert 'rondo_lane_seconds{run="a \\"b\\"",lane="engine-1",state="idle_tail"} 3.0' in lines
    assert lines.count("# TYPE rondo_lane_seconds gauge") == 1


def test_tensorboard_holds_every_number(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sink = TensorBoardSink(tmp_path)
    sink.write(0, {"reward_mean": 0.25})
    sink.write(1, {"reward_mean": 0.5})
    sink.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("reward_mean")] == [(0, 0.25), (1, 0.5)]


def test_a_library_that_is_not_installed_is_named_with_its_extra(tmp_path):
    if not _installed("wandb"):
        with pytest.raises(UserError, match=r'pip install "rondo-rl\[wandb\]"'):
            WandbSink(tmp_path, project="p", name="n", mode="offline", config={})
    if not _installed("trackio"):
        with pytest.raises(UserError, match=r'pip install "rondo-rl\[trackio\]"'):
            TrackioSink(tmp_path, project="p", name="n", config={})


def test_wandb_offline_writes_into_the_runs_folder(tmp_path):
    if not _installed("wandb"):
        pytest.skip("wandb is not installed")
    sink = WandbSink(tmp_path, project="rondo", name="mine", mode="offline", config={"run": {"seed": 1}})
    sink.write(0, {"reward_mean": 0.25})
    sink.close()
    (folder,) = (tmp_path / "wandb").glob("offline-run-*")
    (record,) = folder.glob("*.wandb")
    assert b"reward_mean" in record.read_bytes()


def test_trackio_keeps_its_database_in_the_runs_folder(tmp_path, monkeypatch):
    if not _installed("trackio"):
        pytest.skip("trackio is not installed")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))  # else it would stay set for other tests
    sink = TrackioSink(tmp_path, project="rondo", name="mine", config={"run": {"seed": 1}})
    sink.write(0, {"reward_mean": 0.25})
    sink.close()
    assert any(path.suffix == ".db" for path in (tmp_path / "trackio").rglob("*"))


def _installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None
