"""One run of many periods that is hurt all the time, beside a calm one: `make soak`.

Two engines are the launcher's; a third stands behind a proxy that misbehaves, and joins. Meanwhile, by a seeded choice:
engines are killed at whatever moment it is, or stopped; reward workers, trainer ranks and the launcher are killed, and
the run resumed. At the end the run has finished, its ledger balances, its weights are the calm run's, and nobody and
nothing is left.

    python -m tests.soak.soak [--faults 200] [--periods 120] [--seed 0] [--json PATH]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections import Counter
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

from rondo.config import ASSETS
from tests.conftest import start_engine
from tests.faults.harness import EXACT, Running, assert_clean, balanced, same, start, wait_until, weights_of
from tests.faults.proxy import Fault, Proxy

SETTINGS = (
    *EXACT,
    "rollout.prompts_per_period=16",
    "engines.count=2",
    "engines.health_every=0.2",
    "engines.health_seconds=2",
    "engines.request_seconds=5",
    "engines.max_retries=50",
    "engines.max_restarts=100000",
    "trainer.checkpoint_every=20",
    "rewards.workers=2",
)
HARMED = 0.12  # of the proxied engine's answers
CHOICES = {"kill an engine": 8, "stop an engine": 2, "kill a reward worker": 6, "kill and resume": 1}


@dataclass
class Soak:
    folder: Path
    settings: tuple[str, ...]
    wanted: int
    seed: int
    faults: Counter[str] = field(default_factory=Counter)
    resumed: int = 0

    def __post_init__(self) -> None:
        self.draw = random.Random(self.seed)
        self.running: Running | None = None
        self.token = ""

    def run(self) -> None:
        """Hurts the run until it has been hurt often enough, then lets it finish."""
        with ExitStack() as stack:
            proxy = stack.enter_context(self._outer(stack))
            self._start(proxy, resume=False)
            stack.callback(self._end)
            while self.running.process.poll() is None:
                if self._enough(proxy):
                    proxy.faults = lambda number: None
                    break
                time.sleep(self.draw.uniform(0.05, 0.8))
                self._hurt(proxy)
            code = self.running.ended(seconds=900)
            assert code == 0, self.running.text[-3000:]
            self.faults.update({f"an answer is harmed: {kind}": count for kind, count in Counter(proxy.done).items()})

    def _enough(self, proxy: Proxy) -> bool:
        return sum(self.faults.values()) + len(proxy.done) >= self.wanted

    def _outer(self, stack: ExitStack) -> Proxy:
        """An engine of ours, that shows the token which the run will have."""
        self.token = os.environ["RONDO_TOKEN"] = f"soak-{self.seed}-token-of-a-test"
        stack.callback(os.environ.pop, "RONDO_TOKEN")
        options = ["--model", str(ASSETS / "arithmetic"), "--batch-invariant", "--slots", "16", "--max-model-len", "32"]
        process, url = start_engine(self.folder / "outer.json", *options)
        stack.callback(process.wait)
        stack.callback(process.terminate)
        return Proxy(url, faults=self._fault)

    def _fault(self, number: int) -> Fault | None:
        if self.draw.random() > HARMED:
            return None
        kind = self.draw.choice(("cut", "delay", "truncate", "garble", "hang"))
        return Fault(kind=kind, seconds=0.3, bytes=self.draw.randrange(1, 400))

    def _start(self, proxy: Proxy, *, resume: bool) -> None:
        held, proxy.faults = proxy.faults, lambda number: None
        self.running = start(self.folder, *self.settings, resume=resume)
        control = self.folder / "run" / "control.json"
        control.unlink(missing_ok=True)
        wait_until(lambda: control.exists() or self.running.process.poll() is not None, 120)
        assert control.exists(), self.running.text[-3000:]
        for _ in range(20):  # engines may still be loading
            with suppress(urllib.error.URLError, OSError, ValueError):
                self._call(json.loads(control.read_text())["url"] + "/join", {"url": proxy.url})
                break
            time.sleep(0.5)
        proxy.faults = held

    def _hurt(self, proxy: Proxy) -> None:
        kind = self.draw.choices(list(CHOICES), list(CHOICES.values()))[0]
        try:
            pids = self.running.pids()
        except (OSError, ValueError, KeyError):
            return
        if kind == "kill and resume":
            victim = self.draw.choice(["trainer-0", "launcher"])
            os.kill(pids[victim], signal.SIGKILL)
            self.faults[f"kill -9 of {victim}, resumed"] += 1
            self.running.ended()
            self.resumed += 1
            self._start(proxy, resume=True)
            return
        wanted = "reward-" if "reward" in kind else "engine-"
        there = [role for role in pids if role.startswith(wanted)]
        if not there:
            return
        victim = self.draw.choice(there)
        with suppress(ProcessLookupError):
            if kind == "stop an engine":
                os.kill(pids[victim], signal.SIGSTOP)  # the launcher kills it when it gives no sign of life
                self.faults["SIGSTOP of an engine"] += 1
            elif wanted == "engine-":
                moment = self._awaited_moment(victim)
                os.kill(pids[victim], signal.SIGKILL)
                self.faults[f"kill -9 of an engine, {moment}"] += 1
            else:
                os.kill(pids[victim], signal.SIGKILL)
                self.faults["kill -9 of a reward worker"] += 1

    def _awaited_moment(self, role: str) -> str:
        """Some moments are short: now and then one is waited for, for a while."""
        wanted = self.draw.choice(("in a publication", "while it generates", ""))
        for _ in range(40):
            moment = self._moment(role)
            if moment == wanted or not wanted or moment == "while it starts":
                break
            time.sleep(0.02)
        return moment

    def _moment(self, role: str) -> str:
        """What the engine is at when it is killed, as far as it says."""
        try:
            address = json.loads((self.folder / "run" / "engines" / f"{role}.json").read_text())["url"]
            state = self._call(address + "/rondo/state", None)
        except (OSError, ValueError, KeyError):
            return "while it starts"
        if state["paused"]:
            return "in a publication"
        return "while it generates" if state["running"] or state["waiting"] else "while it idles"

    def _call(self, url: str, body: dict[str, str] | None) -> dict[str, object]:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(url, data=data, headers={"Authorization": f"Bearer {self.token}"})
        with urllib.request.urlopen(request, timeout=30 if body else 0.5) as answer:
            return json.loads(answer.read())

    def _end(self) -> None:
        if self.running is not None and self.running.process.poll() is None:
            self.running.process.kill()
            self.running.process.wait()


def soak(folder: Path, *, faults: int, periods: int, seed: int) -> dict[str, object]:
    """Asserts everything; returns the figures."""
    settings = (*SETTINGS, f"schedule.periods={periods}")
    (folder / "calm").mkdir()
    (folder / "hurt").mkdir()
    began = time.monotonic()
    calm = start(folder / "calm", *settings)
    assert calm.ended(seconds=900) == 0, calm.text
    calm_seconds, began = time.monotonic() - began, time.monotonic()
    hurt = Soak(folder / "hurt", settings, faults, seed)
    hurt.run()
    seconds = time.monotonic() - began
    told = balanced(folder / "hurt" / "run")
    assert len(told) == periods
    assert same(weights_of(calm.folder), weights_of(folder / "hurt" / "run")), "other weights than the calm run's"
    assert_clean(folder / "hurt" / "run")
    done = sum(hurt.faults.values())
    assert done >= faults, f"{done} faults in {periods} periods: give it more periods"
    return {
        "seed": seed,
        "periods": periods,
        "faults": dict(sorted(hurt.faults.items())),
        "faults in all": done,
        "resumed": hurt.resumed,
        "samples trained": sum(line["trained"] for line in told),
        "samples reused from the journal": sum(line["reused"] for line in told),
        "requests sent again": sum(line["retried"] for line in told),
        "seconds": round(seconds),
        "seconds of the calm run": round(calm_seconds),
    }


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--faults", type=int, default=200)
    options.add_argument("--periods", type=int, default=120)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--json", type=Path)
    given = options.parse_args()
    with tempfile.TemporaryDirectory(prefix="rondo-soak-") as folder:
        figures = soak(Path(folder), faults=given.faults, periods=given.periods, seed=given.seed)
    for name, value in figures.items():
        if isinstance(value, dict):
            for fault, count in value.items():
                sys.stdout.write(f"  {fault:<44}{count:>6}\n")
        else:
            sys.stdout.write(f"{name:<46}{value:>6}\n")
    if given.json:
        given.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
