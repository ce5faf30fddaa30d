"""A commented config to start from: every key with its default and what it means, the few that must be set first."""

from __future__ import annotations

import json
import textwrap
from typing import Any

from pydantic import BaseModel

from rondo.config import Config

WIDTH = 118


def starter(*, name: str, model: str, data: str, prompt: str, rewards: str) -> str:
    """A TOML file with these values set; every other key is there as a comment, with its default."""
    given: dict[str, dict[str, Any]] = {
        "run": {"name": name},
        "model": {"path": model},
        "data": {"train": data, "prompt": prompt},
        "rewards": {"functions": [rewards]},
    }
    parts = [
        f"# {name}: begun by `rondo init`. What stands behind a # is a key's default: remove the # to change it.",
        "",
    ]
    for section, field in Config.model_fields.items():
        kind = field.annotation
        assert isinstance(kind, type)
        assert issubclass(kind, BaseModel)
        parts += _section(section, kind, given.get(section, {}))
    return "\n".join(parts) + "\n"


def _section(title: str, kind: type[BaseModel], given: dict[str, Any]) -> list[str]:
    lines, below = [f"[{title}]"], []
    for key, field in kind.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            below += _section(f"{title}.{key}", inner, {})
            continue
        lines += textwrap.wrap(field.description or "", WIDTH, initial_indent="# ", subsequent_indent="# ")
        if key in given:
            lines.append(f"{key} = {_toml(given[key])}")
        elif field.default is None:
            lines.append(f"# {key} =")
        else:
            lines.append(f"# {key} = {_toml(field.default)}")
    return [*lines, "", *below]


def _toml(value: Any) -> str:
    """JSON's strings, numbers, booleans and lists are TOML's too."""
    return json.dumps(value, ensure_ascii=False)
