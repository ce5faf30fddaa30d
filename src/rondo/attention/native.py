"""Separate rows through the model's own attention: for models that packed rows would compute wrongly.

Rows are padded on the right to the longest; a causal model never sees what follows.
"""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from rondo.attention.layout import Layout


def native_hidden_states(model: PreTrainedModel, layout: Layout) -> torch.Tensor:
    """The last layer's states [N, C] at the positions that predict a response token, one row per response."""
    rows = [
        torch.cat(
            [
                layout.tokens_T[span.prompt : span.prompt + span.prompt_length],
                layout.tokens_T[span.start : span.start + span.length],
            ]
        )
        for span in layout.spans
    ]
    # No padding mask: causality hides what follows, and padding that sees nothing at all would become NaN.
    ids_MP = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    states = model.base_model(input_ids=ids_MP, use_cache=False).last_hidden_state
    return torch.cat(
        [
            states[row, span.prompt_length - 1 : span.prompt_length + span.length - 1]
            for row, span in enumerate(layout.spans)
        ]
    )
