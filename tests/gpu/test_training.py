"""The trainer on an accelerator: bfloat16 over float32 masters, adapters, compiled layers, padded rows, offload.

Everything here also runs on a CPU (RONDO_TEST_ON_CPU=1), where it proves only that it runs.
"""

from __future__ import annotations

import os

import pytest
import torch

from rondo.attention.hf import VARLEN, adopt
from rondo.attention.layout import separate_layout, shared_prompt_layout
from rondo.attention.varlen import fits
from rondo.trainer.layers import checkpoint_layers
from rondo.trainer.logprobs import warm_up
from rondo.trainer.lora import LoRASettings, add_adapters
from rondo.trainer.tri_model import Placement, TriModel
from tests.models import tiny_model
from tests.trainers import random_groups, scatter_adapters

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]

ON_CPU = bool(os.environ.get("RONDO_TEST_ON_CPU"))
if not torch.accelerator.is_available() and not ON_CPU:
    pytest.skip("needs an accelerator", allow_module_level=True)

DEVICE = torch.device("cpu") if ON_CPU else torch.accelerator.current_accelerator()
BF16 = torch.bfloat16
LORA = LoRASettings(rank=4, alpha=8.0)


def segments(seed=0):
    return [
        (group.prompt.token_ids, [response.token_ids for response in group.answer.responses])
        for group in random_groups(4, seed=seed)
    ]


def make(*, dtype=torch.float32, device=DEVICE, lora=False, keep_old=True, compute=None, **placement):
    """Weights that bfloat16 holds without loss, so that all precisions mean the same models."""
    models = [tiny_model(dtype=BF16, seed=seed).to(device=device, dtype=dtype) for seed in (0, 1)]
    for model in models:
        adopt(model)
    policy, reference = models
    if lora:
        pytest.importorskip("peft")
        add_adapters(policy, LORA, keep_old=keep_old)
        scatter_adapters(policy)
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter.copy_(parameter.to(BF16))
        reference = policy
    tri = TriModel(
        policy=policy,
        keep_old=keep_old,
        reference=reference,
        temperature=1.0,
        placement=Placement(dtype=compute, **placement),
    )
    tri.begin_period()
    tri.moved()
    return tri


def gradient(tri, layout):
    """After two micro-steps: their sum."""
    for _, parameter in tri.named_parameters():
        parameter.grad = None
    for _ in range(2):
        logps = tri.logps(layout)
        direction = torch.linspace(-1, 1, logps.policy_N.numel(), device=layout.tokens_T.device)
        (logps.policy_N * direction).sum().backward()
    return logps, [parameter.grad.double().cpu() for _, parameter in tri.named_parameters()]


def errors(found, truth):
    return [float((one - other).norm() / other.norm()) for one, other in zip(found, truth, strict=True)]


def truth_of(*, lora):
    """float64, on the CPU."""
    return gradient(make(dtype=torch.float64, device=torch.device("cpu"), lora=lora), shared_prompt_layout(segments()))


@pytest.mark.parametrize("lora", [False, True])
def test_bfloat16_over_masters_is_as_close_to_the_truth_as_separate_rows(lora):
    _, truth = truth_of(lora=lora)
    mixed = make(lora=lora, compute=BF16)
    if fits(DEVICE, BF16):
        assert mixed._policy_scorer.model.config._attn_implementation == VARLEN
    logps, found = gradient(mixed, shared_prompt_layout(segments()).to(DEVICE))
    _, apart = gradient(make(lora=lora, compute=BF16), separate_layout(segments()).to(DEVICE))
    assert sum(errors(found, truth)) <= 1.5 * sum(errors(apart, truth)) + 1e-3
    assert torch.equal(logps.policy_N.detach(), logps.old_N)
    assert all(parameter.grad.dtype == torch.float32 for _, parameter in mixed.named_parameters())


@pytest.mark.parametrize("build", [shared_prompt_layout, separate_layout])
@pytest.mark.parametrize("compute", [None, BF16])
def test_padding_changes_nothing_that_is_read(build, compute):
    """Padding has no responses: a run of no queries over a prompt of keys, whose gradients must be zeros."""
    results = [
        gradient(make(compute=compute), build(segments(), multiple=multiple).to(DEVICE)) for multiple in (1, 128)
    ]
    bound = 1e-4 if compute is None else 0.03
    for _, found in results:
        assert all(gradient.isfinite().all() for gradient in found)
    assert max(errors(results[1][1], results[0][1])) < bound


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("recompute", [False, True])
def test_compiled_layers_give_the_same_gradient_for_every_length(lora, recompute):
    torch._dynamo.reset()
    plain, compiled = make(lora=lora, compute=BF16), make(lora=lora, compute=BF16, compiled=True)
    if recompute:
        checkpoint_layers(compiled._policy_scorer.model)
    graphs = []
    for seed in range(4):
        layout = shared_prompt_layout(segments(seed), multiple=16).to(DEVICE)
        found, expected = (gradient(tri, layout)[1] for tri in (compiled, plain))
        assert sum(errors(found, expected)) / len(found) < 0.05
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert graphs[1:] == graphs[:1] * 3


@pytest.mark.parametrize("compute", [None, BF16])
def test_models_on_the_host_give_the_same_bits(compute):
    layout = shared_prompt_layout(segments()).to(DEVICE)
    here, away = make(compute=compute), make(compute=compute, offload=True)
    one, other = here.logps(layout), away.logps(layout)
    assert torch.equal(one.old_N, other.old_N)
    assert torch.equal(one.reference_N, other.reference_N)
    for model in (away.old, away.reference):
        assert all(parameter.device.type == "cpu" for parameter in model.parameters())


def test_the_first_step_finds_its_log_prob_kernel_compiled():
    torch._dynamo.reset()
    tri, layout = make(compute=BF16), shared_prompt_layout(segments()).to(DEVICE)
    width = tri.policy.get_output_embeddings().weight.shape[0]
    warm_up(tokens=64, vocabulary=width, dtype=BF16, device=DEVICE, temperature=1.0, entropy=False)
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    gradient(tri, layout)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before


def test_merged_weights_are_the_policy():
    tri = make(lora=True)
    plain = tiny_model().to(DEVICE)
    plain.load_state_dict(dict(tri.weights()), strict=False)
    adopt(plain)
    layout = shared_prompt_layout(segments()).to(DEVICE)
    merged = TriModel(policy=plain, keep_old=False, reference=None, temperature=1.0).logps(layout)
    assert (merged.policy_N - tri.logps(layout).policy_N).abs().max() < 1e-3
