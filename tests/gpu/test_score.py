"""Log-probs on an accelerator, by the attention paths that a tiny model can take, against the CPU's float64."""

from __future__ import annotations

import pytest
import torch

from rondo.attention.hf import SPLIT, VARLEN, adopt
from rondo.trainer.score import score
from tests.models import tiny_model
from tests.trainers import random_groups

pytestmark = pytest.mark.gpu

if not torch.accelerator.is_available():
    pytest.skip("needs an accelerator", allow_module_level=True)


@pytest.mark.parametrize(
    ("path", "dtype", "tolerance"),
    [
        (SPLIT, torch.float32, 1e-4),
        (VARLEN, torch.bfloat16, 0.2),
        (SPLIT, torch.bfloat16, 0.2),
    ],
)
def test_scores_on_the_device_are_those_of_the_cpu(path, dtype, tolerance):
    device = torch.accelerator.current_accelerator()
    groups = [
        (group.prompt.token_ids, [response.token_ids for response in group.answer.responses])
        for group in random_groups(4)
    ]
    # The tiny model's heads have 8 dimensions: enough for the flash kernels, too few for FlexAttention.
    truth = score(tiny_model(dtype=dtype).double(), groups)
    model = tiny_model(dtype=dtype).to(device)
    adopt(model, path)
    found = score(model, groups)
    for one, other in zip(truth, found, strict=True):
        for expected, logps in zip(one, other, strict=True):
            assert (logps.double().cpu() - expected).abs().max() < tolerance
