"""One training micro-step on an accelerator: utilisation, what old policy and reference add, memory, recompilation.

    python bench/training_step.py [--json PATH] [--layers 28] [--profile] [--tiny]

A Qwen2 of the 1.5B shape with random weights, bfloat16, 16k tokens per micro-step, shared-prompt rows of (1024, 256, 8)
with a long tail, a new row at every step (so that nothing is compiled twice, or it would show). Utilisation counts 6 N
per token, attention and head, no recomputation, over 989 TFLOP/s. `--profile` says which kernels the time goes to, and
`--tiny` runs all of it in a small shape, on any device, to see that the script works.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch
from torch._dynamo.utils import counters
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rondo.attention.hf import adopt
from rondo.attention.layout import Layout, shared_prompt_layout
from rondo.trainer.layers import COMPILED_MULTIPLE, checkpoint_layers, compile_layers
from rondo.trainer.logprobs import token_logps, warm_up
from rondo.trainer.lora import LoRASettings, add_adapters
from rondo.trainer.optim import adamw
from rondo.trainer.tri_model import Placement, TriModel
from shapes import DEVICE, PEAK, flops, machine, make_model, make_segments, milliseconds, peak_gib

BF16 = torch.bfloat16


@dataclass(frozen=True, kw_only=True)
class Shape:
    layers: int
    hidden: int = 1536
    vocabulary: int = 151936
    head: int = 128
    groups: int = 5
    prompt: int = 1024
    response: int = 256
    size: int = 8
    steps: int = 10

    def model(self, dtype: torch.dtype = BF16):
        model = make_model(self.layers, hidden=self.hidden, vocabulary=self.vocabulary, dtype=dtype, head=self.head)
        adopt(model)
        return model

    def rows(self, *, multiple: int = 1) -> list[Layout]:
        """Rows of about 16k tokens with lengths of their own."""
        draw = random.Random(1)

        def around(length: int, share: int) -> int:
            return length + draw.randrange(-(length // share), length // share)

        return [
            shared_prompt_layout(
                make_segments(
                    self.groups, around(self.prompt, 16), around(self.response, 8), self.size, tail=True,
                    vocabulary=self.vocabulary, seed=number,
                ),
                multiple=multiple,
            ).to(DEVICE)
            for number in range(self.steps)
        ]  # fmt: skip

    def row_of_responses(self, tokens: int) -> Layout:
        """A row with so many *response* tokens, the ones that meet the vocabulary."""
        groups = max(1, tokens // (self.size * self.response))
        return shared_prompt_layout(
            make_segments(groups, self.prompt, self.response, self.size, tail=False, vocabulary=self.vocabulary)
        ).to(DEVICE)


TINY = Shape(layers=2, hidden=128, vocabulary=4096, head=32, groups=2, prompt=64, response=24, size=4, steps=5)


def three(policy, *, reference=None, keep_old: bool = False, placement: Placement | None = None) -> TriModel:
    return TriModel(policy=policy, keep_old=keep_old, reference=reference, temperature=1.0, placement=placement)


def micro_step(model: TriModel, layout: Layout) -> None:
    logps = model.logps(layout)
    loss = (logps.policy_N * (1.0 + 0.0 * logps.old_N)).sum()
    if logps.reference_N is not None:
        loss = loss + (logps.policy_N - logps.reference_N).square().sum()
    loss.backward()


def measure(name: str, model: TriModel, layouts: list[Layout]) -> dict[str, object]:
    """Forward and backward of every row; the first two are the warm-up."""
    times: list[float] = []
    graphs: list[int] = []

    def run() -> None:
        for layout in layouts:
            times.append(milliseconds(lambda layout=layout: micro_step(model, layout)))
            graphs.append(counters["stats"]["unique_graphs"])

    peak = peak_gib(run)
    work = [flops(model.policy, layout) for layout in layouts]
    result: dict[str, object] = {
        "name": name,
        "ms": statistics.median(times[2:]),
        "slowest_ms": max(times[2:]),
        "mfu": statistics.median(one / (ms * 1e-3) / PEAK for one, ms in zip(work[2:], times[2:], strict=True)),
        "warm_up_s": sum(times[:2]) / 1e3,
        "graphs_compiled_after_warm_up": graphs[-1] - graphs[1],
        "row_lengths": sorted({layout.tokens_T.numel() for layout in layouts}),
        "peak_gib": peak,
    }
    print(json.dumps(result), flush=True)
    for _, parameter in model.named_parameters():
        parameter.grad = None
    return result


def compilation(shape: Shape) -> float:
    """Seconds until the log-prob kernel is there; `rondo train` spends them while its engines start."""
    settings = {"dtype": BF16, "device": DEVICE, "temperature": 1.0, "entropy": False}
    seconds = milliseconds(lambda: warm_up(tokens=16384, vocabulary=shape.vocabulary, **settings)) / 1e3
    print(json.dumps({"log-prob kernel compiled, s": seconds}), flush=True)
    return seconds


def utilisation(shape: Shape) -> list[dict[str, object]]:
    policy, layouts = shape.model(), shape.rows()
    alone = three(policy)
    results = [measure("policy", alone, layouts)]
    reference = shape.model()
    results.append(measure("policy + reference", three(policy, reference=reference), layouts))
    results.append(measure("policy + old + reference", three(policy, reference=reference, keep_old=True), layouts))
    away = three(policy, reference=reference, keep_old=True, placement=Placement(offload=True))
    results.append(measure("policy + old + reference, both on the host", away, layouts))
    del reference, away
    compile_layers(policy)
    results.append(measure("policy, compiled layers", alone, shape.rows(multiple=COMPILED_MULTIPLE)))
    return results


def masters(shape: Shape) -> list[dict[str, object]]:
    """As `rondo train` does it: float32 masters, and a step of the optimizer at the end."""
    results = []
    for name in ("float32 masters", "float32 masters, compiled layers", "adapters, rank 32, with reference"):
        lora, compiled = name.startswith("adapters"), name.endswith("compiled layers")
        policy = shape.model(torch.float32)
        if lora and find_spec("peft") is None:
            print("no peft here: adapters left out")
            continue
        if lora:
            add_adapters(policy, LoRASettings(rank=32, alpha=64.0), keep_old=False)
        model = three(policy, reference=policy if lora else None, placement=Placement(dtype=BF16, compiled=compiled))
        optimizer = adamw(model.named_parameters(), weight_decay=0.0, betas=(0.9, 0.999))
        rows = shape.rows(multiple=COMPILED_MULTIPLE if compiled else 1)
        result = measure(name, model, rows)
        micro_step(model, rows[0])

        def step(model: TriModel = model, optimizer: torch.optim.Optimizer = optimizer) -> None:
            optimizer.step()
            model.moved()

        step()
        result["optimizer_ms"] = milliseconds(step)
        print(json.dumps({"name": name, "optimizer_ms": result["optimizer_ms"]}), flush=True)
        results.append(result)
    return results


class WidestLogits(TorchDispatchMode):
    """Sees every tensor that an operation returns; remembers the most rows that one over the vocabulary had."""

    def __init__(self, vocabulary: int, hidden: int) -> None:
        super().__init__()
        self.rows = 0
        self._vocabulary, self._hidden = vocabulary, hidden

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.dim() > 1 and tensor.shape[-1] == self._vocabulary:
                rows = tensor.numel() // self._vocabulary
                if rows != self._hidden:  # the head's own weight, turned
                    self.rows = max(self.rows, rows)
        return result


def memory(shape: Shape, responses: int) -> list[dict[str, object]]:
    """Peak memory of one micro-step with many response tokens, and the largest piece of [tokens, vocabulary]."""
    results = []
    for recompute in (True, False):
        policy = shape.model()
        if recompute:
            checkpoint_layers(policy)
        model, layout = three(policy), shape.row_of_responses(responses)
        held = torch.accelerator.memory_allocated() / 2**30 if DEVICE.type != "cpu" else None
        result: dict[str, object] = {
            "name": f"memory, activation checkpointing {'on' if recompute else 'off'}",
            "tokens": layout.tokens_T.numel(),
            "response_tokens": layout.target_N.numel(),
            "held_before_gib": held,
            "whole_logits_would_be_gib": layout.target_N.numel() * shape.vocabulary * 2 / 2**30,
        }
        try:
            result["peak_gib"] = peak_gib(lambda model=model, layout=layout: micro_step(model, layout))
        except torch.OutOfMemoryError:
            result["peak_gib"] = "out of memory"
        if recompute:
            with torch.compiler.set_stance("force_eager"), WidestLogits(shape.vocabulary, shape.hidden) as seen:
                micro_step(model, layout)
            result["widest_piece_of_logits_rows"] = seen.rows
        print(json.dumps(result), flush=True)
        results.append(result)
        del model, policy
    return results


KINDS = {  # the first that a kernel's name holds
    "attention": ("flash", "fmha", "scaled_dot_product", "flex_attention"),
    "optimizer": ("multi_tensor_apply", "adam"),
    "head / log-prob": ("logsumexp", "softmax", "gather"),
    "GEMM": ("gemm", "nvjet", "cutlass", "xmma", "cublas", "aten::mm", "aten::addmm", "aten::bmm", "wgmma"),
    "elementwise": ("elementwise", "triton", "reduce", "copy", "cat", "index", "norm", "mul", "add", "silu", "pow"),
}


ANNOTATIONS = ("##", "Torch-Compiled", "ProfilerStep", "Optimizer.", "CompiledFunction")  # not kernels: around them


def kind_of(kernel: str) -> str:
    lower = kernel.lower()
    return next((kind for kind, words in KINDS.items() if any(word in lower for word in words)), "other")


def head_share(shape: Shape, layout: Layout) -> float:
    """Milliseconds of the output head and its log-probs alone, forward, recomputation and backward."""
    policy = shape.model()
    head = policy.get_output_embeddings()
    hidden = torch.randn(layout.target_N.numel(), shape.hidden, dtype=BF16, device=DEVICE, requires_grad=True)

    def run() -> None:
        token_logps(head, hidden, layout.target_N, temperature=1.0, vocabulary=shape.vocabulary).sum().backward()

    return statistics.median([milliseconds(run) for _ in range(5)][2:])


def profiled(name: str, work: Callable[[], None]) -> dict[str, object]:
    """Which kernels the time of one call goes to, by kind and by name."""
    on_device = DEVICE.type != "cpu"
    work()
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_device else [])]) as profiler:
        wall = milliseconds(work)
    times = {
        event.key: (event.self_device_time_total if on_device else event.self_cpu_time_total) / 1e3
        for event in profiler.key_averages()
        if not event.key.startswith(ANNOTATIONS)
        and (not on_device or event.device_type != torch.autograd.DeviceType.CPU)
    }
    busy = sum(times.values())
    kinds: dict[str, float] = {}
    for kernel, ms in times.items():
        kinds[kind_of(kernel)] = kinds.get(kind_of(kernel), 0.0) + ms
    shares = {kind: ms / wall for kind, ms in sorted(kinds.items(), key=lambda item: -item[1])}
    top = sorted(times.items(), key=lambda item: -item[1])[:25]
    print(f"\n{name}: {wall:.1f} ms, kernels {busy:.1f} ms, nothing running {max(0.0, 1 - busy / wall):.1%}")
    for kind, share in shares.items():
        print(f"  {share:6.1%}  {kind}")
    for kernel, ms in top:
        print(f"  {ms:9.2f} ms {ms / wall:6.1%}  [{kind_of(kernel)}] {kernel[:110]}")
    return {"name": name, "wall_ms": wall, "kernels_ms": busy, "shares": shares, "top": top}


def profiles(shape: Shape) -> list[dict[str, object]]:
    results = []
    layout = shape.rows(multiple=COMPILED_MULTIPLE)[-1]
    for name in ("policy", "policy, compiled layers"):
        policy = shape.model()
        if "compiled" in name:
            compile_layers(policy)
        model = three(policy)
        results.append(profiled(name, lambda model=model: micro_step(model, layout)))
        results[-1]["mfu"] = flops(policy, layout) / (results[-1]["wall_ms"] * 1e-3) / PEAK
    results.append({"name": "output head and log-probs alone", "ms": head_share(shape, layout)})
    print(json.dumps(results[-1]), flush=True)
    policy = shape.model(torch.float32)
    model = three(policy, placement=Placement(dtype=BF16))
    optimizer = adamw(model.named_parameters(), weight_decay=0.0, betas=(0.9, 0.999))

    def whole_step() -> None:
        micro_step(model, layout)
        optimizer.step()
        model.moved()

    results.append(profiled("float32 masters, one micro-step and the optimizer's", whole_step))
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--profile", action="store_true", help="also say which kernels the time goes to")
    parser.add_argument("--tiny", action="store_true", help="a small shape, to see that the script runs")
    arguments = parser.parse_args()
    shape = TINY if arguments.tiny else Shape(layers=arguments.layers)
    began = time.monotonic()
    results: dict[str, object] = {**machine(), "log-prob kernel compiled, s": compilation(shape)}
    results["utilisation"] = utilisation(shape)
    results["masters"] = masters(shape)
    results["memory"] = memory(shape, 512 if arguments.tiny else 16384)
    if arguments.profile:
        results["profiles"] = profiles(shape)
    print(f"{time.monotonic() - began:.0f} s in all")
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
