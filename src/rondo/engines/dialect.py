"""The words of the HTTP dialect: what a completion call may say, and what is answered. Pure functions.

It is the subset of vLLM's `/v1/completions` that Rondo uses. A field that would change the samples and is not
served is refused, never ignored; other unknown fields are ignored, as OpenAI's clients send many.
"""

from __future__ import annotations

import json
import math
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rondo.engines.embedded import Request, Result, Sample
from rondo.errors import EngineError
from rondo.types import Sampling

_KINDS = {400: "BadRequestError", 401: "UnauthorizedError", 409: "ConflictError", 503: "ServiceUnavailableError"}

_MAX_SAMPLES = 4096
_MIN_TEMPERATURE = 1e-6  # below, logits / temperature overflows

# Fields that change what is sampled or answered, each with the values that change nothing.
_NOT_SERVED: Mapping[str, tuple[Any, ...]] = {
    "top_k": (-1, 0),
    "min_p": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "min_tokens": (0,),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "stop": ([], ""),
    "suffix": ("",),
    "stream": (False,),
    "echo": (False,),
    "use_beam_search": (False,),
    "prompt_logprobs": (0,),
    "prompt_embeds": (),
    "truncate_prompt_tokens": (),
    "structured_outputs": (),
    "response_format": (),
}


class Refusal(EngineError):  # noqa: N818  (an answer, not a failure)
    """A call that is not served: one sentence, and the HTTP status to send it with."""

    def __init__(self, message: str, *, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


class Tokenizer(Protocol):
    def encode(self, text: str) -> list[int]: ...
    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str: ...
    def convert_ids_to_tokens(self, ids: list[int]) -> list[str]: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Served:
    """What the engine serves."""

    model: str
    boot: str
    vocabulary: int
    max_model_len: int
    eos: frozenset[int]
    tokenizer: Callable[[], Tokenizer | None]  # loaded when first needed


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """A completion call, understood."""

    request: Request
    own_stops: frozenset[int]  # stop tokens that the call named
    logprobs: bool
    token_ids: bool
    text: bool
    prompt_logprobs: bool  # of the prompt's own tokens, at temperature 1


def parse_object(body: bytes) -> dict[str, Any]:
    try:
        tree = json.loads(body or b"{}")
    except (ValueError, RecursionError) as error:
        raise Refusal(f"the body is not JSON: {error}") from None
    if not isinstance(tree, dict):
        raise Refusal(f"the body must be a JSON object, not {type(tree).__name__}")
    return tree


def parse_call(body: bytes, served: Served) -> Call:
    tree = parse_object(body)
    n = integer(tree, "n", 1, low=1, high=_MAX_SAMPLES)
    for name, neutral in _NOT_SERVED.items():
        value = tree.get(name)
        if value is not None and value not in neutral:
            raise Refusal(f"{name} = {_short(value)} is not served by this engine: leave it out")
    if tree.get("best_of") not in (None, n):
        raise Refusal(f"best_of = {_short(tree['best_of'])} is not served by this engine: leave it out")
    prompt = _prompt(tree, served)
    max_tokens = integer(tree, "max_tokens", 16, low=1)
    if len(prompt) + max_tokens > served.max_model_len:
        raise Refusal(
            f"{len(prompt)} prompt tokens and max_tokens = {max_tokens} exceed the engine's max_model_len = "
            f"{served.max_model_len}"
        )
    temperature = _number(tree, "temperature", 1.0, low=0.0)
    if 0 < temperature < _MIN_TEMPERATURE:
        raise Refusal(f"temperature = {temperature} is too small: use 0 for the most probable token")
    top_p = _number(tree, "top_p", 1.0, low=0.0, high=1.0)
    if top_p == 0:
        raise Refusal("top_p = 0 leaves no token: it must be above 0")
    own_stops = _token_ids(tree.get("stop_token_ids") or [], "stop_token_ids", served.vocabulary)
    eos = frozenset() if _flag(tree, "ignore_eos", False) else served.eos
    token_ids = _flag(tree, "return_token_ids", False)
    seed = integer(tree, "seed", secrets.randbits(62), low=-(2**63), high=2**63 - 1)
    return Call(
        request=Request(
            prompt=prompt,
            n=n,
            seed=seed,
            sampling=Sampling(
                temperature=temperature,
                top_p=top_p,
                max_tokens=max_tokens,
                stop_token_ids=tuple(sorted(eos.union(own_stops))),
            ),
        ),
        own_stops=frozenset(own_stops) - eos,
        logprobs=integer(tree, "logprobs", -1, low=0) >= 0,
        token_ids=token_ids,
        text=_flag(tree, "detokenize", True) or not token_ids,
        prompt_logprobs=integer(tree, "prompt_logprobs", -1, low=0) == 0,
    )


def completion(
    call: Call, result: Result, served: Served, prompt_logps: Sequence[float] | None = None
) -> dict[str, Any]:
    """The answer to a call; `prompt_logps` where it asked for them, one for each prompt token but the first."""
    if not all(math.isfinite(sum(sample.logps)) for sample in result.samples):
        raise Refusal("a log-prob is not finite: the weights this engine holds are unusable", status=500)
    tokenizer = served.tokenizer() if call.text else None
    prompt_tokens = len(call.request.prompt)
    completion_tokens = sum(len(sample.token_ids) for sample in result.samples)
    return {
        "id": f"cmpl-{served.boot}-{result.ticket}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": served.model,
        "choices": [
            _choice(index, sample, call, tokenizer) | {"prompt_logprobs": _given(call, prompt_logps)}
            for index, sample in enumerate(result.samples)
        ],
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
        },
        "rondo": {
            "boot": served.boot,
            "version": list(result.version),
            "seconds": {"queued": result.queued_seconds, "running": result.running_seconds},
            "moments": list(result.moments),
        },
    }


def error_body(error: Exception, status: int) -> dict[str, Any]:
    kind = _KINDS.get(status, "ServerError") if isinstance(error, Refusal) else type(error).__name__
    return {"error": {"message": str(error), "type": kind, "code": status}}


def integer(tree: dict[str, Any], name: str, default: int, *, low: int, high: int | None = None) -> int:
    value = tree.get(name)
    if value is None:
        return default
    if type(value) is not int:
        raise Refusal(f"{name} = {_short(value)} must be an integer")
    if value < low or (high is not None and value > high):
        raise Refusal(f"{name} = {value} must be {low} or more" + ("" if high is None else f", at most {high}"))
    return value


def _choice(index: int, sample: Sample, call: Call, tokenizer: Tokenizer | None) -> dict[str, Any]:
    ids = sample.token_ids
    logprobs = None
    if call.logprobs:
        names = tokenizer.convert_ids_to_tokens(ids) if tokenizer else []
        logprobs = {"token_logprobs": sample.logps, "tokens": names}
    stopped_by = ids[-1] if sample.finish == "stop" and ids[-1] in call.own_stops else None
    return {
        "index": index,
        "text": tokenizer.decode(ids, skip_special_tokens=True) if tokenizer else "",
        "token_ids": ids if call.token_ids else None,
        "logprobs": logprobs,
        "finish_reason": sample.finish,
        "stop_reason": stopped_by,
    }


def _given(call: Call, prompt_logps: Sequence[float] | None) -> list[dict[str, Any] | None] | None:
    """As vLLM words it: per prompt token what was asked about it, and nothing for the first."""
    if prompt_logps is None:
        return None
    pairs = zip(call.request.prompt[1:], prompt_logps, strict=True)
    return [None, *({str(token): {"logprob": logp}} for token, logp in pairs)]


def _prompt(tree: dict[str, Any], served: Served) -> tuple[int, ...]:
    prompt = tree.get("prompt")
    if isinstance(prompt, str):
        tokenizer = served.tokenizer()
        if tokenizer is None:
            raise Refusal(f"{served.model} has no tokenizer: send the prompt as token ids")
        prompt = tokenizer.encode(prompt)
    if not prompt:
        raise Refusal("prompt is missing or empty: send a list of token ids or a string")
    return _token_ids(prompt, "prompt", served.vocabulary)


def _token_ids(value: Any, name: str, vocabulary: int) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(token) is int for token in value):
        raise Refusal(f"{name} = {_short(value)} must be a list of token ids, one prompt per call")
    if value and not (min(value) >= 0 and max(value) < vocabulary):
        wrong = next(token for token in value if not 0 <= token < vocabulary)
        raise Refusal(f"{name} holds token {wrong}, but the vocabulary has {vocabulary} tokens")
    return tuple(value)


def _number(tree: dict[str, Any], name: str, default: float, *, low: float, high: float = math.inf) -> float:
    value = tree.get(name)
    if value is None:
        return default
    if type(value) not in (int, float):
        raise Refusal(f"{name} = {_short(value)} must be a number")
    if not (low <= value <= high) or value > 1e30:  # NaN fails the first
        raise Refusal(f"{name} = {_short(value)} must lie between {low} and {min(high, 1e30)}")
    return float(value)


def _flag(tree: dict[str, Any], name: str, default: bool) -> bool:
    value = tree.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise Refusal(f"{name} = {_short(value)} must be true or false")
    return value


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
