"""News of engines between a launcher and rank 0's machine, where those share no disk.

The launcher keeps a folder of its own like the run's `engines` folder (restarts.py says what is in it), and works on
that. What changes there is to be delivered to rank 0's machine; what rank 0 says there is to be heard here, once.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from rondo.launch.reaper import remove_when_we_end
from rondo.launch.restarts import write_word


class News:
    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="rondo-news-"))  # stands for the run's
        self._reaper = remove_when_we_end(self.folder)
        self._words = self.folder / "engines"
        self._words.mkdir()
        self._heard: dict[str, str] = {}
        self._delivered: dict[str, str] = {}

    def hear(self, name: str, text: str) -> None:
        """A file as an engine or rank 0 wrote it; one that was heard before says nothing new."""
        if text != self._heard.get(name):
            self._heard[name] = text
            write_word(self._words / name, json.loads(text))

    def changes(self) -> Mapping[str, str | None]:
        """For rank 0's machine, since the last time: files that are new or different, and None for one that is gone."""
        now = {path.name: path.read_text() for kind in ("json", "gone") for path in self._words.glob(f"*.{kind}")}
        before, self._delivered = self._delivered, now
        return {name: now.get(name) for name in sorted({*now, *before}) if now.get(name) != before.get(name)}

    def close(self) -> None:
        shutil.rmtree(self.folder)
        self._reaper.close()
