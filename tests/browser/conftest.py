"""Debian's Chromium, headless, through Playwright. `make integration` installs both, or says loudly why it cannot."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path

import pytest

ARTIFACTS = Path(__file__).resolve().parents[2] / "artifacts"


@pytest.fixture(scope="module")  # not longer: its driver keeps an event loop running in this thread
def browser():
    playwright = pytest.importorskip("playwright.sync_api", reason="NO BROWSER TESTS: pip install playwright")
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("NO BROWSER TESTS: there is no chromium here (Debian: apt-get install chromium)")
    ARTIFACTS.mkdir(exist_ok=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its own business
        with playwright.sync_playwright() as driver:
            launched = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
            yield launched
            launched.close()
