"""A Qwen2 with random weights, on disk with a tokenizer of single characters: what the benches with engines serve."""

from __future__ import annotations

import string
from pathlib import Path

import torch
import transformers

SIZES = {  # hidden, intermediate, layers, heads, key-value heads
    "tiny": (64, 128, 2, 2, 1),
    "0.5B": (896, 4864, 24, 14, 2),
    "1.5B": (1536, 8960, 28, 12, 2),
}
CHARACTERS = string.ascii_letters + string.digits


def save_qwen2(folder: Path, size: str, *, vocabulary: int, device: torch.device) -> transformers.PreTrainedModel:
    """In bfloat16; token 0 ends a sequence, CHARACTERS follow."""
    hidden, intermediate, layers, heads, kv_heads = SIZES[size]
    config = transformers.Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        eos_token_id=0,
        bos_token_id=None,
    )
    torch.manual_seed(0)
    with device:
        model = transformers.Qwen2ForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(folder)
    tokens = {character: number for number, character in enumerate(["<eos>", *CHARACTERS])}
    transformers.Qwen2Tokenizer(
        vocab=tokens, merges=[], unk_token=None, bos_token=None, eos_token="<eos>", pad_token="<eos>"
    ).save_pretrained(folder)
    return model
