"""`rondo.score`: the log-probs that a model's own forward gives, with each prompt computed once."""

from __future__ import annotations

import pytest
import torch
import transformers

import rondo
from rondo.attention.hf import adopt
from rondo.errors import ConfigError, ModelError
from tests.models import tiny_model

GROUPS = [([1, 2, 3], [[4, 5, 6], [7]]), ([9], [[2, 2]])]


def own_logps(model, prompt, response):
    ids = torch.tensor([prompt + response])
    scores = model(input_ids=ids, use_cache=False).logits[0].log_softmax(-1)
    return scores[len(prompt) - 1 : -1].gather(-1, ids[0, len(prompt) :, None])[:, 0]


def sliding_model():
    config = transformers.Gemma2Config(
        vocab_size=32, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, sliding_window=2, final_logit_softcapping=None, attn_logit_softcapping=None,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.Gemma2ForCausalLM(config).double().eval()


@pytest.mark.parametrize("attention", ["shared-prompt", "separate"])
@pytest.mark.parametrize("make", [lambda: tiny_model(dtype=torch.float64), sliding_model])
def test_scores_are_the_models_own_log_probs_with_gradient(make, attention):
    model = make()
    before = model.config._attn_implementation
    found = rondo.score(model, GROUPS, attention=attention)
    assert [[len(logps) for logps in group] for group in found] == [[3, 1], [2]]
    for (prompt, responses), group in zip(GROUPS, found, strict=True):
        for response, logps in zip(responses, group, strict=True):
            torch.testing.assert_close(logps, own_logps(model, prompt, response), rtol=0, atol=1e-6)
    sum(logps.sum() for group in found for logps in group).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert model.config._attn_implementation == before


def test_a_model_that_was_adopted_before_is_taken_as_it_is():
    model = tiny_model(dtype=torch.float64)
    expected = rondo.score(model, GROUPS)
    adopt(model)
    for one, other in zip(expected, rondo.score(model, GROUPS), strict=True):
        assert all(map(torch.equal, one, other))


def test_without_gradients_none_is_kept():
    with torch.no_grad():
        assert not rondo.score(tiny_model(), GROUPS)[0][0].requires_grad


def test_a_model_that_scales_its_logits_is_refused():
    config = transformers.CohereConfig(
        vocab_size=32, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4, logit_scale=0.1
    )
    torch.manual_seed(0)
    model = transformers.CohereForCausalLM(config).eval()
    with torch.no_grad():
        model.lm_head.weight.mul_(30)
    with pytest.raises(ModelError, match="packed rows"):
        rondo.score(model, GROUPS)


def test_an_unknown_way_is_refused():
    with pytest.raises(ConfigError, match="shared-prompt"):
        rondo.score(tiny_model(), GROUPS, attention="fast")
