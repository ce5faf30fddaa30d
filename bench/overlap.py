"""What overlapping generation and training brings: the same work synchronous and periodic, side by side in one run.

    python bench/overlap.py [--repetitions 3] [--periods 3] [--json PATH]

Engine and trainer are pinned to a core each. A model with random weights answers random prompts; an end-of-sequence
token that is as likely as any other gives lengths a long tail. The learning rate is so small that every period is the
same work. Per period: T_generate and T_train are read off the synchronous runs (where the one waits for the other),
and the share of the possible gain is (T_sync - T_periodic) / min(T_generate, T_train). Beside it, the synchronous run
that gives both cores to each phase.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import string
import tempfile
from pathlib import Path

import torch
import transformers

import rondo

CHARACTERS = string.ascii_letters + string.digits + "+"
VOCABULARY = len(CHARACTERS) + 1  # an end of sequence every 64 tokens or so: lengths are geometric
PROMPT, LONGEST = 32, 96
PROMPTS, GROUP, SLOTS = 48, 8, 32
HIDDEN, LAYERS = 256, 4

PINNED = ["engines.cpus=[[0]]", "trainer.cpus=[1]", "engines.threads=1", "trainer.threads=1"]
BOTH = ["engines.cpus=[[0,1]]", "trainer.cpus=[0,1]", "engines.threads=2", "trainer.threads=2"]
VARIANTS = {
    "synchronous": [*PINNED, "schedule.mode=synchronous"],
    "periodic": [*PINNED, "schedule.mode=periodic"],
    "synchronous, both cores each": [*BOTH, "schedule.mode=synchronous"],
}


def make_work(folder: Path) -> None:
    vocabulary = {character: number for number, character in enumerate(["<eos>", *CHARACTERS])}
    tokenizer = transformers.Qwen2Tokenizer(
        vocab=vocabulary, merges=[], unk_token=None, bos_token=None, eos_token="<eos>", pad_token="<eos>"
    )
    tokenizer.save_pretrained(folder / "model")
    config = transformers.Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=3 * HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HIDDEN // 64,
        num_key_value_heads=HIDDEN // 128,
        max_position_embeddings=256,
        eos_token_id=0,
        bos_token_id=None,
    )
    torch.manual_seed(0)
    transformers.Qwen2ForCausalLM(config).save_pretrained(folder / "model")
    draw = random.Random(0)
    rows = ["".join(draw.choices(CHARACTERS, k=PROMPT)) for _ in range(512)]
    (folder / "data.jsonl").write_text("".join(json.dumps({"prompt": row}) + "\n" for row in rows))
    (folder / "run.toml").write_text(f"""
[model]
path = "{folder}/model"
[data]
train = "{folder}/data.jsonl"
shuffle = false
[rollout]
prompts_per_period = {PROMPTS}
group_size = {GROUP}
max_new_tokens = {LONGEST}
[trainer]
learning_rate = 1e-12
micro_tokens = 2048
[engines]
slots = {SLOTS}
[rewards]
functions = ["{Path(__file__).resolve().parent}/rewards.py:spread"]
""")


def run(folder: Path, name: str, settings: list[str], periods: int) -> list[dict[str, float]]:
    """One run's periods after the first, as seconds per phase."""
    target = rondo.train(
        rondo.read_config(
            folder / "run.toml", [*settings, f"schedule.periods={periods + 1}", f"run.folder='{folder}/{name}'"]
        )
    )
    lines = [json.loads(line) for line in (target / "metrics.jsonl").read_text().splitlines()][1:]
    return [
        line["trainer_seconds"] | {"total": line["seconds"], "tokens": line["tokens"], **generating(line)}
        for line in lines
    ]


def generating(line: dict[str, list[dict[str, float]]]) -> dict[str, float]:
    return {"generating": line["engine_seconds"][0].get("generating", 0.0)}


def median(lines: list[dict[str, float]], *states: str) -> float:
    return statistics.median(sum(line.get(state, 0.0) for state in states) for line in lines)


def overlap_figures(synchronous: list[dict[str, float]], periodic: list[dict[str, float]]) -> dict[str, float]:
    """T_generate and T_train are read off the synchronous periods, where the one waits for the other."""
    figures = {
        "T_generate": median(synchronous, "waiting for first group", "waiting for groups", "waiting for rewards"),
        "T_train": median(synchronous, "training", "stepping"),
        "T_sync": median(synchronous, "total"),
        "T_periodic": median(periodic, "total"),
    }
    gain = figures["T_sync"] - figures["T_periodic"]
    figures["share_of_possible_gain"] = gain / min(figures["T_generate"], figures["T_train"])
    figures["speedup"] = figures["T_sync"] / figures["T_periodic"]
    return figures


def report(results: dict[str, list[dict[str, float]]]) -> dict[str, float]:
    figures = overlap_figures(results["synchronous"], results["periodic"])
    figures["T_sync_both_cores"] = median(results["synchronous, both cores each"], "total")
    figures["speedup_over_both_cores"] = figures["T_sync_both_cores"] / figures["T_periodic"]
    print()
    for name, value in figures.items():
        print(f"{name:<26} {value:8.3f}")
    print("\nseconds of a period, medians:")
    states = sorted({state for lines in results.values() for line in lines for state in line} - {"tokens"})
    for name, lines in results.items():
        print(f"{name:<30}" + "  ".join(f"{state} {median(lines, state):.2f}" for state in states))
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--periods", type=int, default=3)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    results: dict[str, list[dict[str, float]]] = {name: [] for name in VARIANTS}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_work(folder)
        for repetition in range(arguments.repetitions):
            for number, (variant, settings) in enumerate(VARIANTS.items()):
                print(f"--- {variant}, repetition {repetition + 1}", flush=True)
                results[variant] += run(folder, f"run-{number}-{repetition}", settings, arguments.periods)
    figures = report(results)
    if arguments.json:
        arguments.json.write_text(json.dumps({"figures": figures, "periods": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
