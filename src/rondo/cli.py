"""The command line. Nothing heavy is imported until a command needs it."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Annotated

import typer

from rondo.errors import ConfigError, RondoError

app = typer.Typer(
    name="rondo",
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


@app.command()
def train(
    file: ConfigFile,
    set_: Set = None,
    run_dir: RunDir = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the last checkpoint.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the resolved config and check model, data and rewards.")
    ] = False,
) -> None:
    """Train a model."""
    from rondo.config import read_config

    overrides = list(set_ or [])
    if run_dir is not None:
        overrides.append(f"run.folder='{run_dir}'")
    config = read_config(file, overrides)
    if dry_run:
        from rondo.launch.preflight import check, check_prompts

        typer.echo(config.model_dump_json(indent=2))
        check(config)
        check_prompts(config)
        typer.echo("model, data and rewards were found")
        return
    from rondo.launch.local import launch

    launch(config, resume=resume)


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


@app.command()
def demo(
    set_: Set = None,
    run_dir: Annotated[Path, typer.Option(help="The run's folder; an earlier demo there is replaced.")] = Path(
        "runs/demo"
    ),
) -> None:
    """Train the small model that ships with Rondo on arithmetic, in about three minutes on two cores."""
    from rondo.config import ASSETS, read_config
    from rondo.launch.local import launch

    config = read_config(ASSETS / "arithmetic" / "demo.toml", [*(set_ or []), f"run.folder='{run_dir}'"])
    launch(config, overwrite=True)
    typer.echo("")
    typer.echo("Try next, to see what the overlap brings: the same run, training only when all is generated:")
    rondo = "rondo" if shutil.which("rondo") else os.path.relpath(sys.argv[0])
    typer.echo(f"  {rondo} demo --set schedule.mode=synchronous --run-dir runs/demo-synchronous")


@app.command()
def verify(
    target: Annotated[Path, typer.Argument(help="A TOML config to train and then verify, or a recorded run's folder.")],
    periods: Annotated[int | None, typer.Option(help="How many; of a recorded run all, unless said.")] = None,
    first: Annotated[int | None, typer.Option(help="The first one, of a recorded run.")] = None,
    mode: Annotated[
        str, typer.Option(help="Of a config: arrival, prompt, exact, several with commas, or all; default: its own.")
    ] = "",
    order: Annotated[
        str, typer.Option(help="shuffled: also try arrival orders of chance; recorded: do not.")
    ] = "shuffled",
    trials: Annotated[int, typer.Option(help="How many shuffled orders.")] = 1,
    ranks: Annotated[str, typer.Option(help="Rank counts to try, besides the run's own.")] = "1,2",
    set_: Set = None,
    run_dir: RunDir = None,
) -> None:
    """Prove that periodic training gave the synchronous result. Exit code 1 where it did not."""
    from rondo.verify.command import verify as verify_target

    holds = verify_target(
        target,
        periods=periods,
        first=first,
        modes=mode,
        trials=trials if order == "shuffled" else 0,
        ranks=ranks,
        overrides=list(set_ or []),
        run_dir=run_dir,
    )
    raise typer.Exit(0 if holds else 1)


@app.command()
def replay(
    run: Annotated[Path, typer.Argument(help="A recorded run's folder.")],
    period: Annotated[int, typer.Option(help="The period to train again.")],
    set_: Set = None,
) -> None:
    """Train a recorded period again, without engines; with --set, under other settings."""
    from rondo.verify.replay import replay as replay_period

    replay_period(run, period, list(set_ or []))


@app.command()
def serve(
    model: Annotated[str, typer.Option(help="A folder in Hugging Face format, or a hub name.")],
    backend: Annotated[str, typer.Option(help="embedded or vllm.")] = "embedded",
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0: any free one.")] = 0,
    slots: Annotated[int, typer.Option(help="Responses decoded at once.")] = 64,
    max_model_len: Annotated[int, typer.Option(help="Longest prompt plus response; 0: what the model allows.")] = 0,
    batch_invariant: Annotated[
        bool, typer.Option("--batch-invariant", help="A sample's bits do not depend on its batch mates.")
    ] = False,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    threads: Annotated[int, typer.Option(help="CPU threads; 0: all.")] = 0,
    device: Annotated[str, typer.Option(help="Embedded: auto, cpu, or an accelerator's name.")] = "auto",
    announce: Annotated[Path | None, typer.Option(help="File to write the address to when ready.")] = None,
    python: Annotated[str, typer.Option(help="vLLM: an interpreter that has it; empty: look for one.")] = "",
    tensor_parallel: Annotated[int, typer.Option(help="vLLM: devices per engine.")] = 1,
    memory_share: Annotated[float, typer.Option(help="vLLM: of the device's memory; 0: its default.")] = 0.0,
    kv_cache_gib: Annotated[int, typer.Option(help="vLLM on CPU: memory for keys and values.")] = 1,
    argument: Annotated[list[str] | None, typer.Option(help="vLLM: a further word of its command line.")] = None,
    print_: Annotated[bool, typer.Option("--print", help="vLLM: show the command instead of running it.")] = False,
) -> None:
    """Serve a model over HTTP, with the embedded engine or with vLLM."""
    from rondo.launch import lifeline

    if backend == "vllm":
        from rondo.engines.vllm import VllmSettings, command, environment, find_python, packages_folder, printable
        from rondo.engines.vllm_server import free_port, serve_vllm

        if batch_invariant:
            raise ConfigError("batch_invariant is a mode of the embedded engine: leave it out with vLLM")
        settings = VllmSettings(
            model=model,
            python=find_python(python),
            host=host,
            port=port if print_ and port else free_port(host, port),
            dtype=dtype,
            slots=slots,
            max_model_len=max_model_len,
            tensor_parallel=tensor_parallel,
            memory_share=memory_share,
            kv_cache_gib=kv_cache_gib,
            threads=threads,
            arguments=tuple(argument or ()),
        )
        if print_:
            typer.echo(printable(command(settings), environment(settings, packages_folder(), {})))
            return
        serve_vllm(settings, announce_to=announce, hold=lifeline.hold)
        return
    if backend != "embedded" or print_:
        raise ConfigError(f"--backend {backend}: use embedded or vllm, and --print with vllm only")
    lifeline.hold()
    from rondo.engines.server import serve as serve_model

    serve_model(
        model=model,
        host=host,
        port=port,
        slots=slots,
        max_model_len=max_model_len,
        batch_invariant=batch_invariant,
        dtype=dtype,
        threads=threads,
        device=device,
        announce=announce,
    )


@app.command(hidden=True)
def rank(folder: Path, resume: Annotated[bool, typer.Option("--resume")] = False) -> None:
    """One trainer rank of the run in FOLDER; started by the launcher."""
    from rondo.config import read_config
    from rondo.launch import lifeline
    from rondo.weights.folder import publication_folder, remove_publication_folder

    config = read_config(folder / "config.json")
    published = publication_folder(config.weights.folder, folder)
    lifeline.hold(lambda: remove_publication_folder(published))
    from rondo.launch.rank import main as rank_main

    raise typer.Exit(rank_main(config, folder, resume=resume))


@app.command("replay-rank", hidden=True)
def replay_rank(folder: Path) -> None:
    """One rank that trains the plan in FOLDER; started by verify and replay."""
    from rondo.launch import lifeline

    lifeline.hold()
    from rondo.verify.worker import main as worker_main

    worker_main(folder)


def main() -> None:
    try:
        app()
    except RondoError as error:
        sys.stdout.flush()
        sys.stderr.write(f"error: {error}\n")
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
