"""The launcher's engines: started again after growing pauses, up to a limit; with hand-made children and a clock."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rondo.errors import DiedError, UserError
from rondo.launch.restarts import Posts, read_word, write_word


class FakeChild:
    def __init__(self, number: int) -> None:
        self.pid = number
        self.exit_code: int | None = None
        self.address = ""
        self.said = ""
        self.told: list[str] = []

    def obituary(self) -> str:
        return f"engine-0 (pid {self.pid}) ended with exit code {self.exit_code}"

    def last_error(self) -> str:
        return self.said

    def kill(self) -> None:
        self.told.append("kill")
        self.exit_code = -9

    def ask_to_end(self) -> None:
        self.told.append("term")


class Scene:
    def __init__(self, folder: Path, *, limit: int = 2) -> None:
        (folder / "engines").mkdir()
        self.folder = folder / "engines"
        self.now = 0.0
        self.said: list[str] = []
        self.children: list[FakeChild] = []
        self.posts = Posts(
            folder=folder, start=self._start, limit=limit, patience=300, say=self.said.append, clock=lambda: self.now
        )  # type: ignore[arg-type]
        self.posts.open("engine-0")

    def _start(self, name: str) -> FakeChild:
        self.children.append(FakeChild(len(self.children)))
        return self.children[-1]

    def announce(self) -> None:
        word = {"url": "http://e", "boot": f"b{len(self.children)}", "pid": 1}
        (self.folder / "engine-0.json").write_text(json.dumps(word))
        assert self.posts.tend()

    def after(self, seconds: float) -> int:
        """How many were started by then."""
        self.now += seconds
        self.posts.tend()
        return len(self.children)


def test_an_engine_that_ends_is_started_again_after_pauses_that_double_until_the_limit(tmp_path):
    scene = Scene(tmp_path)
    scene.announce()
    scene.children[0].exit_code = 1
    assert [scene.after(0), scene.after(0.9), scene.after(0.2)] == [1, 1, 2]
    assert not (scene.folder / "engine-0.json").exists()
    assert "engine-0 (pid 0) ended with exit code 1; it is started again in 1 s (1 of 2)" in scene.said
    scene.children[1].exit_code = 1  # before it was even ready
    assert [scene.after(0), scene.after(1.9), scene.after(0.2)] == [2, 2, 3]
    scene.children[2].exit_code = 1
    assert [scene.after(0), scene.after(99)] == [3, 3]
    gone = read_word(scene.folder / "engine-0.gone")
    assert gone == {"reason": "engine-0 (pid 2) ended with exit code 1 (engines.max_restarts = 2)"}


def test_an_engine_that_lived_long_starts_with_a_clean_slate(tmp_path):
    scene = Scene(tmp_path, limit=1)
    for _ in range(3):
        scene.announce()
        scene.now += 700
        scene.children[-1].exit_code = 1
        scene.after(0)
        scene.after(1.1)
    assert len(scene.children) == 4


def test_an_engine_that_hangs_is_killed_and_word_about_an_earlier_process_means_nothing(tmp_path):
    scene = Scene(tmp_path)
    scene.announce()
    write_word(scene.folder / "engine-0.lost", {"boot": "another", "reason": "it hangs", "leave": False})
    scene.after(0)
    assert scene.children[0].told == []
    write_word(scene.folder / "engine-0.lost", {"boot": "b1", "reason": "it hangs", "leave": False})
    scene.after(0)
    assert scene.children[0].told == ["kill"]
    assert scene.after(1.1) == 2
    assert "was killed: it hangs" in scene.said[0]


def test_an_engine_that_was_asked_to_leave_is_not_started_again(tmp_path):
    scene = Scene(tmp_path)
    scene.announce()
    write_word(scene.folder / "engine-0.lost", {"boot": "b1", "reason": "", "leave": True})
    scene.after(0)
    scene.children[0].exit_code = 0
    assert (scene.children[0].told, scene.after(99)) == (["term"], 1)


def test_an_engine_that_cannot_even_start_is_an_error_at_once(tmp_path):
    scene = Scene(tmp_path)
    scene.children[0].exit_code = 1
    with pytest.raises(DiedError, match="ended with exit code 1"):
        scene.posts.tend()
    scene.children[0].exit_code, scene.children[0].said = 2, "model X was not found"
    with pytest.raises(UserError, match="model X was not found"):
        scene.posts.tend()


def test_a_successor_that_never_gets_ready_is_killed_and_counted(tmp_path):
    scene = Scene(tmp_path)
    scene.announce()
    scene.children[0].exit_code = 1
    scene.after(0)
    scene.after(1.1)
    scene.after(301)
    assert scene.children[1].told == ["kill"]
    assert "was killed: not ready after 300 s; it is started again in 2 s (2 of 2)" in scene.said[-1]
