"""No orphans: a child holds the read end of a pipe whose write end only its parent has.

When the parent ends, however it ends, the pipe closes and the child leaves. Unlike a parent-death signal this works
on every system and for parents that start children from any thread.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

VARIABLE = "RONDO_LIFELINE"  # set by the parent: standard input is a lifeline


def hold(clean_up: Callable[[], None] = lambda: None) -> None:
    """Called first thing in a child process; does nothing in one that a person started."""
    if os.environ.pop(VARIABLE, ""):
        threading.Thread(target=_watch, args=(clean_up,), name="lifeline", daemon=True).start()


def _watch(clean_up: Callable[[], None]) -> None:
    while os.read(0, 1024):
        pass
    clean_up()
    os._exit(3)
