"""Engine and trainer on one accelerator: the same work synchronous and periodic, side by side in one run.

    python bench/one_gpu.py [--periods 3] [--repetitions 1] [--json PATH] [--set section.key=value ...]

vLLM and the trainer are two processes on one device (configs/one-gpu.toml); one vLLM serves all runs. A 1.5B model
with random weights answers random prompts; its vocabulary has so many stop tokens that lengths are geometric, drawn by
each sample's seed. The learning rate is so small that every period is the same work. T_generate and T_train are read
off the synchronous run, where the one waits for the other; the share of the possible gain is
(T_sync - T_periodic) / min(T_generate, T_train).
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

import rondo
from models import CHARACTERS, SIZES, save_qwen2
from overlap import median, overlap_figures

VOCABULARY = 151_936
MEAN, LONGEST, PROMPT = 360, 1024, 512
PROMPTS, GROUP = 64, 8


def make_work(folder: Path, shape: str, vocabulary: int, prompt: int) -> None:
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
    save_qwen2(folder / "model", shape, vocabulary=vocabulary, device=device)
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()
    draw = random.Random(0)
    rows = ["".join(draw.choices(CHARACTERS, k=prompt)) for _ in range(1024)]
    (folder / "data.jsonl").write_text("".join(json.dumps({"prompt": row}) + "\n" for row in rows))


def overrides(folder: Path, arguments: argparse.Namespace) -> list[str]:
    stops = list(range(0, arguments.vocabulary, MEAN if arguments.shape == "1.5B" else 16))
    return [
        f"model.path='{folder}/model'",
        f"data.train='{folder}/data.jsonl'",
        "data.eval=''",
        "data.shuffle=false",
        f"rollout.prompts_per_period={arguments.prompts}",
        f"rollout.group_size={GROUP}",
        f"rollout.max_new_tokens={arguments.longest}",
        f"rollout.stop_token_ids={stops}",
        "trainer.learning_rate=1e-12",
        "trainer.keep_checkpoints=0",
        f"rewards.functions=['{Path(__file__).resolve().parent}/rewards.py:spread']",
        f"engines.max_model_len={arguments.prompt + arguments.longest}",
        *arguments.set,
    ]


def run(folder: Path, name: str, settings: list[str], periods: int, config: Path) -> list[dict[str, float]]:
    """One run's periods after the first, as seconds per phase."""
    settings = [*settings, f"schedule.periods={periods + 1}", f"run.folder='{folder}/{name}'"]
    target = folder / name
    try:
        rondo.train(rondo.read_config(config, settings))
    except rondo.RondoError as error:
        log = (target / "logs" / "trainer-0.log").read_text().splitlines()
        raise SystemExit("\n".join([*log[-30:], str(error)])) from None
    lines = [json.loads(line) for line in (target / "metrics.jsonl").read_text().splitlines()][1:]
    shutil.rmtree(target)
    return [
        line["trainer_seconds"]
        | {key: line[key] for key in ("tokens", "logp_gap_mean", "logp_gap_max", "probe_gap", "length_mean")}
        | {"total": line["seconds"], "generating": line["engine_seconds"][0].get("generating", 0.0)}
        for line in lines
    ]


@contextmanager
def engine(folder: Path, arguments: argparse.Namespace) -> Iterator[str]:
    """A vLLM as `rondo serve` starts it; its address."""
    announced = folder / "engine.json"
    config = rondo.read_config(arguments.config, overrides(folder, arguments))
    line = [sys.executable, "-m", "rondo", "serve", "--backend", "vllm", "--model", f"{folder}/model"]
    line += ["--dtype", config.model.dtype, "--slots", str(config.engines.slots), "--announce", str(announced)]
    line += ["--max-model-len", str(config.engines.max_model_len), "--memory-share", str(config.engines.memory_share)]
    with (folder / "engine.log").open("wb") as log:
        process = subprocess.Popen(line, stdout=log, stderr=subprocess.STDOUT)
    try:
        while not announced.exists():
            if process.poll() is not None:
                raise SystemExit((folder / "engine.log").read_text()[-3000:])
            time.sleep(0.2)
        yield json.loads(announced.read_text())["url"]
    finally:
        process.terminate()
        process.wait()


def report(results: dict[str, list[dict[str, float]]]) -> dict[str, float]:
    periodic = results["periodic"]
    figures = overlap_figures(results["synchronous"], periodic)
    figures["publication"] = median(periodic, "publishing")
    figures["response tokens per period"] = median(periodic, "tokens")
    figures["response tokens per second"] = figures["response tokens per period"] / figures["T_periodic"]
    print()
    for name, value in figures.items():
        print(f"{name:<28} {value:12.3f}")
    print("\nmedians of a period:")
    states = sorted({state for lines in results.values() for line in lines for state in line})
    for name, lines in results.items():
        print(f"{name:<14}" + "  ".join(f"{state} {median(lines, state):.3g}" for state in states))
    return figures


def report_partly(results: dict[str, list[dict[str, float]]]) -> None:
    for name, lines in results.items():
        for line in lines:
            print(name, {state: round(value, 3) for state, value in line.items()}, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=1)
    parser.add_argument("--periods", type=int, default=3)
    parser.add_argument("--shape", choices=tuple(SIZES), default="1.5B")
    parser.add_argument("--vocabulary", type=int, default=VOCABULARY)
    parser.add_argument("--prompts", type=int, default=PROMPTS)
    parser.add_argument("--prompt", type=int, default=PROMPT)
    parser.add_argument("--longest", type=int, default=LONGEST)
    parser.add_argument("--config", type=Path, default=Path(__file__).resolve().parent.parent / "configs/one-gpu.toml")
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    results: dict[str, list[dict[str, float]]] = {"synchronous": [], "periodic": []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_work(folder, arguments.shape, arguments.vocabulary, arguments.prompt)
        began = time.monotonic()
        with engine(folder, arguments) as url:
            print(f"vLLM started in {time.monotonic() - began:.0f} s", flush=True)
            for repetition in range(arguments.repetitions):
                for mode in results:
                    print(f"--- {mode}, repetition {repetition + 1}", flush=True)
                    settings = [*overrides(folder, arguments), f"schedule.mode={mode}", f"engines.urls=['{url}']"]
                    results[mode] += run(
                        folder, f"run-{mode}-{repetition}", settings, arguments.periods, arguments.config
                    )
                    report_partly(results)
    figures = report(results)
    if arguments.json:
        arguments.json.write_text(json.dumps({"figures": figures, "periods": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
