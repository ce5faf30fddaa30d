"""The command line. Nothing heavy is imported until a command needs it."""

from __future__ import annotations

import sys

from rondo.cli import children, engines, plan, prove, report, serve, start, train
from rondo.cli.app import app
from rondo.errors import RondoError

__all__ = ["app", "children", "engines", "main", "plan", "prove", "report", "serve", "start", "train"]


def main() -> None:
    try:
        app()
    except RondoError as error:
        sys.stdout.flush()
        sys.stderr.write(f"error: {error}\n")
        sys.exit(error.exit_code)
