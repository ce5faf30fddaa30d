"""Old policy and reference on the host: the same bits, and on the device only while they compute."""

from __future__ import annotations

import pytest
import torch

from rondo.trainer.layers import decoder_layers
from rondo.trainer.offload import offload
from tests.models import tiny_model
from tests.trainers import gradient_after, make_trainer, micros_of, random_groups

OPTIONS = {"dtype": torch.float32, "kl": 0.2, "keep_old": True, "entropy": 0.1}


def test_the_gradients_bits_do_not_depend_on_where_the_frozen_models_live():
    results = []
    for away in (False, True):
        trainer = make_trainer(**OPTIONS, offload=away)
        for seed in range(2):  # the second period's old policy is another
            trainer.begin_period()
            for half in range(2):
                gradients = gradient_after(trainer, micros_of(random_groups(3, seed=2 * seed + half), 60))
                trainer.step()
        results.append(gradients)
    assert all(map(torch.equal, *results))


def test_a_frozen_model_is_at_home_between_forwards_and_one_layer_at_a_time_away():
    """On a CPU device a visit is a copy, so that it can be told from home."""
    model = tiny_model().requires_grad_(False)
    layers = decoder_layers(model)
    moved = offload(model, layers, torch.device("cpu"))
    homes = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    away: list[set[str]] = []

    def note(*_):
        away.append({name for name, parameter in model.named_parameters() if parameter.data_ptr() != homes[name]})

    for layer in layers:
        layer.mlp.register_forward_hook(note)
    model(input_ids=torch.tensor([[1, 2, 3]]))
    assert len(away) == len(layers) == 2
    for number, names in enumerate(away):
        inside = {name for name in names if ".layers." in name}
        assert inside
        assert all(f".layers.{number}." in name for name in inside)
        assert "model.embed_tokens.weight" in names
    assert [each.visits for each in moved] == [1, 1, 1]
    assert all(parameter.data_ptr() == homes[name] for name, parameter in model.named_parameters())


def test_a_failed_forward_leaves_nothing_on_the_device():
    model = tiny_model().requires_grad_(False)
    offload(model, decoder_layers(model), torch.device("cpu"))
    homes = [parameter.data_ptr() for parameter in model.parameters()]
    model.model.layers[1].mlp.forward = None
    with pytest.raises(TypeError):
        model(input_ids=torch.tensor([[1, 2, 3]]))
    assert [parameter.data_ptr() for parameter in model.parameters()] == homes
