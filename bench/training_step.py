"""One training micro-step on an accelerator: utilisation, what old policy and reference add, memory.

    python bench/training_step.py [--json PATH] [--layers 28]

A Qwen2 of the 1.5B shape with random weights, bfloat16, 16k tokens per micro-step, shared-prompt rows of (1024, 256, 8)
with a long tail, a new row at every step (so that nothing is compiled twice, or it would show). Utilisation counts 6 N
per token, attention and head, no recomputation, over 989 TFLOP/s.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from pathlib import Path

import torch

from rondo.attention.hf import adopt
from rondo.attention.layout import Layout, shared_prompt_layout
from rondo.trainer.layers import compile_layers
from rondo.trainer.tri_model import TriModel
from shared_prompt import PEAK, flops, make_model, make_segments


def rows(count: int, vocabulary: int) -> list[Layout]:
    """Rows of about 16k tokens with lengths of their own."""
    draw = random.Random(1)
    return [
        shared_prompt_layout(
            make_segments(
                5, 1024 + draw.randrange(-64, 64), 256 + draw.randrange(-32, 32), 8, tail=True, vocabulary=vocabulary
            )
        ).to(torch.device("cuda"))
        for _ in range(count)
    ]


def micro_step(model: TriModel, layout: Layout) -> None:
    logps = model.logps(layout)
    loss = (logps.policy_N * (1.0 + 0.0 * logps.old_N)).sum()
    if logps.reference_N is not None:
        loss = loss + (logps.policy_N - logps.reference_N).square().sum()
    loss.backward()


def measure(name: str, model: TriModel, layouts: list[Layout]) -> dict[str, object]:
    torch.cuda.reset_peak_memory_stats()
    times, utilisation = [], []
    began = time.monotonic()
    for number, layout in enumerate(layouts):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        micro_step(model, layout)
        end.record()
        torch.cuda.synchronize()
        if number == 1:
            warm_up = time.monotonic() - began
        if number > 1:
            times.append(start.elapsed_time(end))
            utilisation.append(flops(model.policy, layout) / (times[-1] * 1e-3) / PEAK)
    result: dict[str, object] = {
        "name": name,
        "ms": statistics.median(times),
        "slowest_ms": max(times),
        "mfu": statistics.median(utilisation),
        "warm_up_s": warm_up,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
    }
    print(json.dumps(result), flush=True)
    model.policy.zero_grad(set_to_none=True)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--layers", type=int, default=28)
    arguments = parser.parse_args()
    policy = make_model(arguments.layers)
    adopt(policy)
    layouts = rows(10, policy.config.vocab_size)
    alone = TriModel(policy=policy, keep_old=False, reference=None, temperature=1.0)
    results = [measure("policy", alone, layouts)]
    reference = make_model(arguments.layers)
    adopt(reference)
    with_reference = TriModel(policy=policy, keep_old=False, reference=reference, temperature=1.0)
    results.append(measure("policy + reference", with_reference, layouts))
    all_three = TriModel(policy=policy, keep_old=True, reference=reference, temperature=1.0)
    results.append(measure("policy + old + reference", all_three, layouts))
    del with_reference, all_three, reference
    compile_layers(policy)
    results.append(measure("policy, compiled layers", alone, layouts))
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
