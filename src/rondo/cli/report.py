"""`rondo report`: a run to look at."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rondo.cli.app import app


@app.command()
def report(
    run: Annotated[Path, typer.Argument(help="A run's folder.")],
    against: Annotated[Path | None, typer.Option(help="Another run, to see side by side.")] = None,
    out: Annotated[Path | None, typer.Option(help="Where to write the page; else report.html in the run.")] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Write the spans here instead, for Perfetto or chrome://tracing.")
    ] = None,
    live: Annotated[bool, typer.Option("--live", help="Serve the page while the run goes on.")] = False,
    host: Annotated[str, typer.Option(help="Address to serve on, with --live.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to serve on, with --live; 0: any free one.")] = 0,
) -> None:
    """Write a run as one HTML file that opens offline: timeline, curves, where the time went, samples, proof."""
    from rondo.report.data import gather
    from rondo.report.page import render

    if trace is not None:
        from rondo.observe.trace import write_trace

        events = write_trace(run, trace)
        typer.echo(f"wrote {events} events to {trace}: open it in https://ui.perfetto.dev or chrome://tracing")
        return
    if live:
        from rondo.report.live import serve

        serve(run, against=against, host=host, port=port)
        return
    path = out or run / "report.html"
    text = render(gather(run, against=against))
    path.write_text(text, encoding="utf-8")
    typer.echo(f"wrote {path} ({len(text.encode()) / 1e6:.1f} MB): open it in a browser")
