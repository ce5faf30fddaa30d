"""What `rondo init` finds out about a user's data, and the reward function it begins."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rondo.errors import ConfigError
from rondo.prompts.dataset import read_rows

REWARDS = '''"""What a good response is. Every argument is a list with an entry per response; so is what is returned."""


def reward({arguments}):
    # completions: what the model wrote{columns}
    return [0.0 for completion in completions]
'''


def columns_of(data: Path, prompt: str) -> list[str]:
    """The other columns of the first row: what reward functions are given. Raises a sentence if there is no such file
    or no such prompt column."""
    return list(read_rows(data, prompt)[0].columns)


def begin_rewards(path: Path, columns: Sequence[str]) -> str:
    """Writes a reward function to fill in; the words by which a config names it."""
    if path.exists():
        raise ConfigError(f"{path} is there already: name its function with --rewards {path}:NAME")
    named = [name for name in columns if name.isidentifier()]
    listed = f"; of your data: {', '.join(named)}" if named else ""
    path.write_text(REWARDS.format(arguments=", ".join(["completions", *named, "**others"]), columns=listed))
    return f"{path}:reward"
