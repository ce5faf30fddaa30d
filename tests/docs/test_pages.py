"""What the pages say, as far as it can be checked without running it."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib

import pytest

from rondo.config import parse_config
from tests.docs.blocks import PAGES, REASONS, ROOT, blocks, looks_like_a_command

NEEDED = {"model": {"path": "m"}, "data": {"train": "d"}, "rewards": {"functions": ["r:r"]}}
ALL = [block for page in PAGES for block in blocks(page)]


def test_every_command_is_run_or_says_why_not():
    for block in ALL:
        if block.language == "bash":
            assert not block.title or block.title in REASONS, (
                f"{block.where}: a reason that nobody knows: {block.title}"
            )
        elif block.language in ("", "text", "sh", "shell", "console"):
            assert not looks_like_a_command(block.text), f"{block.where}: a command that is not marked as bash"


@pytest.mark.parametrize("block", [b for b in ALL if b.language == "toml"], ids=lambda block: block.where)
def test_every_config_that_is_shown_is_one(block):
    shown = tomllib.loads(block.text)
    if shown.keys() <= {"run", "build-system", "project"}:
        return
    parse_config({section: NEEDED.get(section, {}) | shown.get(section, {}) for section in {**NEEDED, **shown}})


@pytest.mark.parametrize("block", [b for b in ALL if b.language == "python"], ids=lambda block: block.where)
def test_every_program_that_is_shown_is_one(block):
    ast.parse(block.text)


@pytest.mark.parametrize("page", [page for page in PAGES if page.name == "README.md"], ids=lambda page: page.name)
def test_what_the_readme_links_to_is_there(page):
    for target in re.findall(r"\]\(([^)#]+)", page.read_text()):
        assert target.startswith("http") or (ROOT / target).exists(), target


def test_the_book_builds_without_a_warning_and_loads_nothing_from_the_network(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    pages = list(tmp_path.rglob("*.html"))
    assert len(pages) > 20
    for page in pages:
        text = page.read_text()
        loaded = re.findall(r'<(?:script|img|iframe|source)[^>]*src="(https?:)?//', text)
        loaded += re.findall(r'<link[^>]*rel="(?:stylesheet|preconnect|preload)"[^>]*href="(?:https?:)?//', text)
        assert not loaded, f"{page.name} loads from the network"
    reference = (tmp_path / "configuration.html").read_text()
    for key in ("prompts_per_period", "max_new_tokens", "trainer.lora", "batch_invariant"):
        assert key in reference
    commands = (tmp_path / "commands.html").read_text()
    for name in ("rondo train", "rondo plan", "rondo verify", "rondo doctor"):
        assert name in commands
