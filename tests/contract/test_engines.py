"""What Rondo asks of an engine: the same assertions for the embedded one and for a real vLLM."""

from __future__ import annotations

import asyncio
import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

from rondo.engines.client import HttpEngine
from rondo.errors import EngineError
from rondo.types import Answer, Confirmation, Response, Sampling
from rondo.weights.checksum import checksum
from tests.contract.conftest import Subject

EOS = 1
PROMPT = [5, 9, 12, 4, 7]
LONG = [3 + (place * place) % 29 for place in range(300)]  # longer than vLLM's block of keys on CPU
GAP = 2e-5  # float32, between an engine and transformers
SAMPLING = Sampling(temperature=0.7, max_tokens=12, stop_token_ids=(EOS,))


def logps_of(model: PreTrainedModel, prompt: list[int], response: Response, temperature: float) -> list[float]:
    ids = torch.tensor([[*prompt, *response.token_ids]])
    with torch.no_grad():
        logits = model(ids).logits[0, len(prompt) - 1 : -1] / temperature
    return logits.log_softmax(-1).gather(-1, ids[0, len(prompt) :, None]).squeeze(-1).tolist()


def widest(ours: list[float], theirs: list[float]) -> float:
    return max(abs(one - other) for one, other in zip(ours, theirs, strict=True))


def assert_from(model: PreTrainedModel, prompt: list[int], answer: Answer, temperature: float = 0.7) -> None:
    for response in answer.responses:
        assert widest(list(response.logps), logps_of(model, prompt, response, temperature)) < GAP


async def ask(engine: HttpEngine, *, prompt: list[int] = PROMPT, n: int = 4, seed: int = 2**61 + 17) -> Answer:
    return await engine.generate(prompt, n=n, seed=seed, sampling=SAMPLING)


def moved(model: PreTrainedModel, seed: int) -> PreTrainedModel:
    """The model after an update that is much larger than a real one."""
    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return other


def bucket(path: Path, names: list[str], tensors: dict[str, torch.Tensor], version: int) -> dict[str, Any]:
    save_file({name: tensors[name] for name in names}, path)
    return {"version": version, "transport": "files", "path": str(path), "tensors": names}


async def publish(subject: Subject, engine: HttpEngine, model: PreTrainedModel, *, lie: bool = False) -> Confirmation:
    """As the publisher does, in two updates that part a layer in its middle."""
    subject.version += 1
    tensors = {name: parameter.detach() for name, parameter in model.named_parameters()}
    announced = "0123456789abcdef" if lie else checksum(tensors.items())
    names = list(tensors)
    middle = next(place for place, name in enumerate(names) if "layers.1.self_attn.k_proj" in name)
    await engine.pause()
    await engine.start_update()
    for number, part in enumerate((names[:middle], names[middle:])):
        await engine.update(bucket(subject.folder / f"{subject.version}-{number}", part, tensors, subject.version))
    await engine.update({"version": subject.version, "checksum": announced})
    confirmation = await engine.finish_update()
    await engine.reset_prefix_cache()
    await engine.resume()
    return confirmation


@pytest.fixture
def fresh(subject: Subject) -> Subject:
    """With the weights that it was started with, published."""
    subject.drive(lambda engine: publish(subject, engine, subject.model))
    return subject


def test_log_probs_are_those_of_the_distribution_that_is_sampled(fresh):
    answer = fresh.drive(ask)
    assert len(answer.responses) == 4
    assert_from(fresh.model, PROMPT, answer)
    hot = replace(SAMPLING, temperature=1.9)
    answer = fresh.drive(lambda engine: engine.generate(PROMPT, n=2, seed=1, sampling=hot))
    assert_from(fresh.model, PROMPT, answer, 1.9)


def test_the_same_seed_gives_the_same_samples_in_one_request_or_in_many(fresh):
    seed = 2**62 - 9

    async def scenario(engine: HttpEngine) -> list[list[tuple[int, ...]]]:
        together = await ask(engine, seed=seed)
        again = await ask(engine, seed=seed)
        alone = [await ask(engine, n=1, seed=seed + index) for index in range(4)]
        other = await ask(engine, seed=seed + 1000)
        return [
            [response.token_ids for answer in answers for response in answer.responses]
            for answers in ([together], [again], alone, [other])
        ]

    together, again, alone, other = fresh.drive(scenario)
    assert together == again == alone
    assert together != other
    assert len(set(together)) > 1


def test_an_answer_is_what_the_completions_of_the_open_api_give(fresh):
    """vLLM is asked by a way of our own, which must not differ from its own."""
    body = {"prompt": LONG, "n": 4, "seed": 2**61 + 17, "temperature": 0.7, "max_tokens": 12, "logprobs": 0}
    body |= {"stop_token_ids": [EOS], "return_token_ids": True, "return_tokens_as_token_ids": True}

    async def both(engine: HttpEngine) -> tuple[Answer, dict[str, Any]]:
        ours = await ask(engine, prompt=LONG)
        async with aiohttp.ClientSession() as session, session.post(f"{engine.url}/v1/completions", json=body) as reply:
            return ours, await reply.json()

    ours, theirs = fresh.drive(both)
    for response, choice in zip(ours.responses, theirs["choices"], strict=True):
        assert list(response.token_ids) == choice["token_ids"]
        assert widest(list(response.logps), choice["logprobs"]["token_logprobs"]) < GAP
        assert response.stopped == (choice["finish_reason"] == "stop")


def test_the_stop_token_is_part_of_the_response_and_a_cut_one_is_marked(fresh):
    any_token = replace(SAMPLING, stop_token_ids=tuple(range(32)))
    answer = fresh.drive(lambda engine: engine.generate(PROMPT, n=4, seed=3, sampling=any_token))
    assert all(len(response.token_ids) == len(response.logps) == 1 for response in answer.responses)
    assert all(response.stopped for response in answer.responses)
    endless = replace(SAMPLING, stop_token_ids=(), ignore_eos=True, max_tokens=40)
    answer = fresh.drive(lambda engine: engine.generate(PROMPT, n=4, seed=3, sampling=endless))
    assert [len(response.token_ids) for response in answer.responses] == [40] * 4
    assert not any(response.stopped for response in answer.responses)
    mixed = fresh.drive(lambda engine: ask(engine, n=16)).responses
    assert all(response.stopped == (response.token_ids[-1] == EOS) for response in mixed)
    assert_from(fresh.model, PROMPT, answer)


def test_answers_carry_the_boot_and_the_version(fresh):
    async def scenario(engine: HttpEngine):
        return await engine.state(), await ask(engine)

    state, answer = fresh.drive(scenario)
    assert answer.boot == state.boot != ""
    assert answer.version == (fresh.version, fresh.version) == (state.version, state.version)
    assert (state.slots, state.max_model_len) == (16, 512)
    assert state.shape["vocab_size"] == 32


def test_a_prompts_own_log_probs_come_in_one_call_at_temperature_one(fresh):
    first, *rest = LONG[:40]
    logps = fresh.drive(lambda engine: engine.prompt_logps(LONG[:40]))
    given = Response(token_ids=tuple(rest), logps=(), stopped=True)
    assert widest(logps, logps_of(fresh.model, [first], given, 1.0)) < GAP


def test_a_pause_lets_running_requests_end_and_new_ones_wait(fresh):
    endless = replace(SAMPLING, stop_token_ids=(), ignore_eos=True, max_tokens=200)

    async def scenario(engine: HttpEngine) -> None:
        await engine.state()  # the client knows whom it talks to
        running = asyncio.create_task(engine.generate(PROMPT, n=8, seed=1, sampling=endless))
        await asyncio.sleep(0.15)
        assert not running.done()
        await engine.pause()
        assert len((await asyncio.wait_for(running, 10)).responses[0].token_ids) == 200
        waiting = asyncio.create_task(ask(engine))
        await asyncio.sleep(1.0)
        assert not waiting.done()
        await engine.resume()
        assert len((await asyncio.wait_for(waiting, 30)).responses) == 4

    fresh.drive(scenario)


def test_weights_change_only_in_a_pause(fresh):
    with pytest.raises(EngineError, match="paused"):
        fresh.drive(lambda engine: engine.start_update())
    fresh.drive(ask)


def test_an_update_moves_the_log_probs_to_the_new_models(any_subject):
    """Of a prompt, of samples, and of samples after a long prompt whose keys were cached under the old weights."""
    subject = any_subject
    new = moved(subject.model, seed=1)
    given = Response(token_ids=tuple(LONG[1:40]), logps=(), stopped=True)
    old_logps, new_logps = (logps_of(model, LONG[:1], given, 1.0) for model in (subject.model, new))
    assert widest(old_logps, new_logps) > 100 * GAP

    async def scenario(engine: HttpEngine) -> None:
        await publish(subject, engine, subject.model)
        assert widest(await engine.prompt_logps(LONG[:40]), old_logps) < GAP
        for _ in range(2):
            assert_from(subject.model, LONG, await ask(engine, prompt=LONG))
        confirmation = await publish(subject, engine, new)
        assert confirmation.version == subject.version
        assert confirmation.boot == (await engine.state()).boot
        assert confirmation.checksum == checksum(new.named_parameters())
        assert widest(await engine.prompt_logps(LONG[:40]), new_logps) < GAP
        assert_from(new, LONG, await ask(engine, prompt=LONG))
        assert_from(new, PROMPT, await ask(engine))
        await publish(subject, engine, subject.model)
        assert widest(await engine.prompt_logps(LONG[:40]), old_logps) < GAP

    subject.drive(scenario)


def test_weights_that_are_not_the_announced_ones_leave_an_engine_that_answers_nothing_until_good_ones_come(fresh):
    async def scenario(engine: HttpEngine) -> None:
        with pytest.raises(EngineError, match=r"checksum .* was announced"):
            await publish(fresh, engine, moved(fresh.model, seed=2), lie=True)
        assert (await engine.state()).version == -2
        with pytest.raises(EngineError, match="until a good one is finished"):
            await ask(engine)
        with pytest.raises(EngineError, match="good one"):
            await engine.resume()
        await publish(fresh, engine, fresh.model)
        assert_from(fresh.model, PROMPT, await ask(engine))

    fresh.drive(scenario)


def test_a_file_that_is_not_there_changes_nothing(fresh):
    async def scenario(engine: HttpEngine) -> None:
        await engine.pause()
        await engine.start_update()
        with pytest.raises(EngineError, match="cannot be read from /nowhere"):
            await engine.update({"version": 9, "checksum": "0", "transport": "files", "path": "/nowhere"})
        assert (await engine.state()).version == fresh.version
        await publish(fresh, engine, fresh.model)
        assert_from(fresh.model, PROMPT, await ask(engine))

    fresh.drive(scenario)


def test_an_update_without_some_tensors_is_refused_by_name(fresh):
    async def scenario(engine: HttpEngine) -> None:
        part = {"model.norm.weight": fresh.model.model.norm.weight.detach()}
        info = bucket(fresh.folder / "77", list(part), part, 77) | {"checksum": checksum(part.items())}
        await engine.pause()
        await engine.start_update()
        await engine.update(info)
        with pytest.raises(EngineError, match=r"lacks \d+ of the engine's tensors, model\."):
            await engine.finish_update()
        await publish(fresh, engine, fresh.model)
        assert_from(fresh.model, PROMPT, await ask(engine))

    fresh.drive(scenario)
