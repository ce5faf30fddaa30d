"""Shared prompts against separate rows on a CPU, and whether `auto` takes the better one.

    python bench/attention_cpu.py [--repetitions 5] [--json PATH]

Forward and backward of a 4-layer, 256-wide Qwen2, G = 8 (and G = 1), one thread, interleaved, medians.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from pathlib import Path

import torch
import transformers

from rondo.attention.hf import adopt, hidden_states
from rondo.attention.layout import Layout, auto_layout, separate_layout, shared_prompt_layout
from rondo.trainer.logprobs import token_logps

GEOMETRIES = [(8, 4, 8), (256, 64, 8), (512, 128, 8), (64, 256, 8), (1024, 64, 8), (128, 128, 8), (128, 128, 1)]
TOKENS = 4096  # of a micro-step


def step(model: transformers.PreTrainedModel, layouts: list[Layout]) -> float:
    began = time.perf_counter()
    head = model.get_output_embeddings()
    for layout in layouts:
        hidden = hidden_states(model, layout)
        token_logps(head, hidden, layout.target_N, temperature=1.0, vocabulary=512).sum().backward()
    model.zero_grad()
    return time.perf_counter() - began


def separate_layouts(segments: list[tuple[list[int], list[list[int]]]]) -> list[Layout]:
    """The same samples as separate rows, in micro-steps under the same budget."""
    micros: list[list[tuple[list[int], list[list[int]]]]] = [[]]
    tokens = 0
    for prompt, responses in segments:
        for response in responses:
            length = len(prompt) + len(response)
            if micros[-1] and tokens + length > TOKENS:
                micros.append([])
                tokens = 0
            micros[-1].append((prompt, [response]))
            tokens += length
    return [separate_layout(micro) for micro in micros]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        vocab_size=512, hidden_size=256, intermediate_size=768, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=4096,
    )  # fmt: skip
    model = transformers.Qwen2ForCausalLM(config).eval()
    adopt(model)
    draw = random.Random(0)
    rows = []
    for prompt, response, size in GEOMETRIES:
        groups = max(1, TOKENS // (prompt + size * response))
        segments = [
            ([1] * prompt, [[1] * draw.randint(max(1, response // 2), 3 * response // 2) for _ in range(size)])
            for _ in range(groups)
        ]
        layouts = {
            "shared-prompt": [shared_prompt_layout(segments)],
            "separate": separate_layouts(segments),
            "auto": [auto_layout(segments)],
        }
        times: dict[str, list[float]] = {name: [] for name in layouts}
        for _ in range(arguments.repetitions + 1):
            for name, micro_steps in layouts.items():
                times[name].append(step(model, micro_steps))
        medians = {name: statistics.median(values[1:]) for name, values in times.items()}
        best = min(medians["shared-prompt"], medians["separate"])
        rows.append({"geometry": (prompt, response, size), **medians, "auto_over_best": medians["auto"] / best})
        print(
            f"P {prompt:>5} R {response:>4} G {size}  shared {medians['shared-prompt']:.3f} s  "
            f"separate {medians['separate']:.3f} s ({medians['separate'] / medians['shared-prompt']:.2f}x)  "
            f"auto {medians['auto'] / best:.2f} of the better",
            flush=True,
        )
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
