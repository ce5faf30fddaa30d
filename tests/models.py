"""Tiny random models of the architectures that Rondo is tested with."""

from __future__ import annotations

import torch
import transformers
from transformers import PreTrainedModel

VOCABULARY = 32

ARCHITECTURES = ("Qwen2", "Llama", "Qwen3", "Mistral", "GPTNeoX", "Gemma")


def tiny_model(
    architecture: str = "Qwen2",
    *,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    sliding_window: int | None = None,
) -> PreTrainedModel:
    options = {"num_key_value_heads": 2, "head_dim": 8}
    if architecture == "GPTNeoX":
        options = {}
    if architecture == "Mistral":
        options["sliding_window"] = sliding_window  # type: ignore[assignment]
    config = getattr(transformers, f"{architecture}Config")(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=128,
        bos_token_id=1,
        eos_token_id=0,
        pad_token_id=0,
        tie_word_embeddings=architecture in ("Qwen2", "Gemma"),
        **options,
    )
    torch.manual_seed(seed)
    model = getattr(transformers, f"{architecture}ForCausalLM")(config)
    with torch.no_grad():  # small random weights would hide a wrong mask behind near-uniform outputs
        for parameter in model.parameters():
            parameter.mul_(3 if parameter.dim() > 1 else 1)
    return model.to(dtype).eval()
