"""The accelerator's attention paths against a float64 truth: as close to it as separate rows are."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from rondo.attention.flex import flex_attention_row, flex_plan
from rondo.attention.layout import Layout, separate_layout, shared_prompt_layout
from rondo.attention.reference import dense_attention
from rondo.attention.varlen import fits, varlen_attention, varlen_plan

pytestmark = pytest.mark.gpu

DEVICE = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
HEADS, KEY_HEADS, SIZE = 4, 2, 64

if not fits(DEVICE, torch.bfloat16):
    pytest.skip("needs an accelerator with flash kernels", allow_module_level=True)


def segments(seed: int):
    draw = random.Random(seed)
    longest = draw.choice([3, 40, 300])
    return [
        ([1] * draw.randint(1, longest), [[1] * draw.randint(1, longest) for _ in range(draw.randint(1, 6))])
        for _ in range(draw.randint(1, 5))
    ]


def run(compute, layout: Layout, inputs, direction) -> list[torch.Tensor]:
    leaves = [tensor.detach().clone().requires_grad_() for tensor in inputs]
    output = compute(*leaves)
    output.backward(direction)
    return [output.detach(), *(leaf.grad for leaf in leaves)]


def errors(found: list[torch.Tensor], truth: list[torch.Tensor]) -> list[float]:
    return [((a.double() - b).norm() / b.norm()).item() for a, b in zip(found, truth, strict=True)]


@pytest.mark.parametrize("seed", range(12))
def test_every_path_is_as_close_to_the_truth_as_a_dense_mask_in_the_same_precision(seed):
    for build, multiple in itertools.product((shared_prompt_layout, separate_layout), (1, 128)):
        layout = build(segments(seed), multiple=multiple).to(DEVICE)
        total = layout.tokens_T.numel()
        torch.manual_seed(seed)
        shapes = [(1, heads, total, SIZE) for heads in (HEADS, KEY_HEADS, KEY_HEADS)]
        exact = [torch.randn(shape, device=DEVICE).to(torch.bfloat16).double() for shape in shapes]
        direction = torch.randn(1, total, HEADS, SIZE, device=DEVICE).to(torch.bfloat16).double()
        rough = [tensor.to(torch.bfloat16) for tensor in exact]

        def dense(q, k, v, layout=layout):
            return dense_attention(q, k, v, plan=layout, scaling=SIZE**-0.5)

        def varlen(q, k, v, layout=layout):
            return varlen_attention(q, k, v, plan=varlen_plan(layout), scaling=SIZE**-0.5)

        def flex(q, k, v, layout=layout):
            return flex_attention_row(q, k, v, plan=flex_plan(layout), scaling=SIZE**-0.5)

        truth = run(dense, layout, exact, direction)
        allowed = errors(run(dense, layout, rough, direction.to(torch.bfloat16)), truth)
        for path in (varlen, flex):
            found = errors(run(path, layout, rough, direction.to(torch.bfloat16)), truth)
            assert all(one <= 1.5 * other + 1e-3 for one, other in zip(found, allowed, strict=True)), (
                path,
                found,
                allowed,
            )
