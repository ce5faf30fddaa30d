"""What a run asks of a cluster, and which addresses are whose."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rondo.config import Config, parse_config
from rondo.errors import ConfigError
from rondo.launch.addresses import interface_of, is_here, own_address, seen_from
from rondo.launch.bundles import bundles, described, machines
from rondo.launch.news import News
from rondo.launch.reaper import remove_when_we_end
from rondo.launch.warden import Warden


def config(**sections: dict[str, object]) -> Config:
    needed = {"model": {"path": "rondo:arithmetic"}, "data": {"train": "x"}, "rewards": {"functions": ["a:b"]}}
    return parse_config(needed | sections)


def ray(**settings: object) -> dict[str, object]:
    return {"backend": "ray", "ray": settings}


CPUS = [("10.0.0.1", {"CPU": 8.0, "node:10.0.0.1": 1.0})]
DEVICES = [("10.0.0.1", {"CPU": 8.0}), ("10.0.0.2", {"CPU": 8.0, "GPU": 8.0})]


def test_every_process_has_a_bundle_and_rank_0_is_where_the_command_was_typed():
    asked = bundles(config(trainer={"ranks": 2}, engines={"count": 3}, launch=ray(engine_cpus=2)), CPUS, "10.0.0.1")
    assert asked == [{"CPU": 1, "node:10.0.0.1": 0.001}, {"CPU": 1}, {"CPU": 2}, {"CPU": 2}, {"CPU": 2}]
    assert described(asked) == "2 x (1 CPU) and 3 x (2 CPU)"


def test_engines_elsewhere_need_no_bundle():
    asked = bundles(config(engines={"urls": ["http://10.0.0.9:8000"]}, launch=ray()), CPUS, "10.0.0.1")
    assert [set(bundle) for bundle in asked] == [{"CPU", "node:10.0.0.1"}]


def test_where_the_cluster_has_accelerators_ranks_and_engines_take_one_each_or_as_many_as_an_engine_spans():
    engines = {"backend": "vllm", "tensor_parallel": 4}
    asked = bundles(config(engines=engines, launch=ray()), DEVICES, "10.0.0.1")
    assert asked == [{"CPU": 1, "GPU": 1}, {"CPU": 1, "GPU": 4}]  # not here: this machine has no accelerator
    assert machines(DEVICES, "GPU") == "10.0.0.1 (8 CPU), 10.0.0.2 (8 CPU, 8 GPU)"


def test_what_is_configured_counts_and_a_cpu_device_needs_no_accelerator():
    told = config(trainer={"device": "cpu"}, launch=ray(engine_devices=0.5, lead="10.0.0.2"))
    assert bundles(told, DEVICES, "10.0.0.1") == [{"CPU": 1, "node:10.0.0.2": 0.001}, {"CPU": 1, "GPU": 0.5}]


@pytest.mark.parametrize(("section", "cores"), [("trainer", [0]), ("engines", [[0]])])
def test_cores_of_this_machine_cannot_be_named_on_a_cluster(section, cores):
    with pytest.raises(ConfigError, match=rf'{section}\.cpus names cores of this machine, but launch\.backend = "ray"'):
        config(**{section: {"cpus": cores}, "launch": {"backend": "ray"}})


def test_without_ray_one_sentence_says_how_to_get_it():
    """In a process of its own, where Ray cannot be imported."""
    program = "import sys; sys.modules['ray'] = None\nimport rondo.launch.ray"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert 'launch.backend = "ray" needs Ray, here and on every machine of its cluster: pip install' in done.stderr


def test_own_addresses_are_here_and_others_are_not():
    assert is_here("http://127.0.0.1:1")
    assert is_here("http://localhost:1")
    assert is_here("http://[::1]:1")
    assert not is_here("http://198.51.100.77:1")  # set aside for documents: nobody's
    assert not is_here("http://a.name.example:1")


def test_the_way_to_loopback_is_loopback():
    assert own_address("127.0.0.1") == "127.0.0.1"
    assert seen_from(["http://127.0.0.1:1", "http://localhost:2"]) == "127.0.0.1"
    assert interface_of("127.0.0.1") in [name for _, name in socket.if_nameindex()]
    assert interface_of("198.51.100.77") == ""
    assert own_address("no.such.name.invalid") == ""


def test_wardens_and_the_other_launchers_import_without_ray():
    program = (
        "import sys; sys.modules['ray'] = None\nimport rondo.launch.warden, rondo.launch.start, rondo.launch.torchrun"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_news_of_engines_are_heard_once_and_their_changes_delivered_once():
    news = News()
    folder = news.folder / "engines"
    news.hear("engine-0.json", '{"boot": "a"}')
    assert news.changes() == {"engine-0.json": '{"boot": "a"}\n'}
    assert news.changes() == {}
    (folder / "engine-0.json").unlink()  # the launcher: it has ended
    news.hear("engine-0.json", '{"boot": "a"}')  # an answer from before that
    assert news.changes() == {"engine-0.json": None}
    news.hear("engine-0.lost", '{"boot": "b"}')  # rank 0's own word does not go back to it
    assert (folder / "engine-0.lost").exists()
    assert news.changes() == {}
    news.close()
    assert not folder.exists()


def test_a_warden_tells_all_of_a_child_that_ended_and_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    told = config(engines={"slots": 4}, launch=ray(), model={"path": "/no/such/model"})
    warden = Warden("engine-0", told.model_dump_json(), address="127.0.0.1", home=os.getcwd())
    assert warden.look().pid == 0
    warden.start_engine(0, {}, alone=True)
    log = b""
    while (look := warden.look()).exit_code is None:
        assert look.pid
        assert look.announced is None
        log += look.log
        time.sleep(0.05)
    log += look.log
    assert look.exit_code == 2
    assert look.sentence
    assert "/no/such/model" in look.sentence
    assert f"error: {look.sentence}".encode() in log
    assert look.obituary == f"engine-0 (pid {look.pid}) ended with exit code 2: {look.sentence}"
    warden.end()
    warden.close()
    assert list(tmp_path.glob("rondo-*")) == []


def test_a_folder_is_removed_when_its_process_is_killed(tmp_path):
    folder = tmp_path / "gone soon"
    folder.mkdir()
    (folder / "file").touch()
    program = (
        "import os, sys; from pathlib import Path; from rondo.launch.reaper import remove_when_we_end\n"
        "held = remove_when_we_end(Path(sys.argv[1])); assert Path(sys.argv[1]).exists(); os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", program, str(folder)], check=False)
    deadline = time.monotonic() + 10
    while folder.exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    with remove_when_we_end(Path("/nonexistent")):
        pass  # nothing to remove is nothing to say
