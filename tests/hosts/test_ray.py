"""Runs on a Ray cluster of two machines that share no disk."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from rondo.launch.addresses import LOOPBACK, own_address
from tests.hosts.conftest import SAME_BITS, assert_same_bits, model_of
from tests.hosts.network import Host
from tests.integration.harness import command, survivors, wait_for

pytestmark = pytest.mark.heavy

WITH_RAY = ("launch.backend=ray", "launch.ray.place_seconds=30")


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """One CPU on the first machine, two on the second."""

    first: Host
    second: Host
    folder: Path  # the second machine has another one of that name

    def started(self, name: str, *settings: str) -> subprocess.Popen[str]:
        """`rondo train` on the first machine; what it says goes to a file called `said`."""
        folder = self.folder / name
        folder.mkdir()
        address = f"launch.ray.address={self.first.address}:6379"
        words = command(folder, *WITH_RAY, address, *settings)
        with (folder / "said").open("w") as log:
            return self.first.start(*words, log=log, home=folder, own_memory=False)

    def said(self, name: str) -> str:
        return (self.folder / name / "said").read_text()


@pytest.fixture(scope="module")
def machines(request: pytest.FixtureRequest) -> list[Host]:
    """Two, or where that is not permitted, two members of a cluster on this one."""
    try:
        hosts: list[Host] = request.getfixturevalue("hosts")
    except pytest.skip.Exception:
        return [Host(space="", address=own_address("8.8.8.8") or LOOPBACK)] * 2  # as Ray finds it
    return hosts[:2]


@pytest.fixture(scope="module")
def cluster(machines: list[Host], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    pytest.importorskip("ray", reason="NO RAY here: the Ray launcher is not tested")
    place = tmp_path_factory.mktemp("ray")
    temporary = Path(f"/tmp/rondo-ray-{os.getpid()}")  # a socket's path is short
    first, second = machines
    start = [str(Path(sys.executable).parent / "ray"), "start", "--block", "--disable-usage-stats"]
    start += ["--object-store-memory", str(80 << 20)]
    head = ["--head", "--port", "6379", "--include-dashboard", "false", "--temp-dir", str(temporary)]
    member = ["--address", f"{first.address}:6379"]
    processes = []
    runs = place / "runs"
    runs.mkdir()
    with (place / "log").open("w") as log:
        for host, cpus, words, private in ((first, 1, head, ()), (second, 2, member, (runs,))):
            own = ["--node-ip-address", host.address, "--num-cpus", str(cpus)]
            processes.append(host.start(*start, *words, *own, log=log, home=place, private=private))
            count = len(processes)
            wait_for(lambda count=count: (place / "log").read_text().count("Ray runtime started") == count)
    yield Cluster(first=first, second=second, folder=runs)
    for process in reversed(processes):
        process.terminate()
        process.wait(timeout=20)
    shutil.rmtree(temporary, ignore_errors=True)


def test_a_run_over_two_machines_whose_engine_is_killed_trains_the_model_of_one_machine(cluster, on_one_machine):
    process = cluster.started("same", *SAME_BITS, "trainer.ranks=2")
    run = cluster.folder / "same" / "run"
    wait_for(lambda: (run / "metrics.jsonl").exists() and (run / "metrics.jsonl").read_text(), seconds=120)
    engine = pids_of(run)["engine-0"]
    os.kill(engine, signal.SIGKILL)
    assert process.wait(timeout=120) == 0, cluster.said("same")
    assert_same_bits(on_one_machine, model_of(run))
    said = cluster.said("same")
    assert said.count("period    ") == 8  # what rank 0 prints is seen here
    assert f"engine-0 (pid {engine}) " in said  # ended, or missed by rank 0: whichever is seen first
    assert "it is started again in 1 s (1 of 5)" in said
    assert pids_of(run)["engine-0"] != engine
    here, there = cluster.first.address, cluster.second.address
    records = json.loads((run / "processes.json").read_text())
    nodes = {record["role"]: record["node"] for record in records}
    assert nodes == {"launcher": here, "trainer-0": here, "trainer-1": there, "engine-0": there}
    assert (run / "logs" / "engine-0.log").read_text().count(f"at http://{there}:") == 2
    wait_for(lambda: not survivors(run), seconds=15)


def test_when_the_launcher_is_killed_nothing_is_left_on_any_machine(cluster):
    before = own_folders()
    process = cluster.started("killed", "schedule.periods=100000")
    run = cluster.folder / "killed" / "run"
    wait_for(lambda: (run / "metrics.jsonl").exists() and len((run / "metrics.jsonl").read_text().splitlines()) > 1)
    pids = pids_of(run)
    assert all(Path(f"/proc/{pid}").exists() for pid in pids.values())
    os.kill(pids["launcher"], signal.SIGKILL)
    process.wait(timeout=10)
    deadline = time.monotonic() + 20
    while alive := [role for role, pid in pids.items() if Path(f"/proc/{pid}").exists()]:
        assert time.monotonic() < deadline, alive
        time.sleep(0.1)
    wait_for(lambda: not survivors(run), seconds=15)
    wait_for(lambda: own_folders() <= before, seconds=15)


def pids_of(run: Path) -> dict[str, int]:
    return {record["role"]: record["pid"] for record in json.loads((run / "processes.json").read_text())}


def own_folders() -> set[Path]:
    """What the launcher and the wardens work in."""
    return {path for kind in ("trainer", "engine", "news") for path in Path("/tmp").glob(f"rondo-{kind}-*")}


def test_a_cluster_without_room_is_one_sentence(cluster):
    process = cluster.started("full", "engines.count=5", "launch.ray.place_seconds=1", "launch.ray.engine_cpus=2")
    assert process.wait(timeout=60) == 2
    here, there = cluster.first.address, cluster.second.address
    assert cluster.said("full") == (
        "error: the Ray cluster had no room for 1 x (1 CPU) and 5 x (2 CPU) within launch.ray.place_seconds = 1: it "
        f"has {here} (1 CPU), {there} (2 CPU), and others may use some of it; ask for less, or add machines\n"
    )
