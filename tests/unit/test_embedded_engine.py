"""The embedded engine, on tiny random models."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import pytest
import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GemmaConfig,
    GemmaForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from rondo.engines.embedded import EmbeddedEngine, Request, Result, Sample
from rondo.errors import ModelError
from rondo.types import Sampling

VOCABULARY = 97
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,  # far from uniform: a wrong key shows
    "eos_token_id": None,
    "bos_token_id": None,
}
SHARED_HEADS = {**SIZES, "num_key_value_heads": 2}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def qwen2() -> PreTrainedModel:
    torch.manual_seed(0)
    return Qwen2ForCausalLM(Qwen2Config(**SHARED_HEADS, tie_word_embeddings=False)).eval()


def architectures() -> dict[str, PreTrainedModel]:
    torch.manual_seed(1)
    return {
        "qwen2": Qwen2ForCausalLM(Qwen2Config(**SHARED_HEADS, tie_word_embeddings=True)),
        "llama": LlamaForCausalLM(LlamaConfig(**SHARED_HEADS, tie_word_embeddings=False)),
        "qwen3": Qwen3ForCausalLM(Qwen3Config(**SHARED_HEADS, head_dim=16, tie_word_embeddings=False)),
        "gpt_neox": GPTNeoXForCausalLM(GPTNeoXConfig(**SIZES)),
        "gemma": GemmaForCausalLM(GemmaConfig(**SIZES, num_key_value_heads=1, head_dim=16)),
        "mistral": MistralForCausalLM(MistralConfig(**SHARED_HEADS, sliding_window=None)),
        "gpt2": GPT2LMHeadModel(
            GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=128,
                       initializer_range=0.2, eos_token_id=None, bos_token_id=None)
        ),
    }  # fmt: skip


def request(
    *prompt: int, n: int = 1, seed: int = 0, max_tokens: int = 12, temperature: float = 1.0,
    top_p: float = 1.0, stop: tuple[int, ...] = (),
) -> Request:  # fmt: skip
    sampling = Sampling(temperature=temperature, top_p=top_p, max_tokens=max_tokens, stop_token_ids=stop)
    return Request(prompt=prompt, n=n, seed=seed, sampling=sampling)


def some_requests(count: int, seed: int) -> list[Request]:
    chance = random.Random(seed)
    return [
        request(
            *[chance.randrange(VOCABULARY) for _ in range(chance.randint(1, 20))],
            n=chance.randint(1, 5),
            seed=chance.randrange(2**62),
            max_tokens=chance.randint(1, 20),
            temperature=chance.choice([0.7, 1.0]),
            stop=(3, 5) if chance.random() < 0.5 else (),
        )
        for _ in range(count)
    ]


def run(engine: EmbeddedEngine, requests: Sequence[Request]) -> list[Result]:
    """All results, in the order of the requests."""
    tickets = [engine.submit(each) for each in requests]
    results: dict[int, Result] = {}
    while not engine.idle:
        results.update({result.ticket: result for result in engine.step()})
    return [results[ticket] for ticket in tickets]


def own_logps(model: PreTrainedModel, asked: Request, sample: Sample) -> torch.Tensor:
    """What the model's own forward gives for a response."""
    model.set_attn_implementation("eager")
    with torch.no_grad():
        logits = model(torch.tensor([[*asked.prompt, *sample.token_ids]]), use_cache=False).logits[0]
    logps = (logits / asked.sampling.temperature).log_softmax(-1)[len(asked.prompt) - 1 : -1]
    return logps.gather(-1, torch.tensor(sample.token_ids).unsqueeze(-1)).squeeze(-1)


@pytest.mark.parametrize("name", architectures())
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_logps_equal_those_of_the_models_own_forward(name: str, batch_invariant: bool) -> None:
    model = architectures()[name].eval()
    engine = EmbeddedEngine(model, slots=5, max_model_len=64, batch_invariant=batch_invariant)
    requests = some_requests(6, seed=2)
    for asked, result in zip(requests, run(engine, requests), strict=True):
        for sample in result.samples:
            expected = own_logps(model, asked, sample)
            torch.testing.assert_close(torch.tensor(sample.logps), expected, atol=1e-5, rtol=0)


def test_a_group_equals_single_requests_with_seeds_that_follow() -> None:
    engine = EmbeddedEngine(qwen2(), slots=4, max_model_len=64)
    (group,) = run(engine, [request(1, 2, 3, n=6, seed=2**62 - 3)])
    singles = run(engine, [request(1, 2, 3, seed=2**62 - 3 + i) for i in range(6)])
    assert [s.token_ids for s in group.samples] == [single.samples[0].token_ids for single in singles]
    assert len({tuple(s.token_ids) for s in group.samples}) > 1


def test_batch_invariant_bits_do_not_depend_on_mates_or_slot() -> None:
    engine = EmbeddedEngine(qwen2(), slots=7, max_model_len=48, batch_invariant=True)
    asked = request(*range(9), n=3, seed=11, max_tokens=20, temperature=0.8)
    (alone,) = run(engine, [asked])
    for seed in range(6):
        others = some_requests(5, seed)
        place = seed % 6
        among = run(engine, [*others[:place], asked, *others[place:]])[place]
        assert among.samples == alone.samples  # tokens and log-probs, bit for bit


def test_without_batch_invariance_tokens_agree_and_logps_nearly() -> None:
    engine = EmbeddedEngine(qwen2(), slots=7, max_model_len=48)
    asked = request(*range(9), n=3, seed=11, max_tokens=20)
    (alone,) = run(engine, [asked])
    for seed in range(4):
        among = run(engine, [*some_requests(5, seed), asked])[-1]
        for one, other in zip(alone.samples, among.samples, strict=True):
            assert one.token_ids == other.token_ids
            assert one.logps == pytest.approx(other.logps, abs=1e-4)


def test_slot_count_changes_no_sample() -> None:
    model = qwen2()
    requests = some_requests(8, seed=4)
    tokens = [
        [[s.token_ids for s in result.samples] for result in run(engine, requests)]
        for engine in (EmbeddedEngine(model, slots=slots, max_model_len=64) for slots in (1, 3, 64))
    ]
    assert tokens[0] == tokens[1] == tokens[2]


def test_buffers_grow_past_their_first_length_without_a_trace() -> None:
    sizes = {**SHARED_HEADS, "max_position_embeddings": 1024}
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(**sizes)).eval()
    engine = EmbeddedEngine(model, slots=2, max_model_len=600)
    asked = [request(*[i % 90 for i in range(250)], max_tokens=30), request(4, 5, max_tokens=300)]
    for each, result in zip(asked, run(engine, asked), strict=True):
        expected = own_logps(model, each, result.samples[0])
        torch.testing.assert_close(torch.tensor(result.samples[0].logps), expected, atol=1e-4, rtol=0)


def test_a_response_ends_at_max_tokens_or_with_its_stop_token() -> None:
    engine = EmbeddedEngine(qwen2(), slots=8, max_model_len=64)
    (free,) = run(engine, [request(1, 2, n=8, max_tokens=10)])
    assert all(len(s.token_ids) == 10 and s.finish == "length" for s in free.samples)
    first = free.samples[0].token_ids
    (stopped,) = run(engine, [request(1, 2, n=8, max_tokens=10, stop=(96, first[4]))])
    cut = stopped.samples[0]
    assert cut.token_ids == first[: first.index(first[4]) + 1]
    assert cut.finish == "stop"
    assert len(cut.logps) == len(cut.token_ids)


def test_a_stop_token_as_the_last_one_allowed_counts_as_a_stop() -> None:
    engine = EmbeddedEngine(qwen2(), slots=1, max_model_len=64)
    (free,) = run(engine, [request(1, 2, max_tokens=1)])
    (stopped,) = run(engine, [request(1, 2, max_tokens=1, stop=tuple(free.samples[0].token_ids))])
    assert free.samples[0].finish == "length"
    assert stopped.samples[0].finish == "stop"


def test_stop_tokens_of_an_earlier_sample_in_the_slot_are_forgotten() -> None:
    engine = EmbeddedEngine(qwen2(), slots=1, max_model_len=64)
    asked = request(1, 2, max_tokens=10)
    (before,) = run(engine, [asked])
    run(engine, [request(7, max_tokens=3, stop=tuple(range(90)))])
    (after,) = run(engine, [asked])
    assert before.samples == after.samples


def test_a_sequence_may_fill_the_whole_context() -> None:
    engine = EmbeddedEngine(qwen2(), slots=2, max_model_len=40)
    (result,) = run(engine, [request(*range(30), max_tokens=10)])
    assert len(result.samples[0].token_ids) == 10


def test_requests_begin_in_order_of_arrival() -> None:
    engine = EmbeddedEngine(qwen2(), slots=2, max_model_len=64)
    for seed in range(4):
        engine.submit(request(1, 2, n=2, seed=seed, max_tokens=4))
    finished = []
    while not engine.idle:
        finished += [result.ticket for result in engine.step()]
    assert finished == [0, 1, 2, 3]


def test_an_aborted_request_frees_its_slots_for_the_next_step() -> None:
    engine = EmbeddedEngine(qwen2(), slots=3, max_model_len=64)
    kept = request(5, 6, n=1, seed=1, max_tokens=20)
    (undisturbed,) = run(engine, [kept])
    gone = engine.submit(request(1, 2, n=9, max_tokens=50))
    engine.step()
    waits = engine.submit(kept)
    engine.step()
    assert (engine.running, engine.waiting) == (1, 1)
    engine.abort(gone)
    assert engine.slots.free == 3
    engine.step()
    assert (engine.running, engine.waiting, engine.slots.running) == (1, 0, 1)
    results = []
    while not engine.idle:
        results += engine.step()
    assert [result.ticket for result in results] == [waits]
    assert results[0].samples[0].token_ids == undisturbed.samples[0].token_ids


def test_a_paused_engine_finishes_what_has_begun_and_begins_nothing() -> None:
    engine = EmbeddedEngine(qwen2(), slots=2, max_model_len=64)
    begun = engine.submit(request(1, 2, n=5, max_tokens=4))
    engine.step()
    engine.paused = True
    later = engine.submit(request(3, max_tokens=4))
    finished = []
    while not engine.idle:
        finished += engine.step()
    assert [result.ticket for result in finished] == [begun]
    assert engine.waiting == 1
    engine.paused = False
    while not engine.idle:
        finished += engine.step()
    assert [result.ticket for result in finished] == [begun, later]


def test_aborting_what_runs_returns_what_was_drawn() -> None:
    engine = EmbeddedEngine(qwen2(), slots=2, max_model_len=64)
    engine.submit(request(1, 2, n=3, max_tokens=30))
    for _ in range(4):
        engine.step()
    (result,) = engine.abort_running()
    assert [len(sample.token_ids) for sample in result.samples] == [5, 5, 0]
    assert {sample.finish for sample in result.samples} == {"abort"}
    assert engine.idle
    assert engine.slots.free == 2


def test_nan_weights_leave_no_trace_after_good_ones_return() -> None:
    model = qwen2()
    engine = EmbeddedEngine(model, slots=2, max_model_len=64)
    good = {name: parameter.clone() for name, parameter in model.named_parameters()}
    (before,) = run(engine, [request(1, 2, n=2)])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
    run(engine, [request(*range(20), n=2, max_tokens=30)])
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(good[name])
    engine.weights_changed(1)
    (after,) = run(engine, [request(1, 2, n=2)])
    assert after.samples == before.samples
    assert after.version == (1, 1)


def refused() -> dict[str, tuple[PreTrainedModel, str]]:
    torch.manual_seed(0)
    window = {**SHARED_HEADS, "sliding_window": 16}
    mamba = MambaConfig(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2)
    return {
        "softcap": (Gemma2ForCausalLM(Gemma2Config(**SHARED_HEADS, head_dim=16, pad_token_id=0)), "softcap"),
        "window": (MistralForCausalLM(MistralConfig(**window)), "sliding window of 16"),
        "recurrent": (MambaForCausalLM(mamba), "layers without an attention"),
    }


@pytest.mark.parametrize("name", refused())
def test_a_model_that_cannot_be_served_is_refused_with_the_reason(name: str) -> None:
    model, reason = refused()[name]
    with pytest.raises(ModelError, match=reason):
        EmbeddedEngine(model.eval(), slots=2, max_model_len=64)


def test_a_sliding_window_wider_than_the_context_is_served() -> None:
    model = MistralForCausalLM(MistralConfig(**{**SHARED_HEADS, "sliding_window": 64})).eval()
    run(EmbeddedEngine(model, slots=2, max_model_len=64), [request(1)])


def test_experts_are_refused_only_with_batch_invariance() -> None:
    model = MixtralForCausalLM(MixtralConfig(**SHARED_HEADS, num_local_experts=4)).eval()
    run(EmbeddedEngine(model, slots=2, max_model_len=64), [request(1)])
    with pytest.raises(ModelError, match="batch_invariant"):
        EmbeddedEngine(model, slots=2, max_model_len=64, batch_invariant=True)


def test_a_context_longer_than_the_models_positions_is_refused() -> None:
    with pytest.raises(ModelError, match="max_model_len = 500 exceeds the 128"):
        EmbeddedEngine(qwen2(), max_model_len=500)
