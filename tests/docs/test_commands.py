"""Every command of README and book that a CPU can run in a minute, run as it stands."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import rondo
from tests.docs.blocks import PAGES, ROOT, blocks

pytestmark = pytest.mark.heavy
RUN = {page: [b for b in blocks(page) if b.language == "bash" and not b.title] for page in PAGES}


@pytest.fixture(scope="module")
def shell(tmp_path_factory):
    """Runs a line in a folder that all pages share, with `rondo` and `python` as a reader has them, from this tree.
    A line that has been run there is not run again."""
    folder, programs = tmp_path_factory.mktemp("reader"), tmp_path_factory.mktemp("bin")
    (folder / "configs").symlink_to(ROOT / "configs")
    for name, words in {"rondo": "-m rondo", "python": ""}.items():
        (programs / name).write_text(f'#!/bin/sh\nexec {sys.executable} {words} "$@"\n')
        (programs / name).chmod(0o755)
    environment = os.environ | {
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(Path(rondo.__file__).parent.parent.resolve()),
    }
    done: set[str] = set()

    def run(line: str) -> None:
        if line in done:
            return
        command = ["bash", "-euo", "pipefail", "-c", line]
        ended = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False
        )
        assert ended.returncode == 0, f"{line}\n{ended.stdout[-2000:]}\n{ended.stderr[-2000:]}"
        done.add(line)

    return run


@pytest.mark.parametrize("page", [page for page, found in RUN.items() if found], ids=lambda page: page.name)
def test_the_commands_of_a_page_work(page, shell):
    for block in RUN[page]:
        for line in block.text.splitlines():
            if command := line.partition(" #")[0].strip():
                shell(command)
