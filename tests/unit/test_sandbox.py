"""Programs that try to get out, each by another way; and the rewards that run programs and read mathematics."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from rondo.errors import RewardError
from rondo.rewards import sandbox
from rondo.rewards.sandbox import Limits, refusal, run_python

LIMITS = Limits(seconds=20.0, memory_mb=256, processes=8, disk_mb=2)

locked_in = pytest.mark.skipif(bool(why := refusal()), reason=f"NOT TESTED HERE: {why}")


def left_behind() -> list[str]:
    """Folders and processes of a jail that is over."""
    found = [str(path) for path in Path(tempfile.gettempdir()).glob("rondo-jail-*")]
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                line = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if b"jail.py" in line or b"program.py" in line:
                found.append(line.decode(errors="replace"))
    return found


@locked_in
def test_an_honest_program_reads_computes_writes_starts_and_answers():
    program = """
import subprocess, threading
open("mine", "w").write(input())
thread = threading.Thread(target=print, args=(open("/tmp/mine").read(),))
thread.start(); thread.join()
print(subprocess.run(["/bin/echo", "and so on"], capture_output=True, text=True).stdout)
"""
    ended = run_python(program, stdin="hello\n", limits=LIMITS)
    assert (ended.code, ended.out.split("\n")[:2], ended.late) == (0, ["hello", "and so on"], False), ended.err
    assert not left_behind()


@locked_in
def test_there_is_no_network_not_even_to_this_machine():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        socket.create_connection(("127.0.0.1", port)).close()  # from here it can be reached
        ended = run_python(f"import socket; socket.create_connection(('127.0.0.1', {port}), 5)", limits=LIMITS)
    assert ended.code == 1
    assert "Network is unreachable" in ended.err


@locked_in
def test_nothing_outside_its_folder_can_be_written_or_seen(tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("the answer")
    program = f"""
import os
for path in ("/x", "/usr/x", "/dev/x", {str(tmp_path / "x")!r}, {sys.base_prefix + "/x"!r}, "/work/../x"):
    try:
        open(path, "w")
        print("wrote", path)
    except OSError:
        pass
for path in ({str(secret)!r}, "/etc/passwd", "/proc/1/environ", "/proc/self/status", "/sys/kernel", "/home"):
    if os.path.exists(path):
        print("saw", path)
print(sorted(os.listdir("/proc")) if os.path.exists("/proc") else "no processes")
"""
    ended = run_python(program, limits=LIMITS)
    assert (ended.code, ended.out) == (0, "no processes\n"), ended.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["secret"]


@locked_in
def test_no_process_but_its_own_can_be_signalled(tmp_path):
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        program = f"""
import os, signal
for pid in ({os.getpid()}, {bystander.pid}, os.getppid(), 1):
    try:
        os.kill(pid, signal.SIGKILL)
    except OSError:
        pass
print("tried", flush=True)
os.kill(-1, signal.SIGKILL)
"""
        ended = run_python(program, limits=LIMITS)
        assert ended.out == "tried\n"
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


@locked_in
def test_a_fork_bomb_meets_its_limit_and_leaves_nobody():
    program = """
import os, time
made = 0
try:
    while True:
        if os.fork() == 0:
            os.setsid()
            time.sleep(600)
        made += 1
except OSError:
    print(made)
"""
    ended = run_python(program, limits=LIMITS)
    assert 0 < int(ended.out) < LIMITS.processes, ended.err
    assert not left_behind()


@locked_in
@pytest.mark.parametrize(
    ("program", "complaint"),
    [
        ("held = bytearray(300 << 20)", "MemoryError"),
        ("open('large', 'wb').write(bytes(3 << 20))", "File too large|No space left"),
        ("while True: print('x' * 1000)", "File too large"),
        ("[open(str(n), 'wb').write(bytes(1 << 20)) for n in range(9)]", "No space left"),
        ("import ctypes; assert ctypes.CDLL(None).unshare(0x10000000) == 0", "AssertionError"),
    ],
)
def test_memory_disk_output_and_new_namespaces_are_limited(program, complaint):
    ended = run_python(program, limits=LIMITS)
    assert ended.code != 0
    assert any(word in ended.err for word in complaint.split("|")), ended.err
    assert len(ended.out) <= LIMITS.output_bytes


@locked_in
def test_an_endless_program_is_killed_in_time_with_all_that_it_started():
    program = "import os\nos.fork()\nos.setsid() if os.getpid() % 2 else None\nwhile True: pass"
    began = time.monotonic()
    ended = run_python(program, limits=Limits(seconds=1.0))
    assert ended.late
    assert time.monotonic() - began < 15
    assert not left_behind()


@locked_in
def test_a_program_dies_with_the_worker_that_runs_it():
    code = "from rondo.rewards.sandbox import *; run_python('while True: pass', limits=Limits(seconds=600))"
    worker = subprocess.Popen([sys.executable, "-c", code])
    deadline = time.monotonic() + 30
    while not any("program.py" in line for line in left_behind()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    worker.kill()
    worker.wait()
    while any("program.py" in line for line in left_behind()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    for path in Path(tempfile.gettempdir()).glob("rondo-jail-*"):
        path.rmdir()  # empty: all that the killed worker leaves


@pytest.mark.skipif(shutil.which("unshare") is None, reason="no unshare command")
def test_where_the_kernel_refuses_namespaces_nothing_is_run(tmp_path):
    mark = tmp_path / "ran"
    code = tmp_path / "runs.py"
    code.write_text(
        f"from rondo.rewards.sandbox import *\nrun_python('print(1)', limits=Limits())\nopen({str(mark)!r}, 'w')"
    )
    limit = "echo 0 > /proc/sys/user/max_mnt_namespaces && echo 0 > /proc/sys/user/max_user_namespaces"
    inside = [
        "unshare",
        "--user",
        "--map-root-user",
        "sh",
        "-c",
        f'{limit} && exec "$0" "$1"',
        sys.executable,
        str(code),
    ]
    ended = subprocess.run(inside, capture_output=True, text=True, check=False)
    if "SandboxRefused" not in ended.stderr and "max_" in ended.stderr:
        pytest.skip(f"NOT TESTED HERE: {ended.stderr}")
    assert "programs that a model wrote are not run here: the kernel refuses what locks them in" in ended.stderr
    assert not mark.exists()


def test_a_name_cannot_lead_out_of_the_sandbox():
    for name in ("../x", "/etc/x", "..", "a/b"):
        with pytest.raises(RewardError, match="plain names"):
            sandbox.run(["/bin/true"], files={name: ""}, limits=LIMITS)


@locked_in
def test_programs_are_scored_by_their_tests():
    from rondo.rewards.code import passed_share, passes

    good = "Here it is:\n```python\ndef add(a, b):\n    return a + b\n```\nThat is all."
    wrong = "```\ndef add(a, b):\n    return a - b\n```"
    leaver = "import os\nos._exit(0)"
    tests = ["assert add(1, 2) == 3", "assert add(2, 2) == 4", "assert add(0, 0) == 0"]
    completions = [good, wrong, leaver]
    assert passes(["p"] * 3, completions, [tests] * 3) == [1.0, 0.0, 0.0]
    assert passed_share(["p"], [wrong], [tests]) == [pytest.approx(1 / 3)]
    doubles = [[{"input": "4\n", "output": "8"}, {"input": "0", "output": " 0\n"}]] * 2
    assert passes(["p"] * 2, ["print(2 * int(input()))", "print(8)"], doubles) == [1.0, 0.0]


@locked_in
def test_a_chat_completion_is_read_and_a_row_without_tests_is_named():
    from rondo.rewards.code import passes, program_of

    assert program_of([{"role": "assistant", "content": "```py\n1\n```\n```python\n2\n```"}]) == "2\n"
    with pytest.raises(RewardError, match="the column tests must be a list"):
        passes(["p"], ["1"], [[]])
    with pytest.raises(RewardError, match="a test is a statement or"):
        passes(["p"], ["1"], [[{"in": 1}]])


@pytest.mark.heavy  # for what math-verify imports
def test_answers_are_compared_as_mathematics():
    pytest.importorskip("math_verify")
    from rondo.rewards.math import correct

    chat = [{"role": "assistant", "content": "$1/2$"}]
    said = ["So it is $\\frac{1}{2}$.", "The answer is \\boxed{0.5}", "I think 2", chat]
    assert correct(["p"] * 4, said, ["1/2"] * 4) == [1.0, 1.0, 0.0, 1.0]
    with pytest.raises(RewardError, match="no mathematics"):
        correct(["p"], ["1"], [""])
