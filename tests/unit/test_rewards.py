"""Reward functions in real worker processes: what they are given, what they may answer, how they may fail."""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rondo.errors import DiedError, RewardError
from rondo.rewards.arithmetic import correct
from rondo.rewards.base import call_arguments, check_applies, checked, part_names
from rondo.rewards.runner import EVIDENCE_KEPT, RewardRunner, Scores, check_functions

FUNCTIONS = """
import asyncio, json, os, signal, subprocess, sys, time
from pathlib import Path

NUMBER = 3

def length(completions, **columns):
    return [len(completion) for completion in completions]

def not_a_number(completions, **columns):
    return [float("nan") for completion in completions]

def too_few(completions, **columns):
    return [1.0]

def needs(completions, answer, **columns):
    return [1.0 for completion in completions]

def half(completions, **columns):
    return [0.5 if completion.startswith("a") else None for completion in completions]

def never(completions, **columns):
    return [None for completion in completions]

async def later(completions, **columns):
    await asyncio.sleep(0)
    return [7.0 for completion in completions]

def keep(folder, **arguments):
    Path(folder[0], "arguments.json").write_text(json.dumps(arguments))
    return [0.0] * len(arguments["completions"])

def noisy(completions, **columns):
    print("printed by the reward")
    os.write(1, b"written by the reward\\n")
    subprocess.run(["echo", "echoed by its child"])
    assert sys.stdin.read() == ""
    return [1.0] * len(completions)

def divides(completions, **columns):
    return [1 / 0]

def leaves(completions, **columns):
    sys.exit("enough")

def dies(completions, **columns):
    os._exit(3)

def segfaults(completions, **columns):
    os.kill(os.getpid(), signal.SIGSEGV)

def interrupted(completions, **columns):
    os.kill(os.getpid(), signal.SIGINT)
    return [1.0] * len(completions)

def hangs(completions, folder, **columns):
    if completions[0] == "do not" or Path(folder[0], "enough").exists():
        return [1.0] * len(completions)
    child = subprocess.Popen(["sleep", "600"])
    started = Path(folder[0], "started")
    started.with_suffix(".part").write_text(f"{os.getpid()} {child.pid}")
    started.with_suffix(".part").rename(started)
    time.sleep(600)

def pid(completions, **columns):
    return [os.getpid()] * len(completions)

def swells(completions, **columns):
    return [len(bytearray(1 << 30)) for completion in completions]

def meets(completions, folder, **columns):
    Path(folder[0], completions[0]).touch()
    while not (Path(folder[0], "one").exists() and Path(folder[0], "two").exists()):
        time.sleep(0.01)
    return [1.0]
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "scores.py"
    path.write_text(FUNCTIONS)
    return path


def make_runner(file: Path, *names: str, **settings: Any) -> RewardRunner:
    defaults: dict[str, Any] = {"weights": (), "seconds": 60.0, "on_error": "fail", "workers": 1}
    return RewardRunner(
        functions=[f"{file}:{name}" for name in names],
        **{**defaults, **settings},
        log=file.parent / "logs" / "rewards.log",
        evidence=file.parent / "evidence",
    )


@asynccontextmanager
async def running(file: Path, *names: str, **settings: Any) -> AsyncIterator[RewardRunner]:
    runner = make_runner(file, *names, **settings)
    await runner.start()
    try:
        yield runner
    finally:
        await runner.close()


async def ask(runner: RewardRunner, *completions: str, prompt: Any = "q", **columns: Any) -> Scores:
    return await runner.score(prompt, list(completions), [[1]] * len(completions), columns)


def score(file: Path, *names: str, given: tuple[str, ...] = ("a", "bcd"), **rest: Any) -> Scores:
    """One group, scored by a runner of its own."""
    prompt, columns = rest.pop("prompt", "q"), rest.pop("columns", {})

    async def once() -> Scores:
        async with running(file, *names, **rest) as runner:
            return await ask(runner, *given, prompt=prompt, **columns)

    return asyncio.run(once())


async def started(folder: Path) -> list[int]:
    """The ids of the hanging worker and of its child, as soon as it hangs."""
    return await asyncio.to_thread(wait_for_pids, folder / "started")


def wait_for_pids(path: Path) -> list[int]:
    give_up = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < give_up, "the worker never started"
        time.sleep(0.01)
    pids = [int(pid) for pid in path.read_text().split()]
    path.unlink()
    return pids


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def assert_ends(*pids: int) -> None:
    give_up = time.monotonic() + 60
    while any(map(is_running, pids)):
        assert time.monotonic() < give_up, f"still running: {[pid for pid in pids if is_running(pid)]}"
        time.sleep(0.01)


# What a function is given and may answer


def test_a_function_is_found_by_the_path_of_its_file(file: Path) -> None:
    assert score(file, "length") == Scores(rewards=(1.0, 3.0), parts={"length": (1.0, 3.0)}, failed=False)


def test_a_relative_path_and_a_module_are_found_from_the_working_directory(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(file.parent)
    check_functions(["scores.py:length", "scores:later", "rondo.rewards.arithmetic:correct"])


def test_a_file_can_import_its_neighbours(file: Path) -> None:
    (file.parent / "neighbour.py").write_text("from scores import length\n")
    check_functions([f"{file.parent / 'neighbour.py'}:length"])


def test_every_argument_is_a_list_with_an_entry_per_completion(file: Path) -> None:
    score(file, "keep", columns={"folder": str(file.parent), "answer": {"n": 1}})
    assert json.loads((file.parent / "arguments.json").read_text()) == {
        "prompts": ["q", "q"],
        "completions": ["a", "bcd"],
        "completion_ids": [[1], [1]],
        "answer": [{"n": 1}, {"n": 1}],
    }


def test_a_chat_prompt_makes_the_completions_messages() -> None:
    messages = [{"role": "user", "content": "hello"}]
    arguments = call_arguments(messages, ["hi", "yo"], [[1], [2]], {})
    assert arguments["prompts"] == [messages, messages]
    assert arguments["completions"] == [
        [{"role": "assistant", "content": "hi"}],
        [{"role": "assistant", "content": "yo"}],
    ]


def test_a_column_named_like_an_argument_is_refused() -> None:
    with pytest.raises(RewardError, match=r"a column completions.*rename it"):
        call_arguments("q", ["a"], [[1]], {"completions": 1})


def test_the_reward_is_the_weighted_sum_of_all_functions(file: Path) -> None:
    scores = score(file, "length", "later", weights=[2.0, -1.0])
    assert scores.rewards == (2 * 1 - 7, 2 * 3 - 7)
    assert scores.parts == {"length": (1.0, 3.0), "later": (7.0, 7.0)}


def test_an_async_function_is_awaited(file: Path) -> None:
    assert score(file, "later").rewards == (7.0, 7.0)


def test_none_leaves_a_function_out_for_that_completion(file: Path) -> None:
    scores = score(file, "half", "length", weights=[10.0, 1.0])
    assert scores.rewards == (6.0, 3.0)
    assert scores.parts["half"][0] == 0.5
    assert math.isnan(scores.parts["half"][1])


def test_a_completion_to_which_no_function_applies_is_an_error(file: Path) -> None:
    with pytest.raises(RewardError, match="half, never returned None for completion 2: none is left"):
        score(file, "half", "never")
    check_applies({"half": [None, 1.0], "other": [2.0, None]})


@pytest.mark.parametrize(
    "outcome",
    [[1, 0.5], (1, 0.5), [True, 0.5], np.array([1, 0.5]), [np.float32(1), np.float64(0.5)]],
    ids=["list", "tuple", "bool", "array", "numpy scalars"],
)
def test_numbers_of_every_kind_are_taken(outcome: Any) -> None:
    assert checked("f", outcome, 2) == [1.0, 0.5]


@pytest.mark.parametrize(
    ("outcome", "complaint"),
    [
        ([1.0, math.nan], "reward f returned nan for completion 2 of 2, which is not finite"),
        ([-math.inf, 1.0], "reward f returned -inf for completion 1 of 2, which is not finite"),
        ([1, 10**400], "completion 2 of 2, which is not finite"),
        ([1.0], "reward f returned 1 numbers for 2 completions"),
        ([[1.0], [2.0]], r"returned \[1.0\] for completion 1 of 2, which is not a number"),
        (["1", "2"], "returned '1' for completion 1 of 2, which is not a number"),
        ("12", "reward f returned a str, not a list of 2 numbers"),
        (1.0, "reward f returned a float, not a list of 2 numbers"),
        (None, "reward f returned None, not a list of 2 numbers"),
        ({0: 1.0, 1: 2.0}, "reward f returned a dict, not a list"),
    ],
)
def test_anything_but_finite_numbers_is_refused(outcome: Any, complaint: str) -> None:
    with pytest.raises(RewardError, match=complaint):
        checked("f", outcome, 2)


def test_functions_that_share_a_name_keep_parts_of_their_own(file: Path) -> None:
    other = file.with_name("other.py")
    other.write_text("def length(completions, **columns): return [0.0] * len(completions)\n")
    functions = [f"{file}:length", f"{other}:length", f"{file}:later"]
    assert part_names(functions) == (f"{file}:length", f"{other}:length", "later")
    check_functions(functions)


def test_what_a_function_prints_goes_to_the_log(file: Path) -> None:
    assert score(file, "noisy").rewards == (1.0, 1.0)
    log = (file.parent / "logs" / "rewards.log").read_text()
    for line in ("printed by the reward", "written by the reward", "echoed by its child"):
        assert line in log


def test_a_large_group_passes(file: Path) -> None:
    assert score(file, "length", given=("x" * 5_000_000, "y")).rewards == (5_000_000, 1.0)


def test_the_arithmetic_reward_compares_up_to_the_end_of_text() -> None:
    given = ["85", " 85\n", "85<eos>12", "85<|im_end|>\n", "850", "58", ""]
    assert correct(["47+38="] * 7, given, answer=["85"] * 7) == [1, 1, 1, 1, 0, 0, 0]
    assert correct(["q"], [[{"role": "assistant", "content": "85</s>"}]], answer=["85"]) == [1]


# How a function may fail


def test_a_function_that_raises_stops_with_a_sentence_and_keeps_the_evidence(file: Path) -> None:
    with pytest.raises(RewardError) as caught:
        score(file, "length", "divides", columns={"answer": "42"}, prompt="how much?")
    kept = file.parent / "evidence" / "reward-error-0001.txt"
    line = FUNCTIONS.splitlines().index("    return [1 / 0]") + 1
    assert str(caught.value) == (
        f"reward divides raised ZeroDivisionError: division by zero ({file}:{line}); "
        f"prompt, completions and traceback are in {kept}"
    )
    for part in ("how much?", "bcd", '"answer": "42"', "Traceback", "return [1 / 0]"):
        assert part in kept.read_text()


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("leaves", "reward leaves raised SystemExit: enough"),
        ("dies", r"reward dies ended its worker process \(exit status 3\)"),
        ("segfaults", r"reward segfaults ended its worker process \(killed by SIGSEGV\)"),
        ("needs", "reward needs raised TypeError: .*'answer'"),
        ("not_a_number", "reward not_a_number returned nan for completion 1 of 2"),
        ("too_few", "reward too_few returned 1 numbers for 2 completions"),
    ],
)
def test_every_failure_names_the_function(file: Path, name: str, complaint: str) -> None:
    with pytest.raises(RewardError, match=complaint):
        score(file, name)


def test_a_function_that_hangs_is_killed_with_its_children_and_replaced(file: Path) -> None:
    async def hang() -> None:
        async with running(file, "hangs", seconds=3.0) as runner:
            hanging = asyncio.create_task(ask(runner, "do", folder=str(file.parent)))
            pids = await started(file.parent)
            with pytest.raises(RewardError, match=r"hangs took over 3 s for one group \(rewards.seconds\)"):
                await hanging
            assert_ends(*pids)
            assert (await ask(runner, "do not", folder=str(file.parent))).rewards == (1.0,)

    asyncio.run(hang())


def test_a_worker_that_somebody_killed_costs_nobody_a_score(file: Path) -> None:
    """Killed while it waits, and while it scores: the group goes to a fresh one."""

    async def kill_twice() -> None:
        said: list[str] = []
        async with running(file, "pid", "hangs", on_retry=said.append) as runner:
            idle = (await ask(runner, "do not", folder=str(file.parent))).parts["pid"][0]
            os.kill(int(idle), signal.SIGKILL)
            scores = await ask(runner, "do not", folder=str(file.parent))
            assert scores.parts["hangs"] == (1.0,)
            assert scores.parts["pid"] != (idle,)
            scoring = asyncio.create_task(ask(runner, "do", folder=str(file.parent)))
            busy, _ = await started(file.parent)
            (file.parent / "enough").touch()  # the function hangs no longer
            os.kill(busy, signal.SIGKILL)
            assert (await scoring).parts["hangs"] == (1.0,)
            assert runner.retries == 2
            assert said[1] == "reward hangs ended its worker process (killed by SIGKILL): the group is scored again"

    asyncio.run(kill_twice())


def test_a_function_that_needs_too_much_memory_is_told_so(file: Path) -> None:
    async def swell() -> None:
        async with running(file, "swells", memory_mb=512) as runner:
            with pytest.raises(RewardError, match=r"reward swells needed more than 512 MB \(rewards.memory_mb\)"):
                await ask(runner, "x")

    asyncio.run(swell())


def test_a_worker_that_died_is_replaced(file: Path) -> None:
    async def die_twice() -> None:
        async with running(file, "dies", on_error="zero") as runner:
            assert (await ask(runner, "x")).failed
            assert (await ask(runner, "x")).failed

    asyncio.run(die_twice())


def test_on_error_zero_scores_zeros_counts_them_and_keeps_some_evidence(file: Path) -> None:
    async def fail_often() -> None:
        async with running(file, "divides", on_error="zero") as runner:
            for _ in range(EVIDENCE_KEPT + 2):
                scores = await ask(runner, "x", "y")
                assert scores == Scores(rewards=(0.0, 0.0), parts={"divides": (0.0, 0.0)}, failed=True)
            assert runner.failures == EVIDENCE_KEPT + 2

    asyncio.run(fail_often())
    assert len(list((file.parent / "evidence").iterdir())) == EVIDENCE_KEPT


def test_earlier_evidence_is_not_overwritten(file: Path) -> None:
    for _ in range(2):
        with pytest.raises(RewardError):
            score(file, "divides")
    assert len(list((file.parent / "evidence").iterdir())) == 2


@pytest.mark.parametrize(
    ("function", "complaint"),
    [
        ("length", "reward length: write it as pkg.module:function or path/to/file.py:function"),
        ("no.such:length", "there is no module no; a file is written"),
        ("rondo.rewards.no:length", "there is no module rondo.rewards.no;"),
        ("no/such.py:length", "there is no file no/such.py in "),
        ("{folder}/scores.py:no", "scores.py has no no"),
        ("{folder}/scores.py:NUMBER", "NUMBER is a int, not a function"),
        ("{folder}/raises.py:f", r"importing .*raises.py failed: ValueError: at import \(.*raises.py:1\)"),
        ("{folder}/syntax.py:f", "importing .*syntax.py failed: SyntaxError: "),
        ("{folder}/needs.py:f", "needs.py failed: ModuleNotFoundError: No module named 'absent'"),
        ("{folder}/exits.py:f", "exits.py failed: SystemExit: 1"),
        ("{folder}/kills.py:f", r"importing .*kills.py:f ended its worker process \(exit status 9\)"),
    ],
)
def test_a_function_that_cannot_be_found_is_said_so(file: Path, function: str, complaint: str) -> None:
    (file.parent / "raises.py").write_text("raise ValueError('at\\nimport')\n")
    (file.parent / "syntax.py").write_text("def f(:\n")
    (file.parent / "needs.py").write_text("import absent\n")
    (file.parent / "exits.py").write_text("raise SystemExit(1)\n")
    (file.parent / "kills.py").write_text("import os; os._exit(9)\n")
    with pytest.raises(RewardError, match=complaint):
        check_functions([function.format(folder=file.parent)])


def test_a_function_that_is_listed_twice_is_refused(file: Path) -> None:
    with pytest.raises(RewardError, match="listed twice"):
        check_functions([f"{file}:length", f"{file}:length"])


def test_checking_functions_imports_no_user_code_here(file: Path) -> None:
    before = set(sys.modules)
    check_functions([f"{file}:length"])
    assert not [name for name in set(sys.modules) - before if "scores" in name]


def test_a_start_that_fails_leaves_nothing_to_close(file: Path) -> None:
    async def start() -> None:
        runner = make_runner(file, "no", workers=2)
        with pytest.raises(RewardError, match=r"scores.py has no no"):
            await runner.start()
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(start())


# Concurrency


def test_two_workers_score_two_groups_at_once(file: Path) -> None:
    async def both() -> None:
        async with running(file, "meets", workers=2) as runner:
            await asyncio.gather(*(ask(runner, name, folder=str(file.parent)) for name in ("one", "two")))

    asyncio.run(both())


def test_more_groups_than_workers_wait_for_their_turn(file: Path) -> None:
    async def many() -> list[Scores]:
        async with running(file, "length", workers=2) as runner:
            return await asyncio.gather(*(ask(runner, "x" * size) for size in range(1, 20)))

    assert [scores.rewards for scores in asyncio.run(many())] == [(size,) for size in range(1, 20)]


def test_it_runs_in_an_event_loop_of_another_thread(file: Path) -> None:
    found: list[Scores] = []
    thread = threading.Thread(target=lambda: found.append(score(file, "length")))
    thread.start()
    thread.join()
    assert found[0].rewards == (1.0, 3.0)


def test_close_ends_a_score_that_hangs_and_those_that_wait(file: Path) -> None:
    async def close_early() -> None:
        async with running(file, "hangs") as runner:
            tasks = [asyncio.create_task(ask(runner, "do", folder=str(file.parent))) for _ in range(3)]
            pids = await started(file.parent)
            await runner.close()
            assert not is_running(pids[0])
            assert_ends(*pids)
            for outcome in await asyncio.gather(*tasks, return_exceptions=True):
                assert isinstance(outcome, DiedError)

    asyncio.run(close_early())
    assert not (file.parent / "evidence").exists()


def test_a_score_after_close_is_refused_and_starts_no_process(file: Path) -> None:
    async def score_late() -> None:
        async with running(file, "length") as runner:
            await runner.close()
            (file.parent / "logs" / "rewards.log").unlink()  # a new process would make it again
            with pytest.raises(DiedError, match="were closed"):
                await ask(runner, "late")

    asyncio.run(score_late())
    assert not (file.parent / "logs" / "rewards.log").exists()


@pytest.mark.parametrize("turns", range(10))
def test_close_while_workers_start_leaves_no_process(file: Path, turns: int) -> None:
    async def close_at_once() -> None:
        runner = make_runner(file, "length", workers=2)
        starting = asyncio.create_task(runner.start())
        for _ in range(turns):  # of the event loop: closes before, while and after the processes are started
            await asyncio.sleep(0)
        async with asyncio.timeout(60):
            await runner.close()
        with pytest.raises(DiedError, match="were closed"):
            await starting

    def children() -> set[str]:
        return set(Path(f"/proc/self/task/{threading.get_native_id()}/children").read_text().split())

    before = children()  # other tests' engines
    asyncio.run(close_at_once())
    assert not [pid for pid in children() - before if is_running(int(pid))]


def test_a_cancelled_score_frees_its_place(file: Path) -> None:
    async def cancel() -> None:
        async with running(file, "hangs") as runner:
            hanging = asyncio.create_task(ask(runner, "do", folder=str(file.parent)))
            pids = await started(file.parent)
            hanging.cancel()
            assert (await ask(runner, "do not", folder=str(file.parent))).rewards == (1.0,)
            assert_ends(*pids)

    asyncio.run(cancel())


def test_a_worker_leaves_ctrl_c_to_its_parent(file: Path) -> None:
    assert score(file, "interrupted").rewards == (1.0, 1.0)


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel tells a process of its parent's end only there")
def test_a_worker_that_hangs_does_not_outlive_its_killed_parent(file: Path) -> None:
    program = (
        "import asyncio; from pathlib import Path; from rondo.rewards.runner import RewardRunner\n"
        f"folder = Path({str(file.parent)!r})\n"
        "async def main():\n"
        "    functions = [f'{folder}/scores.py:hangs']\n"
        "    runner = RewardRunner(functions, [], 600, 'fail', 1, folder / 'log', folder)\n"
        "    await runner.score('q', ['do'], [[1]], {'folder': str(folder)})\n"
        "asyncio.run(main())\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", program])
    worker, child = wait_for_pids(file.parent / "started")
    parent.kill()
    parent.wait()
    assert_ends(worker)
    os.kill(child, signal.SIGKILL)  # of the user's own making: only the runner's kill reaches it


def test_workers_and_prompts_start_without_torch_and_transformers() -> None:
    modules = "rondo.rewards.worker, rondo.rewards.runner, rondo.prompts.dataset, rondo.prompts.template"
    program = f"import sys, {modules}; print(*sys.modules)"
    imported = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert not {"torch", "transformers", "numpy", "pyarrow", "pydantic"} & set(imported.stdout.split())


def test_a_worker_can_be_driven_by_hand(file: Path) -> None:
    lines = [
        {"functions": [f"{file}:length"]},
        {"id": 5, "prompt": "q", "completions": ["ab"], "completion_ids": [[1]], "columns": {}},
    ]
    given = "".join(json.dumps(line) + "\n" for line in lines)
    worker = subprocess.run(
        [sys.executable, "-m", "rondo.rewards.worker"],
        input=given,
        capture_output=True,
        text=True,
        check=True,
    )
    assert [json.loads(line) for line in worker.stdout.splitlines()] == [
        {"ready": True},
        {"id": 5, "running": "length"},
        {"id": 5, "parts": {"length": [2.0]}},
    ]
