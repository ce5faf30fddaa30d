"""What the training benches share: a model of a real shape, groups to feed it, floating-point operations, clocks."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable

import torch
import transformers

from rondo.attention.layout import Layout

DEVICE = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
PEAK = 989e12  # dense bfloat16, H100/H200 datasheet

Segments = list[tuple[list[int], list[list[int]]]]


def make_model(
    layers: int, *, hidden: int = 1536, vocabulary: int = 151936, dtype: torch.dtype = torch.bfloat16, head: int = 128
):
    """A Qwen2; by default of the 1.5B shape, with random weights."""
    config = transformers.Qwen2Config(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=hidden * 35 // 6, num_hidden_layers=layers,
        num_attention_heads=hidden // head, num_key_value_heads=2, max_position_embeddings=32768,
        tie_word_embeddings=True, attn_implementation="sdpa",
    )  # fmt: skip
    torch.manual_seed(0)
    with DEVICE:
        return transformers.Qwen2ForCausalLM(config).to(dtype).eval()


def make_segments(
    groups: int, prompt: int, response: int, size: int, *, tail: bool, vocabulary: int, seed: int = 0
) -> Segments:
    """Groups with equal lengths, or with responses drawn from a long-tailed distribution of the same mean."""
    draw = random.Random(seed)

    def ids(length: int) -> list[int]:
        return [draw.randrange(vocabulary) for _ in range(length)]

    def length() -> int:
        return min(4 * response, max(1, round(draw.lognormvariate(-0.32, 0.8) * response))) if tail else response

    return [(ids(prompt), [ids(length()) for _ in range(size)]) for _ in range(groups)]


def flops(model, layout: Layout) -> float:
    """Forward and backward, in floating-point operations: linear layers, attention pairs, head."""
    config = model.config
    matrices = sum(p.numel() for name, p in model.named_parameters() if p.dim() == 2 and "embed" not in name)
    head = config.vocab_size * config.hidden_size
    pairs = sum(length * (length + 1) / 2 for _, length in layout.prompts)
    pairs += sum(span.length * (span.prompt_length + (span.length + 1) / 2) for span in layout.spans)
    attention = 12 * pairs * config.hidden_size * config.num_hidden_layers
    return 6 * (matrices * layout.tokens_T.numel() + head * layout.target_N.numel()) + attention


def milliseconds(work: Callable[[], object]) -> float:
    """Of one call, with everything that it left running."""
    _synchronize()
    began = time.perf_counter()
    work()
    _synchronize()
    return (time.perf_counter() - began) * 1e3


def timed(work: Callable[[], object], repetitions: int = 5) -> float:
    """Milliseconds, median, after two warm-ups."""
    return statistics.median([milliseconds(work) for _ in range(repetitions + 2)][2:])


def peak_gib(work: Callable[[], object]) -> float | None:
    """The most memory that was held at once while it ran; None where nobody counts."""
    if DEVICE.type == "cpu":
        work()
        return None
    torch.accelerator.empty_cache()
    torch.accelerator.reset_peak_memory_stats()
    work()
    _synchronize()
    return torch.accelerator.max_memory_allocated() / 2**30


def machine() -> dict[str, str]:
    return {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "device": torch.cuda.get_device_name() if DEVICE.type == "cuda" else DEVICE.type,
    }


def _synchronize() -> None:
    if DEVICE.type != "cpu":
        torch.accelerator.synchronize()
