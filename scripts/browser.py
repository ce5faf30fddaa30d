"""Makes sure that the browser tests can run: Playwright's driver from the package index, Chromium from the system.

Says loudly what is missing where it cannot be had; the tests are then skipped, as loudly.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def main() -> int:
    if importlib.util.find_spec("playwright") is None:
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*command, "--constraint", str(ROOT / "constraints.txt"), "playwright"], check=False)
        importlib.invalidate_caches()
        if importlib.util.find_spec("playwright") is None:
            return missing("playwright could not be installed: pip install playwright")
    if not chromium() and os.geteuid() == 0 and shutil.which("apt-get"):
        sys.stdout.write("installing chromium ...\n")
        sys.stdout.flush()
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "check": False}
        subprocess.run(["apt-get", "update"], **quiet)
        subprocess.run(["apt-get", "install", "--yes", "--no-install-recommends", "chromium"], **quiet)
    if not chromium():
        return missing("there is no chromium here: install it (Debian: apt-get install chromium)")
    return 0


def chromium() -> str | None:
    return shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def missing(what: str) -> int:
    sys.stderr.write(f"\n*** THE BROWSER TESTS WILL BE SKIPPED: {what}\n\n")
    return 1


if __name__ == "__main__":
    sys.exit(main())
