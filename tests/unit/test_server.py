"""`rondo serve` as a process of its own, spoken to over HTTP."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedModel, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from rondo.engines.dialect import Served, completion, parse_call
from rondo.engines.embedded import Result, Sample
from rondo.engines.server import serve
from rondo.errors import AddressError, ModelError
from rondo.weights.checksum import checksum

VOCABULARY = 64
EOS = 7
PATIENCE = 60.0  # seconds until a wait counts as a failure


@dataclass(frozen=True, kw_only=True)
class Server:
    url: str
    process: subprocess.Popen[str]

    def get(self, path: str) -> tuple[int, dict[str, Any]]:
        return self._call(urllib.request.Request(self.url + path))

    def post(self, path: str, body: Any = None) -> tuple[int, dict[str, Any]]:
        data = body if isinstance(body, bytes) else json.dumps({} if body is None else body).encode()
        return self._call(urllib.request.Request(self.url + path, data=data, method="POST"))

    def state(self) -> dict[str, Any]:
        return self.get("/rondo/state")[1]

    def complete(self, **body: Any) -> dict[str, Any]:
        status, answer = self.post("/v1/completions", {"return_token_ids": True, "detokenize": False, **body})
        assert status == 200, answer
        return answer

    def wait_for(self, **wanted: Any) -> None:
        deadline = time.monotonic() + PATIENCE
        while not wanted.items() <= (state := self.state()).items():
            assert time.monotonic() < deadline, f"waited for {wanted}, got {state}"
            time.sleep(0.01)

    def _call(self, request: urllib.request.Request) -> tuple[int, dict[str, Any]]:
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE) as reply:
                return reply.status, json.loads(reply.read())
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.loads(error.read())


def tiny_model(seed: int = 0) -> PreTrainedModel:
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        initializer_range=0.2,
        eos_token_id=EOS,
        bos_token_id=None,
    )
    return Qwen2ForCausalLM(config).eval()


def start(code: str, announce: Path) -> Server:
    """A server from a Python program that announces itself."""
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + PATIENCE
    while not announce.exists():
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            raise AssertionError(f"the server did not start: {process.communicate()[1]}")
        time.sleep(0.02)
    said = json.loads(announce.read_text())
    assert said["pid"] == process.pid
    return Server(url=said["url"], process=process)


def end(server: Server) -> None:
    server.process.kill()
    server.process.communicate()


def serving(model: Path, announce: Path) -> str:
    arguments = f"model={str(model)!r}, announce=Path({str(announce)!r}), slots=6, threads=1, device='cpu'"
    return f"from pathlib import Path\nfrom rondo.engines.server import serve\nserve({arguments}, max_model_len=1024)"


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    tiny_model().save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def running(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    announce = tmp_path_factory.mktemp("announce") / "engine.json"
    server = start(serving(model_dir, announce), announce)
    yield server
    end(server)


@pytest.fixture
def server(running: Server, model_dir: Path) -> Iterator[Server]:
    """The module's server, left as it was found."""
    yield running
    if running.state()["version"] == -2:
        running.post("/pause?mode=abort")
        publish(running, model_dir / "model.safetensors", version=0, announced=checksum_of(tiny_model()))
    assert running.post("/resume")[0] == 200
    running.wait_for(running=0, waiting=0)


NAMES = [name for name, _ in tiny_model().named_parameters()]


def checksum_of(model: PreTrainedModel) -> str:
    return checksum(model.named_parameters())


def publish(server: Server, path: Path, *, version: int, announced: str) -> tuple[int, dict[str, Any]]:
    assert server.post("/start_weight_update")[0] == 200
    info = {"version": version, "transport": "files", "path": str(path), "tensors": NAMES, "checksum": announced}
    status, answer = server.post("/update_weights", {"update_info": info})
    assert status == 200, answer
    return server.post("/finish_weight_update")


def test_an_answer_has_the_shape_of_the_dialect(server: Server, model_dir: Path) -> None:
    before = server.state()
    answer = server.complete(prompt=[1, 2, 3], n=2, seed=5, max_tokens=4, logprobs=0, ignore_eos=True)
    assert answer["object"] == "text_completion"
    assert answer["model"] == str(model_dir)
    assert answer["usage"] == {"prompt_tokens": 3, "completion_tokens": 8, "total_tokens": 11}
    assert answer["rondo"]["boot"] == before["boot"]
    assert answer["rondo"]["version"] == [before["version"]] * 2
    assert set(answer["rondo"]["seconds"]) == {"queued", "running"}
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    for choice in answer["choices"]:
        assert len(choice["token_ids"]) == len(choice["logprobs"]["token_logprobs"]) == 4
        assert choice["finish_reason"] == "length"
        assert choice["text"] == ""
    after = server.state()
    assert after["tokens"] - before["tokens"] == 8
    assert after["busy_seconds"] > before["busy_seconds"]


def test_logps_equal_those_of_the_model(server: Server) -> None:
    prompt = list(range(10))
    answer = server.complete(prompt=prompt, n=3, max_tokens=12, logprobs=0, temperature=0.7)
    model = tiny_model()
    for choice in answer["choices"]:
        ids = torch.tensor([prompt + choice["token_ids"]])
        with torch.no_grad():
            logps = (model(ids).logits[0] / 0.7).log_softmax(-1)[len(prompt) - 1 : -1]
        expected = logps.gather(-1, torch.tensor(choice["token_ids"]).unsqueeze(-1)).squeeze(-1)
        got = torch.tensor(choice["logprobs"]["token_logprobs"])
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=0)


def test_the_same_seed_gives_the_same_samples_and_no_seed_others(server: Server) -> None:
    def tokens(**body: Any) -> list[list[int]]:
        answer = server.complete(prompt=[1, 2, 3], max_tokens=16, ignore_eos=True, **body)
        return [choice["token_ids"] for choice in answer["choices"]]

    together = tokens(n=4, seed=100)
    assert together == [tokens(seed=100 + i)[0] for i in range(4)]
    assert tokens() != tokens()


def test_eos_stops_unless_ignored_and_named_stops_come_on_top(server: Server) -> None:
    body: dict[str, Any] = {"prompt": [1, 2, 3], "n": 16, "seed": 1, "max_tokens": 60}
    free = server.complete(**body, ignore_eos=True)["choices"]
    assert {len(choice["token_ids"]) for choice in free} == {60}
    with_eos = server.complete(**body)["choices"]
    named = server.complete(**body, stop_token_ids=[11])["choices"]
    for stops, choices in [({EOS}, with_eos), ({EOS, 11}, named)]:
        for choice, whole in zip(choices, free, strict=True):
            ids = whole["token_ids"]
            place = next((i for i, token in enumerate(ids) if token in stops), None)
            assert choice["token_ids"] == (ids if place is None else ids[: place + 1])
            assert choice["finish_reason"] == ("length" if place is None else "stop")
            assert choice["stop_reason"] == (11 if place is not None and ids[place] == 11 else None)
    assert {choice["stop_reason"] for choice in named} >= {11, None}


def test_many_clients_at_once_get_what_each_alone_would(server: Server) -> None:
    bodies = [{"prompt": [seed % 50, 3], "n": 3, "seed": seed, "max_tokens": 1 + seed % 20} for seed in range(30)]
    with ThreadPoolExecutor(15) as pool:
        together = list(pool.map(lambda body: server.complete(**body), bodies))
    for body, answer in zip(bodies[::5], together[::5], strict=True):
        alone = server.complete(**body)
        assert [c["token_ids"] for c in answer["choices"]] == [c["token_ids"] for c in alone["choices"]]


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"{not json", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        ([1, 2], "JSON object"),
        ({}, "prompt is missing"),
        ({"prompt": []}, "prompt is missing"),
        ({"prompt": "hello"}, "no tokenizer"),
        ({"prompt": [[1, 2], [3]]}, "list of token ids"),
        ({"prompt": [1, "2"]}, "list of token ids"),
        ({"prompt": [1, True]}, "list of token ids"),
        ({"prompt": {"1": 2}}, "list of token ids"),
        ({"prompt": [1, VOCABULARY]}, f"token {VOCABULARY}"),
        ({"prompt": [-1]}, "token -1"),
        ({"prompt": [2**80]}, "vocabulary"),
        ({"prompt": [1] * 1000, "max_tokens": 25}, "max_model_len"),
        ({"prompt": [1], "n": 0}, "n = 0"),
        ({"prompt": [1], "n": 10**9}, "n = 1000000000"),
        ({"prompt": [1], "n": "2"}, "must be an integer"),
        ({"prompt": [1], "n": 1.5}, "must be an integer"),
        ({"prompt": [1], "max_tokens": 0}, "max_tokens = 0"),
        ({"prompt": [1], "max_tokens": True}, "must be an integer"),
        ({"prompt": [1], "seed": 2**64}, "seed"),
        ({"prompt": [1], "temperature": -1}, "temperature"),
        ({"prompt": [1], "temperature": "hot"}, "must be a number"),
        ({"prompt": [1], "temperature": float("nan")}, "temperature"),
        ({"prompt": [1], "temperature": 1e-9}, "too small"),
        ({"prompt": [1], "temperature": 10**400}, "temperature"),
        ({"prompt": [1], "top_p": 0}, "top_p = 0"),
        ({"prompt": [1], "top_p": 1.1}, "top_p"),
        ({"prompt": [1], "stop_token_ids": 3}, "stop_token_ids"),
        ({"prompt": [1], "stop_token_ids": [999]}, "token 999"),
        ({"prompt": [1], "logprobs": True}, "must be an integer"),
        ({"prompt": [1], "logprobs": -1}, "logprobs"),
        ({"prompt": [1], "ignore_eos": 1}, "true or false"),
        ({"prompt": [1], "top_k": 5}, "top_k"),
        ({"prompt": [1], "min_p": 0.1}, "min_p"),
        ({"prompt": [1], "presence_penalty": 0.5}, "presence_penalty"),
        ({"prompt": [1], "frequency_penalty": 0.5}, "frequency_penalty"),
        ({"prompt": [1], "repetition_penalty": 1.1}, "repetition_penalty"),
        ({"prompt": [1], "logit_bias": {"3": 1}}, "logit_bias"),
        ({"prompt": [1], "stream": True}, "stream"),
        ({"prompt": [1], "best_of": 3}, "best_of"),
        ({"prompt": [1], "echo": True}, "echo"),
        ({"prompt": [1], "stop": ["\n"]}, "stop"),
    ],
)
def test_a_call_that_cannot_be_served_is_refused_with_the_reason(server: Server, body: Any, reason: str) -> None:
    status, answer = server.post("/v1/completions", body)
    assert (status, answer["error"]["code"], answer["error"]["type"]) == (400, 400, "BadRequestError")
    assert reason in answer["error"]["message"]


def test_neutral_values_of_fields_not_served_are_accepted(server: Server) -> None:
    server.complete(
        prompt=[1], n=2, best_of=2, top_k=-1, min_p=0.0, presence_penalty=0, repetition_penalty=1.0,
        logit_bias=None, stream=False, echo=False, stop=None, user="someone", model="any",
    )  # fmt: skip


def test_text_goes_in_and_comes_out_where_there_is_a_tokenizer() -> None:
    words = Tokenizer(WordLevel({"<unk>": 0, "one": 1, "two": 2, "three": 3}, unk_token="<unk>"))
    words.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>")
    served = Served(
        model="m", boot="b", vocabulary=4, max_model_len=32, eos=frozenset({3}), tokenizer=lambda: tokenizer
    )
    call = parse_call(b'{"prompt": "two one", "logprobs": 0}', served)
    assert call.request.prompt == (2, 1)
    assert call.request.sampling.stop_token_ids == (3,)
    sample = Sample(token_ids=[1, 2, 3], logps=[-1.0, -2.0, -3.0], finish="stop")
    result = Result(
        ticket=0, samples=(sample,), version=(0, 0), queued_seconds=0.0, running_seconds=0.0, moments=(0.0,) * 3
    )
    (choice,) = completion(call, result, served)["choices"]
    assert choice["text"] == "one two three"
    assert choice["token_ids"] is None
    assert choice["logprobs"] == {"token_logprobs": [-1.0, -2.0, -3.0], "tokens": ["one", "two", "three"]}


def test_models_are_listed(server: Server, model_dir: Path) -> None:
    status, answer = server.get("/v1/models")
    assert (status, answer["object"], answer["data"][0]["id"]) == (200, "list", str(model_dir))
    assert server.get("/health")[0] == 200


def test_requests_wait_while_paused_and_start_on_resume(server: Server) -> None:
    assert server.post("/pause?mode=wait")[0] == 200
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(server.complete, prompt=[1, 2], max_tokens=3, ignore_eos=True)
        server.wait_for(paused=True, waiting=1, running=0)
        assert not answer.done()
        assert server.post("/resume")[0] == 200
        assert len(answer.result(PATIENCE)["choices"][0]["token_ids"]) == 3
    assert server.post("/pause?mode=sideways")[0] == 400


def long_request(server: Server, tokens: int) -> dict[str, Any]:
    return server.complete(prompt=[1, 2], n=9, seed=0, max_tokens=tokens, ignore_eos=True, logprobs=0)


def test_pause_with_wait_lets_running_requests_finish(server: Server) -> None:
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(long_request, server, 300)
        server.wait_for(running=1)
        assert server.post("/pause?mode=wait")[0] == 200
        assert server.state()["running"] == 0
        choices = answer.result(PATIENCE)["choices"]
    assert [len(choice["token_ids"]) for choice in choices] == [300] * 9


def test_pause_with_abort_ends_running_requests_with_what_they_have(server: Server) -> None:
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(long_request, server, 1000)
        server.wait_for(running=1)
        assert server.post("/pause?mode=abort")[0] == 200
        choices = answer.result(PATIENCE)["choices"]
    assert {choice["finish_reason"] for choice in choices} == {"abort"}
    assert choices[8]["token_ids"] == []  # six slots: it never had one
    assert all(len(c["token_ids"]) == len(c["logprobs"]["token_logprobs"]) for c in choices)


def test_a_client_that_leaves_frees_its_slots(server: Server) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    body = json.dumps({"prompt": [1, 2], "n": 500, "max_tokens": 1000, "ignore_eos": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(head + body)
        server.wait_for(running=1)
    server.wait_for(running=0)


def test_a_publication_is_confirmed_and_changes_the_samples(server: Server, tmp_path: Path) -> None:
    other = tiny_model(seed=9)
    tensors = {name: tensor.detach() for name, tensor in other.named_parameters()}
    names = sorted(tensors)
    files = [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]
    save_file({name: tensors[name] for name in names[:5]}, files[0])
    save_file({name: tensors[name] for name in names[5:]}, files[1])

    assert server.post("/pause?mode=wait")[0] == 200
    assert server.post("/start_weight_update")[0] == 200
    for path in files:
        info = {
            "version": 4,
            "transport": "files",
            "path": str(path),
            "tensors": names[:5] if path == files[0] else names[5:],
        }
        assert server.post("/update_weights", {"update_info": info})[0] == 200
    whole = checksum((name, tensors[name]) for name in names)
    assert server.post("/update_weights", {"update_info": {"version": 4, "checksum": whole}})[0] == 200
    assert server.post("/resume")[0] == 409  # not before it is finished
    status, answer = server.post("/finish_weight_update")
    assert (status, answer["version"], answer["checksum"]) == (200, 4, whole)
    assert answer["boot"] == server.state()["boot"]
    assert server.post("/reset_prefix_cache")[0] == 200
    assert server.post("/resume")[0] == 200

    said = server.complete(prompt=[1, 2, 3], max_tokens=6, temperature=0, ignore_eos=True, logprobs=0)
    assert said["rondo"]["version"] == [4, 4]
    ids = [1, 2, 3]
    for _ in range(6):
        with torch.no_grad():
            ids.append(int(other(torch.tensor([ids])).logits[0, -1].argmax()))
    assert said["choices"][0]["token_ids"] == ids[3:]

    assert server.post("/pause?mode=wait")[0] == 200
    save_file({name: tensor.detach() for name, tensor in tiny_model().named_parameters()}, files[0])
    assert publish(server, files[0], version=5, announced=checksum_of(tiny_model()))[0] == 200


def test_weights_do_not_change_unless_paused(server: Server) -> None:
    status, answer = server.post("/start_weight_update")
    assert status == 409
    assert "/pause?mode=wait" in answer["error"]["message"]
    assert server.post("/finish_weight_update")[0] == 409
    info = {"version": 1, "transport": "files", "path": "/nowhere", "checksum": ""}
    assert server.post("/update_weights", {"update_info": info})[0] == 409


def test_a_wrong_checksum_is_refused_until_a_good_update_arrives(server: Server, model_dir: Path) -> None:
    assert server.post("/pause?mode=wait")[0] == 200
    path = model_dir / "model.safetensors"
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(server.post, "/v1/completions", {"prompt": [1]})
        server.wait_for(waiting=1)
        status, answer = publish(server, path, version=8, announced="0123456789abcdef")
        assert status == 409
        assert "0123456789abcdef" in answer["error"]["message"]
        assert waiting.result(PATIENCE)[0] == 503
    assert server.state()["version"] == -2
    assert server.post("/v1/completions", {"prompt": [1]})[0] == 503
    assert server.post("/resume")[0] == 409
    status, answer = publish(server, path, version=8, announced=checksum_of(tiny_model()))
    assert (status, answer["version"]) == (200, 8)
    assert server.post("/resume")[0] == 200
    assert server.complete(prompt=[1])["rondo"]["version"] == [8, 8]


@pytest.mark.parametrize("damage", ["missing", "corrupt", "truncated", "not a path"])
def test_a_file_that_cannot_be_read_changes_nothing(
    server: Server, model_dir: Path, tmp_path: Path, damage: str
) -> None:
    whole = (model_dir / "model.safetensors").read_bytes()
    path = tmp_path / "x.safetensors"
    if damage == "corrupt":
        path.write_bytes(b"\xff" * 1000)
    if damage == "truncated":
        path.write_bytes(whole[: len(whole) // 2])
    version = server.state()["version"]
    assert server.post("/pause?mode=wait")[0] == 200
    assert server.post("/start_weight_update")[0] == 200
    name = "nul\0byte" if damage == "not a path" else str(path)
    info = {"version": 1, "transport": "files", "path": name, "tensors": NAMES, "checksum": "x"}
    status, answer = server.post("/update_weights", {"update_info": info})
    assert status == 400, answer
    assert server.post("/finish_weight_update")[0] == 409
    assert server.state()["version"] == version
    good = publish(server, model_dir / "model.safetensors", version=2, announced=checksum_of(tiny_model()))
    assert good[0] == 200


def test_tensors_of_another_model_are_refused(server: Server, tmp_path: Path) -> None:
    tensors = {name: tensor.detach().clone() for name, tensor in tiny_model().named_parameters()}
    name = "model.norm.weight"
    wrong = {
        "shape": {**tensors, name: torch.zeros(5)},
        "name": {**tensors, "model.extra": torch.zeros(5)},
        "missing": {key: tensor for key, tensor in tensors.items() if key != name},
    }
    assert server.post("/pause?mode=wait")[0] == 200
    for kind, held in wrong.items():
        path = tmp_path / f"{kind}.safetensors"
        save_file(held, path)
        assert server.post("/start_weight_update")[0] == 200
        info = {"version": 3, "transport": "files", "path": str(path), "checksum": checksum_of(tiny_model())}
        info["tensors"] = list(held)
        loaded, answer = server.post("/update_weights", {"update_info": info})
        if kind == "missing":
            loaded, answer = server.post("/finish_weight_update")
        assert loaded == 409
        assert ("model.extra" if kind == "name" else name) in answer["error"]["message"]
        assert server.state()["version"] == -2


@pytest.mark.parametrize("body", [{}, {"update_info": 3}, {"update_info": {"path": "x"}}, b"\xff"])
def test_a_malformed_update_is_refused(server: Server, body: Any) -> None:
    assert server.post("/update_weights", body)[0] == 400


def test_prefix_resets_are_counted(server: Server) -> None:
    before = server.state()["prefix_resets"]
    assert server.post("/reset_prefix_cache")[0] == 200
    assert server.state()["prefix_resets"] == before + 1


def test_sigterm_ends_the_process_at_once_even_with_requests_running(model_dir: Path, tmp_path: Path) -> None:
    announce = tmp_path / "engine.json"
    server = start(serving(model_dir, announce), announce)

    def abandoned() -> None:
        with pytest.raises((urllib.error.URLError, ConnectionError)):
            server.post("/v1/completions", {"prompt": [1], "n": 500, "max_tokens": 1000, "ignore_eos": True})

    client = threading.Thread(target=abandoned)
    client.start()
    server.wait_for(running=1)
    os.kill(server.process.pid, signal.SIGTERM)
    _, stderr = server.process.communicate(timeout=PATIENCE)
    client.join(PATIENCE)
    assert server.process.returncode == 0, stderr


DOOMED = """
    import asyncio, json, os, socket
    from pathlib import Path
    from transformers import AutoModelForCausalLM
    from rondo.engines.embedded import EmbeddedEngine
    from rondo.engines.server import describe, serve_engine

    class Doomed(EmbeddedEngine):
        def step(self):
            raise RuntimeError("out of luck")

    engine = Doomed(AutoModelForCausalLM.from_pretrained({model!r}), slots=2, max_model_len=64)
    listener = socket.create_server(("127.0.0.1", 0))
    said = {{"url": f"http://127.0.0.1:{{listener.getsockname()[1]}}", "pid": os.getpid()}}
    def ready():
        Path({announce!r} + "~").write_text(json.dumps(said))
        os.replace({announce!r} + "~", {announce!r})
    asyncio.run(serve_engine(engine, describe(engine, {model!r}), listener, ready))
"""


def test_a_dead_engine_thread_is_told_to_everyone_and_ends_the_process(model_dir: Path, tmp_path: Path) -> None:
    announce = tmp_path / "engine.json"
    program = textwrap.dedent(DOOMED).format(model=str(model_dir), announce=str(announce))
    server = start(program, announce)
    status, answer = server.post("/v1/completions", {"prompt": [1]})
    assert (status, answer["error"]["type"]) == (500, "DiedError")
    assert "out of luck" in answer["error"]["message"]
    status, answer = server.get("/health")
    assert status == 500
    assert "out of luck" in answer["error"]["message"]
    _, stderr = server.process.communicate(timeout=PATIENCE)
    assert server.process.returncode != 0
    assert "DiedError" in stderr


def test_a_taken_port_is_refused_before_the_model_is_looked_at() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(AddressError, match=f"127.0.0.1:{port} .* another port"):
            serve(model="/no/such/model", port=port)


def test_a_missing_model_is_refused_in_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no model at"):
        serve(model=str(tmp_path))
