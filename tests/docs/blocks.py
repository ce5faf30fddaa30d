"""The fenced blocks of README and book, and what their info strings say.

The lines of a ```bash block are run by a test, one after the other in a folder that all pages share; those of one with
a title are not, and the title says why. Other blocks have another language: `text` for what is shown.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "docs" / "decisions").glob("*.md")])

# Why a command is not run.
REASONS = {"takes minutes", "needs a GPU", "needs vLLM", "needs Ray", "needs several machines", "needs a running job"}
PROGRAMS = ("rondo", "make", "python", "python3", "pip", "torchrun", "ray", "git", "curl", "source", "docker")


@dataclass(frozen=True, kw_only=True)
class Block:
    page: Path
    line: int
    language: str
    title: str
    text: str

    @property
    def where(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(page: Path) -> Iterator[Block]:
    lines = iter(enumerate(page.read_text().splitlines(), start=1))
    for number, line in lines:
        if opened := re.match(r"\s*```(\w*)(.*)$", line):
            title = re.search(r'title="([^"]*)"', opened[2])
            inside = []
            for _, below in lines:
                if below.strip() == "```":
                    break
                inside.append(below)
            yield Block(
                page=page, line=number, language=opened[1], title=title[1] if title else "", text="\n".join(inside)
            )  # fmt: skip


def looks_like_a_command(text: str) -> bool:
    return any(line.split(" ")[0].rpartition("/")[2] in PROGRAMS for line in text.splitlines() if " " in line)
