"""A model whose prompts cannot be shared trains on separate rows with its own attention, and says so once."""

from __future__ import annotations

import pytest
import torch

from rondo.config import parse_config
from rondo.errors import ModelError
from rondo.launch.build_trainer import build_trainer
from rondo.observe.lane import Lane
from tests.models import tiny_model
from tests.trainers import gradient_after, micros_of, random_groups

GROUPS = random_groups(3)


@pytest.fixture
def windowed(tmp_path):
    """A Mistral that sees three tokens back; its folder."""
    tiny_model("Mistral", sliding_window=3).save_pretrained(tmp_path)
    return str(tmp_path)


def config_of(path, **trainer):
    return parse_config(
        {
            "model": {"path": path},
            "data": {"train": "unused.jsonl"},
            "rewards": {"functions": ["unused:unused"]},
            "algorithm": {"kl": {"coefficient": 0.1}},
            "trainer": trainer,
        }
    )


def own_gradient(model, reference, groups):
    for group in groups:
        for response, advantage in zip(group.answer.responses, group.advantages, strict=True):
            found = []
            for each in (model, reference):
                ids = torch.tensor([[*group.prompt.token_ids, *response.token_ids]])
                scores = each(input_ids=ids, use_cache=False).logits[0].log_softmax(-1)
                first = len(group.prompt.token_ids)
                found.append(scores[first - 1 : -1].gather(-1, ids[0, first:, None])[:, 0])
            x = found[1].detach() - found[0]
            loss = -(found[0] - found[0].detach()).exp() * advantage + 0.1 * (x.exp() - 1 - x)
            loss.mean().backward()
    return [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("attention", ["auto", "separate"])
def test_its_gradient_is_that_of_its_own_attention_and_the_warning_comes_once(windowed, attention):
    said: list[str] = []
    trainer = build_trainer(config_of(windowed, attention=attention), Lane(), on_fallback=said.append)
    micros = micros_of(GROUPS, 60)
    assert all(trainer._layout(micro.parts).rows for micro in micros)  # counted as what is computed
    found = gradient_after(trainer, micros)
    model, reference = (tiny_model("Mistral", sliding_window=3) for _ in range(2))
    for one, other in zip(found, own_gradient(model, reference, GROUPS), strict=True):
        assert (one - other).norm() <= 1e-4 * other.norm()
    unlimited = tiny_model("Mistral")
    wrong = own_gradient(unlimited, unlimited, GROUPS)
    assert not torch.allclose(found[0], wrong[0], rtol=1e-2)  # the window matters
    assert len(said) == (attention == "auto")
    assert all("prompts are NOT shared" in line and "sliding window of 3" in line for line in said)


def test_asking_for_shared_prompts_is_refused_with_a_sentence(windowed):
    with pytest.raises(
        ModelError, match=r'trainer\.attention = "shared-prompt".*sliding window of 3.*set it to "auto"'
    ):
        build_trainer(config_of(windowed, attention="shared-prompt"), Lane())
