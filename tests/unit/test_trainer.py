"""The training step against a literal GRPO, and its refusal of what is not finite."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rondo.errors import NonFiniteGradientError
from rondo.trainer.checkpoint import Checkpoints
from rondo.trainer.layers import checkpoint_layers, decoder_layers
from rondo.trainer.logprobs import select, select_in_one_pass, token_logps
from rondo.trainer.optim import LearningRate
from rondo.types import MicroBatch
from tests.conftest import make_group
from tests.models import tiny_model
from tests.trainers import gradient_after, make_trainer, micros_of, random_groups


def native_logps(model, prompt, response, temperature):
    ids = torch.tensor([[*prompt, *response]])
    scores = (model(input_ids=ids, use_cache=False).logits[0] / temperature).log_softmax(-1)
    return scores[len(prompt) - 1 : -1].gather(-1, ids[0, len(prompt) :, None])[:, 0]


def literal_grpo(groups, *, normalise, kl, estimator, temperature):
    """The paper's formula over the whole batch, one response at a time, with the model's own attention."""
    policy, reference = tiny_model(dtype=torch.float64), tiny_model(dtype=torch.float64, seed=1)
    total, sequences, tokens = torch.zeros((), dtype=torch.float64), 0, 0
    for group in groups:
        for response, advantage in zip(group.answer.responses, group.advantages, strict=True):
            logps = native_logps(policy, group.prompt.token_ids, response.token_ids, temperature)
            ratio = (logps - logps.detach()).exp()
            loss = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
            if kl:
                with torch.no_grad():
                    x = native_logps(reference, group.prompt.token_ids, response.token_ids, temperature)
                x = x - logps
                loss = loss + kl * {"k1": -x, "k2": x**2 / 2, "k3": x.exp() - 1 - x}[estimator]
            total = total + (loss.mean() if normalise == "sequences" else loss.sum())
            sequences, tokens = sequences + 1, tokens + len(response.token_ids)
    (total / {"sequences": sequences, "tokens": tokens, "constant": sequences * 16}[normalise]).backward()
    return policy


@pytest.mark.parametrize("normalise", ["sequences", "tokens", "constant"])
@pytest.mark.parametrize(("kl", "estimator"), [(0.0, "k3"), (0.3, "k1"), (0.3, "k2"), (0.3, "k3")])
def test_the_step_applies_the_papers_gradient_whatever_the_packing(normalise, kl, estimator):
    groups = random_groups(5)
    truth = literal_grpo(groups, normalise=normalise, kl=kl, estimator=estimator, temperature=0.7)
    for budget in (12, 60, 10_000):
        trainer = make_trainer(normalise=normalise, kl=kl, estimator=estimator, temperature=0.7)
        sums = gradient_after(trainer, micros_of(groups, budget))
        for (name, expected), found in zip(truth.named_parameters(), sums, strict=True):
            error = (found / trainer.divisor() - expected.grad).norm() / expected.grad.norm().clamp_min(1e-9)
            assert error < 1e-6, (name, budget, error)  # RMSNorm computes in float32 even in a float64 model


def test_groups_without_gradient_still_count_in_the_divisor():
    groups = random_groups(3)
    idle = dataclasses.replace(groups[2], advantages=(0.0,) * 4)
    run, skipped = make_trainer(normalise="tokens"), make_trainer(normalise="tokens")
    run.accumulate(micros_of([*groups[:2], idle], 10_000)[0])
    skipped.accumulate(dataclasses.replace(micros_of(groups[:2], 10_000)[0], skipped=(idle,)))
    assert run.divisor() == skipped.divisor()
    for one, other in zip(run.gradients(), skipped.gradients(), strict=True):
        torch.testing.assert_close(one, other)


def test_an_update_without_any_gradient_is_a_step_of_zero():
    trainer = make_trainer()
    trainer.accumulate(MicroBatch(parts=(), skipped=tuple(random_groups(2))))
    trainer.step()
    assert trainer.steps == 1
    assert trainer.tally.read()["gradient_norm"] == 0


def test_reference_and_old_policy_never_get_a_gradient():
    trainer = make_trainer(kl=0.5, keep_old=True)
    gradient_after(trainer, micros_of(random_groups(2), 10_000))
    for model in (trainer.model.old, trainer.model.reference):
        assert all(parameter.grad is None and not parameter.requires_grad for parameter in model.parameters())


def test_the_old_policy_is_refreshed_at_the_periods_start_and_only_there():
    trainer = make_trainer(keep_old=True)
    groups = random_groups(4)
    trainer.begin_period()
    first = [parameter.clone() for parameter in trainer.model.policy.parameters()]
    for half in (groups[:2], groups[2:]):
        gradient_after(trainer, micros_of(half, 10_000))
        trainer.step()
        assert all(map(torch.equal, trainer.model.old.parameters(), first))
    assert trainer.tally.read()["clip_fraction"] > 0  # the second update's ratio is no longer 1
    trainer.begin_period()
    assert all(map(torch.equal, trainer.model.old.parameters(), trainer.model.policy.parameters()))


def test_a_gradient_that_is_not_finite_stops_before_the_step_and_names_the_groups():
    trainer = make_trainer()
    before = [parameter.clone() for parameter in trainer.model.policy.parameters()]
    good = random_groups(3)
    bad = make_group(index=77, advantages=[float("inf"), 1.0])
    for micro in [*micros_of(good, 10), *micros_of([bad], 10)]:
        trainer.accumulate(micro)
    with pytest.raises(NonFiniteGradientError, match=r"responsible: prompt 77\. "):
        trainer.step()
    assert all(map(torch.equal, trainer.model.policy.parameters(), before))


def test_the_gradient_is_clipped_to_the_norm_after_the_division():
    trainer = make_trainer(max_grad_norm=1e-3)
    gradient_after(trainer, micros_of(random_groups(2), 10_000))
    captured: list[torch.Tensor] = []
    trainer.optimizer.register_step_pre_hook(
        lambda *_: captured.extend(parameter.grad.clone() for parameter in trainer.model.policy.parameters())
    )
    trainer.step()
    assert torch.nn.utils.get_total_norm(captured).item() == pytest.approx(1e-3, rel=1e-3)


def test_chunked_log_probs_equal_whole_ones_in_value_and_gradient(monkeypatch):
    torch.manual_seed(0)
    head = torch.nn.Linear(16, 50, dtype=torch.float64)
    hidden, target = torch.randn(23, 16, dtype=torch.float64, requires_grad=True), torch.randint(50, (23,))
    results = []
    for elements in (1 << 24, 200):
        monkeypatch.setattr("rondo.trainer.logprobs.CHUNK_ELEMENTS", elements)
        head.zero_grad()
        hidden.grad = None
        logps = token_logps(head, hidden, target, temperature=0.5, vocabulary=50)
        logps.square().sum().backward()
        results.append([logps.detach(), hidden.grad.clone(), head.weight.grad.clone()])
    for whole, chunked in zip(*results, strict=True):
        torch.testing.assert_close(chunked, whole, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("entropy", [False, True])
def test_what_is_compiled_for_an_accelerator_computes_the_same(entropy):
    torch.manual_seed(0)
    target = torch.randint(50, (23,))
    results = []
    for function in (select, select_in_one_pass):
        torch.manual_seed(1)
        logits = torch.randn(23, 50, dtype=torch.float64, requires_grad=True)
        selected = function(logits, target, 0.5, entropy)
        selected.square().sum().backward()
        results.append((selected.detach(), logits.grad))
    for plain, fused in zip(*results, strict=True):
        torch.testing.assert_close(fused, plain, rtol=1e-12, atol=1e-12)


class WidestLogits(TorchDispatchMode):
    """The most rows that a tensor over the vocabulary ever had."""

    rows = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.dim() == 2 and tensor.shape[-1] == 50:
                self.rows = max(self.rows, tensor.shape[0])
        return result


def test_no_tensor_of_all_tokens_by_the_vocabulary_exists_in_forward_or_backward(monkeypatch):
    head = torch.nn.Linear(3, 50)
    hidden = torch.randn(100, 3, requires_grad=True)
    for elements, expected in ((350, 7), (1 << 24, 100)):  # the second: the watch sees what it should
        monkeypatch.setattr("rondo.trainer.logprobs.CHUNK_ELEMENTS", elements)
        with WidestLogits() as seen:
            logps = token_logps(head, hidden, torch.randint(50, (100,)), temperature=1.0, vocabulary=50, entropy=True)
            logps.sum().backward()
        assert seen.rows == expected


def test_a_restored_checkpoint_goes_on_bit_for_bit(tmp_path):
    groups = random_groups(6)

    def checkpoints(trainer, keep=2):
        from rondo.observe.lane import Lane

        return Checkpoints(folder=tmp_path, trainer=trainer, cursor=lambda: 9, every=1, keep=keep, lane=Lane())

    def train_on(trainer, chosen):
        gradient_after(trainer, micros_of(chosen, 40))
        trainer.step()

    whole, first, second = (make_trainer(dtype=torch.float32) for _ in range(3))
    for chosen in (groups[:2], groups[2:4], groups[4:]):
        train_on(whole, chosen)
    assert checkpoints(first).restore() is None
    for period, chosen in enumerate((groups[:2], groups[2:4])):
        train_on(first, chosen)
        checkpoints(first).finish(period)
    progress = checkpoints(second).restore()
    assert (progress.period, progress.cursor, progress.steps) == (2, 9, 2)
    train_on(second, groups[4:])
    assert all(map(torch.equal, second.model.policy.parameters(), whole.model.policy.parameters()))
    checkpoints(second, keep=1).finish(2)
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["period-000003"]


def test_the_learning_rate_warms_up_and_decays():
    linear = LearningRate(peak=1.0, warmup=2, total=6, decay="linear")
    assert [linear(step) for step in range(6)] == [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    assert LearningRate(peak=1.0, total=4, decay="cosine")(2) == pytest.approx(0.5)
    assert LearningRate(peak=1.0, total=4)(3) == 1.0


def test_activation_checkpointing_changes_no_bit_and_switches_no_dropout_on():
    groups = random_groups(3)
    kept, recomputed = make_trainer(dtype=torch.float32), make_trainer(dtype=torch.float32)
    checkpoint_layers(recomputed.model.policy)
    ran = []
    for layer in decoder_layers(recomputed.model.policy):
        assert not any(module.training for module in layer.children())
        layer.register_forward_pre_hook(lambda *_: ran.append(1))
    one, other = (gradient_after(trainer, micros_of(groups, 40)) for trainer in (kept, recomputed))
    assert all(map(torch.equal, one, other))
    assert len(ran) == 2 * len(decoder_layers(recomputed.model.policy)) * len(micros_of(groups, 40))
