"""`rondo init` and `rondo doctor`: what comes before the first run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rondo.cli.app import Set, app
from rondo.errors import ConfigError


@app.command()
def init(
    model: Annotated[str, typer.Argument(help="A folder in Hugging Face format, a hub name, or rondo:NAME.")],
    data: Annotated[Path, typer.Argument(help="JSONL or Parquet file with a prompt per row.")],
    prompt: Annotated[str, typer.Option(help="The column that holds the prompt.")] = "prompt",
    rewards: Annotated[str, typer.Option(help="module:function or file.py:function; empty: rewards.py is begun.")] = "",
    out: Annotated[Path, typer.Option(help="Where to write the config.")] = Path("run.toml"),
) -> None:
    """Write a commented config for a model and a data file, with every key and its default."""
    from rondo.config.starter import starter
    from rondo.launch.first_steps import begin_rewards, columns_of

    if out.exists():
        raise ConfigError(f"{out} is there already: give another --out")
    columns = columns_of(data, prompt)
    if not rewards:
        rewards = begin_rewards(out.with_name("rewards.py"), columns)
        typer.echo(f"wrote {out.with_name('rewards.py')}: say there what a good response is")
    out.write_text(starter(name=out.stem, model=model, data=str(data), prompt=prompt, rewards=rewards))
    typer.echo(f"wrote {out}; look at it, then: rondo train {out} --dry-run")


@app.command()
def doctor(
    file: Annotated[Path | None, typer.Argument(help="A config to look at too.", metavar="[FILE]")] = None,
    set_: Set = None,
) -> None:
    """Say what this machine has, what it lacks, and how to mend it. Exits with 1 if a run would fail."""
    from rondo.config import read_config
    from rondo.doctor import examine

    marks, bad = {"ok": "ok  ", "note": "note", "bad": "BAD "}, False
    for finding in examine(read_config(file, list(set_ or [])) if file else None):
        typer.echo(f"{marks[finding.level]}  {finding.what}" + (f"\n      {finding.mend}" if finding.mend else ""))
        bad = bad or finding.level == "bad"
    if bad:
        raise typer.Exit(1)
