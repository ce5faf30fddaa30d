"""What MkDocs builds besides the pages in this folder: the references, from the code; and the list of decisions.

`mkdocs build` calls the functions below by their names. Pages of the navigation that are not there are left out.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from pydantic import BaseModel
from pydantic_core import PydanticUndefined
from typer.main import get_command

from rondo.cli import app
from rondo.config import Config

HERE = Path(__file__).parent
GENERATED = ("configuration.md", "commands.md", "decisions/index.md")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    pages = {"configuration.md": configuration(), "commands.md": commands(), "decisions/index.md": decisions()}
    assert tuple(pages) == GENERATED
    for name, text in pages.items():
        files.append(File.generated(config, name, content=text))
    return files


def configuration() -> str:
    """Every key: its type, its default and what it means, as the config models say."""
    lines = [
        "# Configuration",
        "",
        "One TOML file says everything. Every key is here, with its default; `rondo init MODEL DATA` writes them all "
        "into a file of your own. An unknown key is refused with the nearest known one. `--set section.key=value` "
        "overrides one key on the command line.",
        "",
    ]
    for name, kind in sections("", Config):
        lines += [f"## `[{name}]`", ""]
        if kind.__doc__:
            lines += [inspect.cleandoc(kind.__doc__), ""]
        lines += ["| key | type | default | |", "|---|---|---|---|"]
        for key, field in kind.model_fields.items():
            if not _is_section(field.annotation):
                lines.append(
                    f"| `{key}` | {_type(field.annotation)} | {_default(field)} | {_cell(field.description or '')} |"
                )
        lines.append("")
    return "\n".join(lines)


def sections(name: str, kind: type[BaseModel]) -> Iterator[tuple[str, type[BaseModel]]]:
    if name:
        yield name, kind
    for key, field in kind.model_fields.items():
        if _is_section(field.annotation):
            yield from sections(f"{name}.{key}".lstrip("."), field.annotation)  # type: ignore[arg-type]


def commands() -> str:
    """Every command and its options, as the command line declares them."""
    lines = ["# Commands", "", "`rondo COMMAND --help` says the same.", ""]
    group: Any = get_command(app)
    for name in group.list_commands(None):
        command = group.commands[name]
        if command.hidden:
            continue
        arguments = [_argument(parameter) for parameter in command.params if parameter.param_type_name == "argument"]
        lines.append(f"## `{' '.join(['rondo', name, *arguments])}`")
        lines += ["", _cell(command.help or ""), "", "| option | |", "|---|---|"]
        for parameter in command.params:
            said = _cell(getattr(parameter, "help", None) or "")
            if parameter.param_type_name == "argument":
                lines.append(f"| `{_argument(parameter)}` | {said} |")
            else:
                default = parameter.default
                shown = f" Default: `{default}`." if default not in (None, "", False) and not callable(default) else ""
                lines.append(f"| `{', '.join(parameter.opts)}` | {said}{shown} |")
        lines.append("")
    return "\n".join(lines)


def decisions() -> str:
    lines = [
        "# Decisions",
        "",
        "What a reader of the code would wonder about: what was decided, why, what else was tried.",
        "",
    ]
    for path in sorted((HERE / "decisions").glob("0*.md")):
        title = path.read_text().splitlines()[0].lstrip("# ")
        lines.append(f"- [{title}]({path.name})")
    return "\n".join(lines) + "\n"


def _argument(parameter: Any) -> str:
    return str(parameter.metavar or parameter.name.upper())


def _is_section(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def _type(kind: Any) -> str:
    text = kind.__name__ if isinstance(kind, type) and not getattr(kind, "__args__", None) else str(kind)
    text = re.sub(r"typing\.|Literal", "", text)
    text = re.sub(r"Annotated\[(\w+), .*\]", r"\1", text)
    if text.startswith("["):
        return " or ".join(f"`{word.strip()}`" for word in text.strip("[]").replace("'", '"').split(","))
    return _cell(text.replace("tuple", "list").replace(", ...", "").replace(" | None", ""))


def _default(field: Any) -> str:
    if field.default is PydanticUndefined:
        return "**required**"
    return "" if field.default is None else f"`{json.dumps(field.default, ensure_ascii=False)}`"


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())
