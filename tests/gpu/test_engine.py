"""The embedded engine on an accelerator: its log-probs are those of the model's own forward."""

from __future__ import annotations

import pytest
import torch

from rondo.engines.embedded import EmbeddedEngine, Request
from rondo.types import Sampling
from tests.models import VOCABULARY, tiny_model

pytestmark = pytest.mark.gpu

if not torch.accelerator.is_available():
    pytest.skip("needs an accelerator", allow_module_level=True)


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-3), (torch.bfloat16, 0.15)])
def test_an_engines_log_probs_are_the_models_own(batch_invariant, dtype, tolerance):
    device = torch.accelerator.current_accelerator()
    model = tiny_model(dtype=dtype).to(device)
    engine = EmbeddedEngine(model, slots=6, max_model_len=64, batch_invariant=batch_invariant)
    sampling = Sampling(temperature=1.0, max_tokens=12, stop_token_ids=(0,))
    prompts = [(1, 2, 3), (4,), tuple(range(1, 20))]
    tickets = {
        engine.submit(Request(prompt=prompt, n=5, seed=number, sampling=sampling)): prompt
        for number, prompt in enumerate(prompts)
    }
    results = []
    while not engine.idle:
        results += engine.step()
    assert len(results) == len(prompts)
    own = tiny_model(dtype=dtype).to(device)
    for result in results:
        prompt = tickets[result.ticket]
        for sample in result.samples:
            assert all(0 <= token < VOCABULARY for token in sample.token_ids)
            ids = torch.tensor([[*prompt, *sample.token_ids]], device=device)
            with torch.no_grad():
                scores = own(input_ids=ids, use_cache=False).logits[0].float().log_softmax(-1)
            expected = scores[len(prompt) - 1 : -1].gather(-1, ids[0, len(prompt) :, None])[:, 0]
            found = torch.tensor(sample.logps, device=device)
            assert (found - expected).abs().max() < tolerance
