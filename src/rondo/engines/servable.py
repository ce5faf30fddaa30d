"""Loading a model, running it through the slots' attention, and refusing what that cannot serve."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from rondo.engines.keyvalues import ATTENTION, Decode, KeyValues, Prefill, PromptState
from rondo.errors import ModelError

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.3, torch.float16: 0.1}
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_PROBE = 8  # tokens


def load_model(path: str, *, dtype: str, device: str) -> PreTrainedModel:
    if dtype not in _DTYPES:
        raise ModelError(f"dtype {dtype} is not one of {', '.join(_DTYPES)}")
    looks_local = path.startswith((".", "/", "~")) or Path(path).exists()
    if looks_local and not (Path(path) / "config.json").is_file():
        raise ModelError(
            f"no model at {path}: there is no config.json; give a folder in Hugging Face format or a hub name"
        )
    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(path, dtype=_DTYPES[dtype])
    except (OSError, ValueError) as error:
        raise ModelError(f"the model {path} cannot be loaded: {_first_line(error)}") from error
    return model.to(device).eval().requires_grad_(False)


def run_prompts(
    model: PreTrainedModel, prompts: Sequence[Sequence[int]], max_length: int, device: torch.device
) -> list[PromptState]:
    """One pass over several prompts, right-padded: a causal row never sees what follows it."""
    lengths = [len(prompt) for prompt in prompts]
    longest = max(lengths)
    ids_BP = torch.tensor([[*prompt, *[0] * (longest - len(prompt))] for prompt in prompts], device=device)
    last = sorted(set(lengths))
    batch = Prefill(max_length=max_length)
    logits_BUV = model(
        input_ids=ids_BP,
        position_ids=torch.arange(longest, device=device).expand(len(prompts), -1),
        use_cache=False,
        logits_to_keep=torch.tensor(last, device=device) - 1,
        rondo_batch=batch,
    ).logits
    if not batch.layers or set(batch.layers) != set(range(len(batch.layers))):
        raise ModelError("has layers without an attention that transformers can replace")
    layers = [batch.layers[index] for index in range(len(batch.layers))]
    return [
        PromptState(
            layers=tuple((keys[row, :, :length], values[row, :, :length]) for keys, values in layers),
            logits=logits_BUV[row, last.index(length)],
        )
        for row, length in enumerate(lengths)
    ]


def score_prompt(model: PreTrainedModel, prompt: Sequence[int], max_length: int, device: torch.device) -> list[float]:
    """One pass over one prompt: the log-prob of each of its tokens but the first."""
    ids_1P = torch.tensor([list(prompt)], device=device)
    positions_1P = torch.arange(len(prompt), device=device).unsqueeze(0)
    batch = Prefill(max_length=max_length)
    logits_PV = model(input_ids=ids_1P, position_ids=positions_1P, use_cache=False, rondo_batch=batch).logits[0]
    logps_PV = logits_PV[:-1].float().log_softmax(-1)
    logps: list[float] = logps_PV.gather(-1, ids_1P[0, 1:, None]).squeeze(-1).tolist()
    return logps


def run_tokens(model: PreTrainedModel, ids_R: torch.Tensor, positions_R: torch.Tensor, batch: Decode) -> torch.Tensor:
    """One pass over the newest token of R slots: logits [R, V]."""
    logits: torch.Tensor = model(
        input_ids=ids_R.unsqueeze(-1),
        position_ids=positions_R.unsqueeze(-1),
        use_cache=False,
        rondo_batch=batch,
    ).logits
    return logits[:, -1]


def longest_sequence(model: PreTrainedModel) -> int:
    """Tokens of context that the model was made for."""
    return getattr(model.config.get_text_config(), "max_position_embeddings", None) or sys.maxsize


@torch.inference_mode()
def make_servable(model: PreTrainedModel, max_length: int, *, batch_invariant: bool) -> PromptState:
    """Put the model on the slots' attention, after comparing it with the model's own on a few tokens.

    The comparison finds whatever would be silently ignored: recurrent layers, biases, odd positions.
    Returns a prompt's state, as an example of the shapes to hold.
    """
    name = type(model).__name__
    device = next(model.parameters()).device
    _refuse_what_cannot_be(model, name, max_length, batch_invariant)
    count = min(_PROBE, max_length)
    ids = [1 + index % (model.config.get_text_config().vocab_size - 1) for index in range(count)]
    try:
        model.set_attn_implementation("eager")
        expected = model(input_ids=torch.tensor([ids], device=device), use_cache=False).logits[0]
        model.set_attn_implementation(ATTENTION)
        state = run_prompts(model, [ids[: count // 2 or 1]], max_length, device)[0]
        got = _decode_rest(model, state, ids)
    except Exception as error:  # models fail in as many ways as there are models
        raise ModelError(f"the embedded engine cannot serve {name}: it {_first_line(error)}") from error
    difference = (got.log_softmax(-1) - expected[-len(got) :].float().log_softmax(-1)).abs().max().item()
    if not difference <= _TOLERANCE[model.dtype]:
        raise ModelError(
            f"the embedded engine cannot serve {name}: it computes log-probs that differ by {difference:.2g} "
            "from those of the model's own attention"
        )
    return state


def _refuse_what_cannot_be(model: PreTrainedModel, name: str, max_length: int, batch_invariant: bool) -> None:
    config = model.config.get_text_config()
    if max_length > longest_sequence(model):
        raise ModelError(
            f"max_model_len = {max_length} exceeds the {longest_sequence(model)} positions that {name} has"
        )
    experts = max(getattr(config, key, None) or 0 for key in _EXPERTS)
    if batch_invariant and experts > 1:
        raise ModelError(
            f"{name} cannot be served with batch_invariant: how many rows meet in one of its {experts} experts "
            "depends on the batch"
        )


def _decode_rest(model: PreTrainedModel, state: PromptState, ids: list[int]) -> torch.Tensor:
    """Logits [T, V] at the last prompt token and at every later one, decoded one at a time."""
    held = state.layers[0][0].shape[1]
    cache = KeyValues(like=state, slots=1, length=len(ids))
    cache.fill([0], state)
    logits = [state.logits]
    for position in range(held, len(ids)):
        positions_R = state.logits.new_tensor([position], dtype=torch.int64)
        batch = Decode(cache, positions_R, len(ids), state.layers[0][0].dtype)
        token = torch.tensor([ids[position]], device=positions_R.device)
        logits.append(run_tokens(model, token, positions_R, batch)[0])
    return torch.stack(logits).float()


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0] or type(error).__name__
