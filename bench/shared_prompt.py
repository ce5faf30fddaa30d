"""Shared-prompt training against separate rows, on an accelerator: the same samples, side by side in one run.

    python bench/shared_prompt.py [--json PATH] [--layers 28]

A Qwen2 of the 1.5B shape with random weights, bfloat16, forward and backward, activation checkpointing. Separate rows
are at their best: unpadded, variable-length flash attention, as many micro-steps of 16k tokens as they need. Both sides
are first held to a float64 truth. Time is measured with events; medians. The ideal is the ratio of floating-point
operations, with the vocabulary head (which does not shrink) and attention counted, recomputation not.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
import transformers

from rondo.attention.hf import DENSE, FLEX, VARLEN, adopt, hidden_states
from rondo.attention.layout import Layout, separate_layout, shared_prompt_layout
from rondo.trainer.layers import checkpoint_layers
from rondo.trainer.logprobs import token_logps

BUDGET = 16384
GEOMETRIES = [(512, 512, 8), (1024, 256, 8), (2048, 256, 16), (4096, 512, 8)]
PEAK = 989e12  # dense bfloat16, H100/H200 datasheet

Segments = list[tuple[list[int], list[list[int]]]]


def make_model(layers: int, *, hidden: int = 1536, vocabulary: int = 151936, dtype: torch.dtype = torch.bfloat16):
    config = transformers.Qwen2Config(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=hidden * 35 // 6, num_hidden_layers=layers,
        num_attention_heads=hidden // 128, num_key_value_heads=2, max_position_embeddings=32768,
        tie_word_embeddings=True, attn_implementation="sdpa",
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device("cuda"):
        return transformers.Qwen2ForCausalLM(config).to(dtype).eval()


def make_segments(groups: int, prompt: int, response: int, size: int, *, tail: bool, vocabulary: int) -> Segments:
    """Groups with equal lengths, or with responses drawn from a long-tailed distribution of the same mean."""
    draw = random.Random(0)

    def ids(length: int) -> list[int]:
        return [draw.randrange(vocabulary) for _ in range(length)]

    def length() -> int:
        return min(4 * response, max(1, round(draw.lognormvariate(-0.32, 0.8) * response))) if tail else response

    return [(ids(prompt), [ids(length()) for _ in range(size)]) for _ in range(groups)]


def step(model, layout: Layout) -> torch.Tensor:
    head = model.get_output_embeddings()
    hidden = hidden_states(model, layout)
    logps = token_logps(head, hidden, layout.target_N, temperature=1.0, vocabulary=head.weight.shape[0])
    logps.sum().backward()
    return logps.detach()


def flops(model, layout: Layout) -> float:
    """Forward and backward, in floating-point operations: linear layers, attention pairs, head."""
    config = model.config
    matrices = sum(p.numel() for name, p in model.named_parameters() if p.dim() == 2 and "embed" not in name)
    head = config.vocab_size * config.hidden_size
    pairs = sum(length * (length + 1) / 2 for _, length in layout.prompts)
    pairs += sum(span.length * (span.prompt_length + (span.length + 1) / 2) for span in layout.spans)
    attention = 12 * pairs * config.hidden_size * config.num_hidden_layers
    return 6 * (matrices * layout.tokens_T.numel() + head * layout.target_N.numel()) + attention


def rows_of(segments: Segments) -> list[Layout]:
    """The same samples as separate rows, in micro-steps under the budget."""
    micros: list[Segments] = [[]]
    tokens = 0
    for prompt, responses in segments:
        for response in responses:
            length = len(prompt) + len(response)
            if micros[-1] and tokens + length > BUDGET:
                micros.append([])
                tokens = 0
            micros[-1].append((prompt, [response]))
            tokens += length
    return [separate_layout(micro).to(torch.device("cuda")) for micro in micros]


def timed(work: Callable[[], object], repetitions: int = 5) -> float:
    """Milliseconds, median, after two warm-ups."""
    times = []
    for _ in range(repetitions + 2):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        work()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times[2:])


def check() -> list[dict[str, object]]:
    """How far each path is from a float64 truth, in log-probs and gradients, on a small model."""
    segments = make_segments(3, 200, 90, 4, tail=True, vocabulary=512)
    layouts = {
        "separate, varlen": (VARLEN, separate_layout(segments)),
        "shared, varlen": (VARLEN, shared_prompt_layout(segments)),
        "shared, flex": (FLEX, shared_prompt_layout(segments)),
    }
    truth_model = make_model(2, hidden=256, vocabulary=512, dtype=torch.bfloat16).double()
    truth_model.set_attn_implementation(DENSE)
    truth = step(truth_model, shared_prompt_layout(segments).to(torch.device("cuda")))
    rows = []
    for name, (implementation, layout) in layouts.items():
        model = make_model(2, hidden=256, vocabulary=512)
        model.set_attn_implementation(implementation)
        logps = step(model, layout.to(torch.device("cuda"))).double()
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


def compare(model, geometry: tuple[int, int, int], *, tail: bool) -> dict[str, object]:
    prompt, response, size = geometry
    groups = max(1, round(BUDGET / (prompt + size * response)))
    segments = make_segments(groups, prompt, response, size, tail=tail, vocabulary=model.config.vocab_size)
    shared, separate = shared_prompt_layout(segments).to(torch.device("cuda")), rows_of(segments)
    ideal = sum(flops(model, layout) for layout in separate) / flops(model, shared)
    model.set_attn_implementation(VARLEN)
    row: dict[str, object] = {"geometry": geometry, "tail": tail, "tokens": shared.tokens_T.numel(), "ideal": ideal}
    row["separate_ms"] = timed(lambda: [step(model, layout) for layout in separate])
    row["varlen_ms"] = timed(lambda: step(model, shared))
    row["varlen_mfu"] = flops(model, shared) / (row["varlen_ms"] * 1e-3) / PEAK
    row["separate_mfu"] = sum(flops(model, layout) for layout in separate) / (row["separate_ms"] * 1e-3) / PEAK
    row["varlen_ratio"] = row["separate_ms"] / row["varlen_ms"]
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
    arguments = parser.parse_args()
    results: dict[str, object] = {"torch": torch.__version__, "device": torch.cuda.get_device_name(), "truth": check()}
    model = make_model(arguments.layers)
    adopt(model)
    checkpoint_layers(model)
    results["rows"] = [compare(model, geometry, tail=tail) for geometry in GEOMETRIES for tail in (False, True)]
    results["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    print("peak GiB", results["peak_gib"])
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
