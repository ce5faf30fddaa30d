"""`rondo serve`: an engine."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from rondo.cli.app import app
from rondo.errors import ConfigError


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
    join: Annotated[str, typer.Option(metavar="RUN", help="Join a run, by its folder or control address.")] = "",
    token_file: Annotated[
        Path | None, typer.Option(help="File with the token that callers must show; default: RONDO_TOKEN.")
    ] = None,
    python: Annotated[str, typer.Option(help="vLLM: an interpreter that has it; empty: look for one.")] = "",
    tensor_parallel: Annotated[int, typer.Option(help="vLLM: devices per engine.")] = 1,
    memory_share: Annotated[float, typer.Option(help="vLLM: of the device's memory; 0: its default.")] = 0.0,
    kv_cache_gib: Annotated[int, typer.Option(help="vLLM on CPU: memory for keys and values.")] = 1,
    argument: Annotated[list[str] | None, typer.Option(help="vLLM: a further word of its command line.")] = None,
    print_: Annotated[bool, typer.Option("--print", help="vLLM: show the command instead of running it.")] = False,
) -> None:
    """Serve a model over HTTP, with the embedded engine or with vLLM."""
    from rondo.engines.bearer import TOKEN, read_token
    from rondo.engines.guest import Guest
    from rondo.launch import lifeline

    guest = Guest(join, token_file=token_file) if join else None
    token = guest.token if guest else read_token(token_file)
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
        if token:
            os.environ[TOKEN] = token  # vLLM's processes get it in this way, and not where others could read it
        serve_vllm(settings, announce_to=announce, hold=lifeline.hold, guest=guest)
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
        token=token,
        guest=guest,
    )
