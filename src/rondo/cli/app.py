"""The typer application, and the options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from typer.core import TyperGroup

ORDER = ["demo", "init", "doctor", "train", "serve", "join", "leave", "engines", "report", "plan", "verify", "replay"]


class InOrder(TyperGroup):
    """Commands in the order in which people meet them, not in that of the imports."""

    def list_commands(self, ctx: typer.Context) -> list[str]:  # type: ignore[override]
        return sorted(self.commands, key=lambda name: ORDER.index(name) if name in ORDER else len(ORDER))


app = typer.Typer(
    name="rondo",
    cls=InOrder,
    help="On-policy reinforcement learning for language models, at asynchronous speed.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

ConfigFile = Annotated[Path, typer.Argument(help="TOML config; see configs/.", metavar="FILE")]
Set = Annotated[
    list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Override one key; repeatable.")
]
RunDir = Annotated[Path | None, typer.Option(help="The run's folder, instead of runs/NAME.")]
