"""The page: data, style and scripts in one file.

Text of a model ends up in here, so nothing of it is ever markup: it travels as JSON in which `<` is escaped, the
scripts show it by textContent only, and the page forbids itself every script but its own, and every connection.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
SCRIPTS = ("tools.js", "timeline.js", "gestures.js", "curves.js", "account.js", "samples.js", "main.js")
VENDOR = "uPlot 1.6.32, MIT licence, copyright (c) 2022 Leon Sorokin"


def render(data: dict[str, Any]) -> str:
    script = "\n".join([_text("vendor/uPlot.iife.min.js"), *(_text(f"page/{name}") for name in SCRIPTS)])
    style = _text("vendor/uPlot.min.css") + _text("page/style.css")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; img-src data:"
    if data["live"]:
        policy += "; connect-src 'self'"
    values = {
        "policy": policy,
        "title": html.escape(f"{data['runs'][0]['folder']} · Rondo"),
        "vendor": html.escape(VENDOR),
        "style": style,
        "data": embeddable(data),
        "script": script,
    }
    return re.sub(
        r"\{\{(\w+)\}\}", lambda found: values[found[1]], _text("page/page.html")
    )  # once: nothing is put in twice


def embeddable(data: Any) -> str:
    """JSON that can stand inside a script element whatever it holds."""
    text = json.dumps(finite(data), ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return (
        text.replace("<", "\\u003c").replace(">", "\\u003e").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
    )


def finite(value: Any) -> Any:
    """The same with None for what JSON has no number for."""
    if isinstance(value, float):
        return value if value == value and abs(value) != float("inf") else None
    if isinstance(value, dict):
        return {str(key): finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite(inner) for inner in value]
    return value


def _text(name: str) -> str:
    return (HERE / name).read_text(encoding="utf-8")
