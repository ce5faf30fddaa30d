"""Shared-prompt training against separate rows, on an accelerator: the same samples, side by side in one run.

    python bench/shared_prompt.py [--json PATH] [--layers 28] [--tiny]

A Qwen2 of the 1.5B shape with random weights, bfloat16, forward and backward, activation checkpointing. Separate rows
are at their best: unpadded, variable-length flash attention, as many micro-steps of 16k tokens as they need. Both sides
are first held to a float64 truth. Time is measured with events; medians. The ideal is the ratio of floating-point
operations, with the vocabulary head (which does not shrink) and attention counted, recomputation not.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

import torch

from rondo.attention.hf import DENSE, FLEX, SPLIT, VARLEN, adopt, hidden_states
from rondo.attention.layout import Layout, separate_layout, shared_prompt_layout
from rondo.attention.varlen import fits
from rondo.trainer.layers import checkpoint_layers
from rondo.trainer.logprobs import token_logps
from shapes import DEVICE, PEAK, Segments, flops, machine, make_model, make_segments, peak_gib, timed

BUDGET = 16384
GEOMETRIES = [(512, 512, 8), (1024, 256, 8), (2048, 256, 16), (4096, 512, 8)]
FLASH = fits(DEVICE, torch.bfloat16)
BEST = VARLEN if FLASH else SPLIT


def step(model, layout: Layout) -> torch.Tensor:
    head = model.get_output_embeddings()
    hidden = hidden_states(model, layout)
    logps = token_logps(head, hidden, layout.target_N, temperature=1.0, vocabulary=head.weight.shape[0])
    logps.sum().backward()
    return logps.detach()


def rows_of(segments: Segments, budget: int = BUDGET) -> list[Layout]:
    """The same samples as separate rows, in micro-steps under the budget."""
    micros: list[Segments] = [[]]
    tokens = 0
    for prompt, responses in segments:
        for response in responses:
            length = len(prompt) + len(response)
            if micros[-1] and tokens + length > budget:
                micros.append([])
                tokens = 0
            micros[-1].append((prompt, [response]))
            tokens += length
    return [separate_layout(micro).to(DEVICE) for micro in micros]


def check() -> list[dict[str, object]]:
    """How far each path is from a float64 truth, in log-probs and gradients, on a small model."""
    segments = make_segments(3, 200, 90, 4, tail=True, vocabulary=512)
    layouts = {
        f"separate, {BEST}": (BEST, separate_layout(segments)),
        f"shared, {BEST}": (BEST, shared_prompt_layout(segments)),
    }
    if FLASH:
        layouts["shared, flex"] = (FLEX, shared_prompt_layout(segments))
    truth_model = make_model(2, hidden=256, vocabulary=512, dtype=torch.bfloat16).double()
    truth_model.set_attn_implementation(DENSE)
    truth = step(truth_model, shared_prompt_layout(segments).to(DEVICE))
    rows = []
    for name, (implementation, layout) in layouts.items():
        model = make_model(2, hidden=256, vocabulary=512)
        model.set_attn_implementation(implementation)
        logps = step(model, layout.to(DEVICE)).double()
        errors = [
            ((mine.grad.double() - true.grad).norm() / true.grad.norm()).item()
            for mine, true in zip(model.parameters(), truth_model.parameters(), strict=True)
        ]
        rows.append(
            {
                "path": name,
                "logp_error_mean": (logps - truth).abs().mean().item(),
                "logp_error_max": (logps - truth).abs().max().item(),
                "gradient_error_median": statistics.median(errors),
                "gradient_error_max": max(errors),
            }
        )
        print(rows[-1], flush=True)
    return rows


def compare(model, geometry: tuple[int, int, int], *, tail: bool, budget: int = BUDGET) -> dict[str, object]:
    prompt, response, size = geometry
    groups = max(1, round(budget / (prompt + size * response)))
    segments = make_segments(groups, prompt, response, size, tail=tail, vocabulary=model.config.vocab_size)
    shared, separate = shared_prompt_layout(segments).to(DEVICE), rows_of(segments, budget)
    ideal = sum(flops(model, layout) for layout in separate) / flops(model, shared)
    model.set_attn_implementation(BEST)
    row: dict[str, object] = {"geometry": geometry, "tail": tail, "tokens": shared.tokens_T.numel(), "ideal": ideal}
    row["separate_ms"] = timed(lambda: [step(model, layout) for layout in separate])
    row["varlen_ms"] = timed(lambda: step(model, shared))
    row["varlen_mfu"] = flops(model, shared) / (row["varlen_ms"] * 1e-3) / PEAK
    row["separate_mfu"] = sum(flops(model, layout) for layout in separate) / (row["separate_ms"] * 1e-3) / PEAK
    row["varlen_ratio"] = row["separate_ms"] / row["varlen_ms"]
    if FLASH:
        model.set_attn_implementation(FLEX)
        row["flex_ms"] = timed(lambda: step(model, shared))
        row["flex_ratio"] = row["separate_ms"] / row["flex_ms"]
    model.zero_grad(set_to_none=True)
    print(json.dumps(row), flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--tiny", action="store_true", help="a small shape, to see that the script runs")
    arguments = parser.parse_args()
    results: dict[str, object] = {**machine(), "truth": check()}
    shape = {"hidden": 128, "vocabulary": 512, "head": 32} if arguments.tiny else {}
    model = make_model(2 if arguments.tiny else arguments.layers, **shape)
    adopt(model)
    checkpoint_layers(model)
    budget = 512 if arguments.tiny else BUDGET
    geometries = [(32, 16, 4)] if arguments.tiny else GEOMETRIES

    def compare_all() -> None:
        results["rows"] = [
            compare(model, each, tail=tail, budget=budget) for each in geometries for tail in (False, True)
        ]

    results["peak_gib"] = peak_gib(compare_all)
    print("peak GiB", results["peak_gib"])
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
