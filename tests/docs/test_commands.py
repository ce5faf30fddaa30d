"""Every command of README and book that a CPU can run in a minute, run as it stands."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.docs.blocks import PAGES, ROOT, blocks

pytestmark = pytest.mark.heavy
RUN = {page: [b for b in blocks(page) if b.language == "bash" and not b.title] for page in PAGES}


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    """`rondo` and `python` as a reader has them, from this tree."""
    folder = tmp_path_factory.mktemp("bin")
    for name, words in {"rondo": "-m rondo", "python": ""}.items():
        path = folder / name
        path.write_text(f'#!/bin/sh\nexec {sys.executable} {words} "$@"\n')
        path.chmod(0o755)
    return folder


@pytest.mark.parametrize("page", [page for page, found in RUN.items() if found], ids=lambda page: page.name)
def test_the_commands_of_a_page_do_what_it_says(page, programs, tmp_path):
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    environment = os.environ | {"PATH": f"{programs}{os.pathsep}{os.environ['PATH']}"}
    for block in RUN[page]:
        command = ["bash", "-euo", "pipefail", "-c", block.text]
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, f"{block.where}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
