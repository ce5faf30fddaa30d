"""bfloat16 compute over float32 masters, on one rank."""

from __future__ import annotations

import torch

from rondo.trainer.layers import checkpoint_layers, decoder_layers
from rondo.trainer.lora import LoRASettings
from rondo.trainer.precision import WorkingCopy
from tests.models import tiny_model
from tests.trainers import gradient_after, make_trainer, micros_of, random_groups

BF16 = torch.bfloat16


def masters_rounded(trainer):
    """Weights that bfloat16 holds without loss, so that all precisions mean the same model."""
    with torch.no_grad():
        for parameter in trainer.model.policy.parameters():
            parameter.copy_(parameter.to(BF16))
    trainer.model.moved()
    return trainer


def errors(found, truth):
    return [float((one.double() - other).norm() / other.norm()) for one, other in zip(found, truth, strict=True)]


def test_the_gradient_is_as_close_to_the_truth_as_plain_bfloat16_is():
    groups = random_groups(12)
    micros = micros_of(groups, 40)
    truth = gradient_after(masters_rounded(make_trainer()), micros)
    mixed = masters_rounded(make_trainer(dtype=torch.float32, compute=BF16))
    found = gradient_after(mixed, micros)
    assert all(gradient.dtype == torch.float32 for gradient in found)
    plain = make_trainer(dtype=BF16, attention="separate")
    allowed = errors(gradient_after(plain, micros), truth)
    close = errors(found, truth)
    assert all(one <= 2 * other + 1e-3 for one, other in zip(close, allowed, strict=True)), (close, allowed)
    assert sum(close) <= 1.25 * sum(allowed)


def test_many_micro_batches_are_summed_in_float32():
    (micro,) = micros_of(random_groups(1), 10_000)
    for dtype, bound in ((torch.float32, 1e-5), (BF16, None)):
        once, often = (make_trainer(dtype=dtype, compute=BF16) for _ in range(2))
        single = gradient_after(once, [micro])
        total = gradient_after(often, [micro] * 65)  # 65 equal parts: no power of two hides a rounding
        worst = max(errors(total, [65 * gradient.double() for gradient in single]))
        assert worst < bound if bound else worst > 1e-3  # the comparison can fail


def test_masters_move_by_less_than_bfloat16_can_hold():
    groups = random_groups(2)
    mixed, pure = make_trainer(dtype=torch.float32, compute=BF16), make_trainer(dtype=BF16)
    for trainer in (mixed, pure):
        trainer._learning_rate = lambda step: 1e-6
        before = [parameter.detach().clone() for parameter in trainer.model.policy.parameters()]
        for _ in range(3):
            gradient_after(trainer, micros_of(groups, 10_000))
            trainer.step()
        pairs = zip(before, trainer.model.policy.parameters(), strict=True)
        moved = [not torch.equal(old, new) for old, new in pairs if old.abs().max() > 0]
        if trainer is mixed:
            assert all(moved)
        else:  # a step of a millionth is below the spacing of bfloat16: such weights stand still
            large = [old.abs().min() > 1e-3 for old in before if old.abs().max() > 0]
            assert not any(flag for flag, whole in zip(moved, large, strict=True) if whole)
            assert any(large)


def test_the_working_copy_is_the_masters_rounded_after_every_step():
    trainer = make_trainer(dtype=torch.float32, compute=BF16)
    for _ in range(2):
        gradient_after(trainer, micros_of(random_groups(2), 10_000))
        trainer.step()
        working = trainer.model._policy_scorer.model
        for narrow, master in zip(working.parameters(), trainer.model.policy.parameters(), strict=True):
            assert narrow.dtype == BF16
            assert narrow.grad is None
            assert torch.equal(narrow, master.to(BF16))


def test_the_old_policy_is_the_policy_bit_for_bit_at_the_periods_start():
    trainer = make_trainer(dtype=torch.float32, compute=BF16, keep_old=True, kl=0.1)
    trainer.begin_period()
    layout = trainer._layout(micros_of(random_groups(2), 10_000)[0].parts)
    logps = trainer.model.logps(layout)
    assert logps.policy_N.dtype == torch.float32  # log-softmax is never narrow
    assert torch.equal(logps.policy_N.detach(), logps.old_N)
    assert not torch.equal(logps.reference_N, logps.old_N)


def test_exact_sums_take_bfloat16_gradients_in_any_order():
    groups = random_groups(5)
    results = []
    for order in (groups, groups[::-1]):
        trainer = make_trainer(dtype=torch.float32, compute=BF16, exact=True)
        gradient_after(trainer, micros_of(order, 40))
        trainer.step()
        results.append([parameter.detach().clone() for parameter in trainer.model.policy.parameters()])
    assert all(map(torch.equal, *results))


def test_what_is_frozen_exists_once_and_narrow():
    trainer = make_trainer(dtype=torch.float32, compute=BF16, lora=LoRASettings(rank=2, alpha=4.0))
    masters, working = trainer.model.policy, trainer.model._policy_scorer.model
    for (name, master), narrow in zip(masters.named_parameters(), working.parameters(), strict=True):
        assert (narrow is master) == (not master.requires_grad), name
        assert narrow.dtype == BF16
        assert master.dtype == (torch.float32 if master.requires_grad else BF16)


def test_a_policy_that_recomputes_its_activations_does_so_in_its_working_copy():
    masters = tiny_model()
    checkpoint_layers(masters)
    copy, ran = WorkingCopy(masters, BF16), []
    for layer in decoder_layers(copy.model):
        layer.register_forward_pre_hook(lambda *_: ran.append(1))
    copy.model(input_ids=torch.tensor([[1, 2, 3]])).logits.float().sum().backward()
    assert len(ran) == 2 * len(decoder_layers(copy.model))


def test_a_gradient_is_handed_over_and_not_kept_twice():
    masters = tiny_model()
    copy = WorkingCopy(masters, BF16)
    copy.model(input_ids=torch.tensor([[1, 2, 3]])).logits.float().sum().backward()
    assert all(narrow.grad is None for narrow in copy.model.parameters())
    assert all(master.grad is not None and master.grad.dtype == torch.float32 for master in masters.parameters())
