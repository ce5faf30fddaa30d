"""LoRA: one set of base weights for policy, old policy and reference, against literal low-rank sums."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.func import functional_call

from rondo.attention.hf import adopt
from rondo.attention.layout import shared_prompt_layout
from rondo.config import parse_config
from rondo.errors import ConfigError
from rondo.launch.build_trainer import build_trainer, published_weights, saved_state
from rondo.observe.lane import Lane
from rondo.trainer.checkpoint import Checkpoints
from rondo.trainer.layers import checkpoint_layers
from rondo.trainer.lora import POLICY, LoRASettings, adapted, add_adapters, base_name, is_adapter
from rondo.trainer.tri_model import TriModel
from tests.invariants.harness import run_here
from tests.models import ARCHITECTURES, tiny_model
from tests.trainers import gradient_after, make_trainer, micros_of, random_groups, scatter_adapters

LORA = LoRASettings(rank=3, alpha=6.0)
SCALE = 2.0
LAYOUT = shared_prompt_layout([([1, 2, 3], [[4, 5, 6], [7, 8]]), ([9], [[2, 2]])])


def literal_weights(base, adapters):
    """Every adapted matrix as W + scale B A, a function of A and B."""
    weights = dict(base)
    for name, low in adapters.items():
        if ".lora_A." in name:
            target = name.replace(f".lora_A.{POLICY}.", ".")
            weights[target] = base[target] + SCALE * adapters[name.replace("lora_A", "lora_B")] @ low
    return weights


def logps_of(model, weights, layout=LAYOUT):
    def rows(span):
        prompt = layout.tokens_T[span.prompt : span.prompt + span.prompt_length]
        return torch.cat([prompt, layout.tokens_T[span.start : span.start + span.length]])

    found = []
    for span in layout.spans:
        ids = rows(span).unsqueeze(0)
        logits = functional_call(model, weights, kwargs={"input_ids": ids, "use_cache": False}).logits[0]
        scores = logits.log_softmax(-1)[span.prompt_length - 1 : -1]
        found.append(scores.gather(-1, ids[0, span.prompt_length :, None])[:, 0])
    return torch.cat(found)


def tri_model(*, keep_old=True, dtype=torch.float64, architecture="Qwen2"):
    model = tiny_model(architecture, dtype=dtype)
    adopt(model)
    add_adapters(model, LORA, keep_old=keep_old)
    scatter_adapters(model)
    return TriModel(policy=model, keep_old=keep_old, reference=model, temperature=1.0)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("recompute", [False, True])
def test_log_probs_and_the_adapters_gradient_are_those_of_merged_weights(architecture, recompute):
    tri = tri_model(architecture=architecture)
    tri.begin_period()
    if recompute:  # the backward pass computes again, after old policy and reference were run
        checkpoint_layers(tri.policy)
    base_model = tiny_model(architecture, dtype=torch.float64)
    base = {name: parameter.detach() for name, parameter in base_model.named_parameters()}
    adapters = {name: p.detach().clone().requires_grad_() for name, p in tri.named_parameters()}
    expected = logps_of(base_model, literal_weights(base, adapters))
    direction = torch.linspace(-1, 1, expected.numel(), dtype=torch.float64)
    (expected * direction).sum().backward()
    logps = tri.logps(LAYOUT)
    (logps.policy_N * direction).sum().backward()
    torch.testing.assert_close(logps.policy_N, expected, rtol=0, atol=1e-6)  # norms compute in float32
    for name, parameter in tri.named_parameters():
        truth = adapters[name].grad
        assert (parameter.grad - truth).norm() <= 1e-6 * truth.norm(), name
    assert all(p.grad is None for name, p in tri.policy.named_parameters() if f".{POLICY}." not in name)


def test_the_reference_is_the_base_model_and_the_old_policy_the_periods_first():
    tri = tri_model()
    plain = tiny_model(dtype=torch.float64)
    adopt(plain)
    base = TriModel(policy=plain, keep_old=False, reference=None, temperature=1.0).logps(LAYOUT).policy_N
    tri.begin_period()
    first = tri.logps(LAYOUT)
    assert torch.equal(first.reference_N, base)
    assert torch.equal(first.old_N, first.policy_N.detach())
    with torch.no_grad():
        for _, parameter in tri.named_parameters():
            parameter.mul_(1.5)
    later = tri.logps(LAYOUT)
    assert torch.equal(later.reference_N, base)
    assert torch.equal(later.old_N, first.old_N)
    assert not torch.equal(later.policy_N, first.policy_N)
    tri.begin_period()
    assert torch.equal(tri.logps(LAYOUT).old_N, later.policy_N.detach())


def test_base_weights_never_change_and_the_adapters_learn():
    trainer = make_trainer(lora=LORA, kl=0.1, keep_old=True)
    before = {name: p.detach().clone() for name, p in trainer.model.policy.named_parameters()}
    for _ in range(2):
        trainer.begin_period()
        gradient_after(trainer, micros_of(random_groups(3), 40))
        trainer.step()
    for name, parameter in trainer.model.policy.named_parameters():
        assert torch.equal(parameter, before[name]) == (not is_adapter(name)), name


def test_adapters_start_as_nothing():
    model = tiny_model()
    adopt(model)
    add_adapters(model, LORA, keep_old=False)
    tri = TriModel(policy=model, keep_old=False, reference=model, temperature=1.0)
    logps = tri.logps(LAYOUT)
    torch.testing.assert_close(logps.policy_N, logps.reference_N, rtol=0, atol=1e-6)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_publication_is_the_merged_model_under_its_own_names(architecture):
    tri = tri_model(architecture=architecture)
    plain = tiny_model(architecture, dtype=torch.float64)
    base = dict(plain.named_parameters())
    before = {name: parameter.detach().clone() for name, parameter in tri.policy.named_parameters()}
    published = dict(tri.weights())
    assert list(published) == list(base)
    expected = literal_weights(base, dict(tri.named_parameters()))
    for name, tensor in published.items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=1e-12)
    plain.load_state_dict(published, strict=False)
    adopt(plain)
    whole = TriModel(policy=plain, keep_old=False, reference=None, temperature=1.0)
    torch.testing.assert_close(whole.logps(LAYOUT).policy_N, tri.logps(LAYOUT).policy_N, rtol=0, atol=1e-6)
    for name, parameter in tri.policy.named_parameters():  # not merged in place
        assert torch.equal(parameter, before[name])
    state = saved_state(tri.policy, published)
    assert set(state) == set(plain.state_dict())
    assert len(adapted(tri.policy)) == {"GPTNeoX": 8}.get(architecture, 14)


def test_a_restored_run_goes_on_bit_for_bit_and_holds_only_adapters(tmp_path):
    groups = random_groups(4)

    def checkpoints(trainer):
        return Checkpoints(folder=tmp_path, trainer=trainer, cursor=lambda: 0, every=1, keep=1, lane=Lane())

    def train_on(trainer, chosen):
        gradient_after(trainer, micros_of(chosen, 40))
        trainer.step()

    whole, second = (make_trainer(dtype=torch.float32, lora=LORA) for _ in range(2))
    train_on(whole, groups[:2])
    checkpoints(whole).finish(0)
    train_on(whole, groups[2:])
    assert checkpoints(second).restore().steps == 1
    train_on(second, groups[2:])
    assert all(map(torch.equal, second.model.policy.parameters(), whole.model.policy.parameters()))
    (folder,) = tmp_path.iterdir()
    assert all(f".{POLICY}." in label for label in FileSystemReader(folder).read_metadata().state_dict_metadata)


def test_chosen_layers_alone_are_adapted_and_a_name_that_is_none_is_refused():
    model = tiny_model()
    add_adapters(model, LoRASettings(rank=2, alpha=2.0, targets=("q_proj", "v_proj")), keep_old=True)
    names = {name.split(".")[-4] for name, _ in model.named_parameters() if is_adapter(name)}
    assert names == {"q_proj", "v_proj"}
    with pytest.raises(ConfigError, match=r"trainer\.lora\.targets names query"):
        add_adapters(tiny_model(), LoRASettings(rank=2, alpha=2.0, targets=("query",)), keep_old=False)


def test_offloading_beside_adapters_is_refused_naming_both_keys():
    required = {"model": {"path": "m"}, "data": {"train": "d"}, "rewards": {"functions": ["f:f"]}}
    with pytest.raises(ConfigError, match=r"trainer\.offload = true with trainer\.lora\.rank = 4"):
        parse_config({**required, "trainer": {"offload": True, "lora": {"rank": 4}}})


def test_a_whole_run_learns_on_policy_and_leaves_a_merged_model(tree):
    changes = {"trainer__lora": {"rank": 4}, "trainer__learning_rate": 1e-3, "algorithm__kl": {"coefficient": 0.01}}
    config = tree(**changes, schedule__periods=3, schedule__updates_per_period=2, algorithm__name="dr-grpo")
    _, witness = run_here(config)
    counts = witness.trainer.tally.read()
    assert counts["gradient_norm"] > 0
    assert counts["kl"] > 0  # the policy has left its reference
    assert counts["logp_gap_max"] < 1e-3  # and what the engine holds is the policy, merged
    policy = witness.trainer.model.policy
    untouched = dict(build_trainer(parse_config(tree()), Lane()).model.policy.named_parameters())
    for name, parameter in policy.named_parameters():
        if not is_adapter(name):
            assert torch.equal(parameter, untouched[base_name(name)])
    merged = published_weights(witness.trainer, "float32")
    assert set(saved_state(policy, merged)) >= set(untouched)
    assert any(not torch.equal(merged[name], untouched[name]) for name in untouched)
