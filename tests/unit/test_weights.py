"""How weights are written, read, compared and sent: every way gives the very bits, and damage is seen."""

from __future__ import annotations

import multiprocessing
import socket
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save, save_file

from rondo.errors import PublicationError
from rondo.rollout.background import Background
from rondo.weights.broadcast import BroadcastTransport
from rondo.weights.bucket import Bucket, buckets
from rondo.weights.checksum import Checksum, checksum, weighted_sum
from rondo.weights.delta import apply, difference, words_of
from rondo.weights.http import WeightServer
from rondo.weights.receive import Receiver
from rondo.weights.safe import UnreadableWeightsError, map_file, parse
from rondo.weights.store import Store
from rondo.weights.stored import StoredTransport

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def literal_sum(tensor: torch.Tensor) -> int:
    raw = bytes(tensor.contiguous().view(-1).view(torch.uint8).tolist())
    raw += b"\0" * (-len(raw) % 8)
    words = [int.from_bytes(raw[start : start + 8], "little") for start in range(0, len(raw), 8)]
    total = sum(word * (2 * place + 1) for place, word in enumerate(words)) % 2**64
    return total - 2**64 if total >= 2**63 else total


@given(count=st.integers(1, 300), dtype=st.sampled_from(DTYPES), skip=st.integers(0, 3))
def test_the_sum_is_the_literal_one(count, dtype, skip):
    tensor = torch.randn(count + skip).to(dtype)[skip:]
    assert int(weighted_sum(tensor)) == literal_sum(tensor)


@pytest.mark.parametrize("count", [4096 * 64 * 4 - 4, 4096 * 64 * 4 + 4, 4096 * 100 + 12, 4096 * 65 * 4 + 17])
def test_the_sum_is_the_literal_one_across_blocks(count):
    tensor = torch.randn(count).bfloat16()
    assert int(weighted_sum(tensor)) == literal_sum(tensor)


@given(
    words=st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=40), data=st.data(), bit=st.integers(0, 31)
)
def test_every_flipped_bit_changes_the_checksum(words, data, bit):
    tensor = torch.tensor(words, dtype=torch.int32)
    index = data.draw(st.integers(0, len(words) - 1))
    changed = tensor.clone()
    changed[index] ^= -(2**31) if bit == 31 else 2**bit
    assert weighted_sum(tensor) != weighted_sum(changed)


def test_swapped_words_names_shapes_and_types_change_the_checksum():
    base = torch.arange(1.0, 9.0)
    variants = [("a", base), ("b", base), ("a", base.flip(0)), ("a", base.reshape(2, 4)), ("a", base.bfloat16())]
    assert len({checksum([variant]) for variant in variants}) == len(variants)


@given(
    changes=st.dictionaries(st.integers(0, 1999), st.integers(-(2**15), 2**15 - 1), max_size=60),
    start=st.integers(0, 1999),
)
def test_a_delta_brings_back_the_very_words(changes, start):
    old = torch.randn(2000, generator=torch.Generator().manual_seed(start)).bfloat16()
    new = old.clone()
    for place, value in changes.items():
        words_of(new)[place] = value
    held = old.clone()
    delta = difference(new, old)
    apply(delta, held)
    assert torch.equal(words_of(held), words_of(new))
    assert delta.steps.numel() == int((words_of(new) != words_of(old)).sum())


def test_a_delta_that_does_not_fit_is_refused():
    old = torch.zeros(10)
    delta = difference(torch.ones(10), old)
    with pytest.raises(ValueError, match="at 10 places of 5"):
        apply(delta, torch.zeros(5))


@given(data=st.binary(max_size=200))
def test_bytes_that_are_no_safetensors_are_refused(data):
    with pytest.raises(UnreadableWeightsError):
        parse(torch.frombuffer(bytearray(data + b"\0"), dtype=torch.uint8), source="here")


@settings(max_examples=200)
@given(data=st.data())
def test_a_damaged_file_is_refused_or_says_what_it_holds(data):
    good = bytearray(save({"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}))
    for _ in range(data.draw(st.integers(1, 4))):
        good[data.draw(st.integers(0, len(good) - 1))] = data.draw(st.integers(0, 255))
    good = good[: data.draw(st.integers(8, len(good)))]
    try:
        tensors = parse(torch.frombuffer(good, dtype=torch.uint8), source="here")
    except UnreadableWeightsError:
        return
    assert all(tensor.numel() * tensor.element_size() <= len(good) for tensor in tensors.values())


def test_files_are_read_as_the_formats_own_reader_does(tmp_path):
    tensors = {"a": torch.randn(3, 5), "b": torch.randn(7).bfloat16(), "c": torch.arange(3, dtype=torch.int8)}
    save_file(tensors, tmp_path / "x.safetensors")
    ours, theirs = map_file(tmp_path / "x.safetensors"), load_file(tmp_path / "x.safetensors")
    assert all(torch.equal(ours[name], theirs[name]) for name in tensors)


def test_a_store_writes_files_that_the_formats_own_reader_takes(tmp_path):
    store = Store(tmp_path / "weights", torch.bfloat16)
    bucket = Bucket(number=0, tensors=(("a", torch.randn(3, 5)), ("b", torch.randn(7))))
    path = store.put(bucket, version=0).path
    assert all(torch.equal(load_file(path)[name], tensor.bfloat16()) for name, tensor in bucket.tensors)


def test_a_folder_without_room_is_named(tmp_path, monkeypatch):
    def full(descriptor, offset, size):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    store = Store(tmp_path / "weights", torch.float32)
    with pytest.raises(PublicationError, match=r"No space left on device; .* make room or set weights.folder"):
        store.put(Bucket(number=0, tensors=(("a", torch.zeros(4)),)), version=0)
    assert not list((tmp_path / "weights").iterdir())


@pytest.fixture
def background():
    loop = Background("test")
    yield loop
    loop.close()


@pytest.mark.parametrize("delta", [False, True])
def test_over_http_an_engine_gets_the_very_bits(tmp_path, background, delta):
    store = Store(tmp_path / "weights", torch.bfloat16)
    server = WeightServer(store.folder, host="127.0.0.1")
    background.call(server.start())
    transport = StoredTransport(
        name="http",
        store=store,
        delta=delta,
        address=server.url,
        on_close=lambda: background.call(server.close()),
    )
    receiver = Receiver()
    weights = torch.randn(50, 40, generator=torch.Generator().manual_seed(0))
    for version in range(3):
        weights = weights + 1e-4
        transport.begin(version=version, receivers=["x"], full=False)
        receiver.begin()
        offer = transport.offer(Bucket(number=0, tensors=(("w", weights), ("v", weights[0]))))
        taken = dict(receiver.receive(offer.info))
        assert list(taken) == ["w", "v"]
        assert torch.equal(taken["w"], weights.bfloat16())
        assert torch.equal(taken["v"], weights[0].bfloat16())
        assert (offer.bytes < weights.numel() * 2) == (delta and version > 0)
        receiver.sealed(version)
        transport.confirmed()
    transport.close()


def test_the_weight_server_gives_nothing_to_who_does_not_show_the_token(tmp_path, background):
    folder = tmp_path / "weights"
    folder.mkdir()
    (folder / "x.safetensors").write_bytes(save({"a": torch.ones(1)}))
    (tmp_path / "secret").write_text("no")
    server = WeightServer(folder, host="127.0.0.1")
    background.call(server.start())
    told = {"transport": "http", "tensors": ["a"], **server.url(folder / "x.safetensors")}
    assert told["token"] not in told["url"]  # an address ends up in logs
    assert list(dict(Receiver().receive(told))) == ["a"]
    base = told["url"].rsplit("/", 1)[0]
    for change, status in (
        ({"token": ""}, "401"),
        ({"token": told["token"][:-1]}, "401"),
        ({"url": f"{base}/..%2Fsecret"}, "404"),
        ({"url": f"{base}/y.safetensors"}, "404"),
    ):
        with pytest.raises(UnreadableWeightsError, match=status):
            dict(Receiver().receive(told | change))
    background.call(server.close())


@pytest.mark.parametrize(
    "info",
    [
        {},
        {"transport": "pigeon"},
        {"transport": "files"},
        {"transport": "files", "path": 7},
        {"transport": "files", "path": "/nowhere/x", "tensors": ["a"]},
        {"transport": "files", "path": "/dev/shm/nowhere/x", "tensors": ["a"]},
        {"transport": "http", "url": "file:///etc/passwd", "tensors": ["a"]},
        {"transport": "http", "url": "http://127.0.0.1:1/x", "tensors": ["a"]},
        {"transport": "ipc", "handle": [], "tensors": []},
        {"transport": "nccl"},
    ],
)
def test_a_bucket_that_cannot_be_had_is_refused_in_words(info):
    with pytest.raises(PublicationError):
        dict(Receiver().receive(info))


def _listen(told, answers, number: int) -> None:
    receiver = Receiver()
    receiver.begin()
    total = Checksum()
    while (info := told.get()) is not None:
        for name, tensor in receiver.receive(info | {"receiver": number}):
            total.add(name, tensor)
    answers.put((number, total.digest()))


def test_a_broadcast_in_buckets_brings_the_very_bits_to_every_engine():
    """Over gloo; NCCL takes the same path through the same calls."""
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    queues = [context.Queue() for _ in range(2)]
    engines = [
        context.Process(target=_listen, args=(queue, answers, number), daemon=True)
        for number, queue in enumerate(queues)
    ]
    for engine in engines:
        engine.start()
    transport = BroadcastTransport(dtype=torch.bfloat16, device=torch.device("cpu"), host="127.0.0.1")
    transport.begin(version=0, receivers=["a", "b"], full=False)
    weights = [(f"t{number}", torch.randn(number + 1, 50)) for number in range(6)]
    total = Checksum()
    for bucket in buckets(weights, dtype=torch.bfloat16, limit=600):
        offer = transport.offer(bucket)
        for queue in queues:
            queue.put(dict(offer.info))
        assert offer.deliver is not None
        offer.deliver()
        for name, tensor in offer.tensors:
            total.add(name, tensor)
    for queue in queues:
        queue.put(None)
    assert dict(answers.get(timeout=60) for _ in engines) == {0: total.digest(), 1: total.digest()}
    for engine in engines:
        engine.join(10)
    transport.close()


def test_a_url_beyond_this_machine_takes_http_and_one_here_takes_files():
    from rondo.config import parse_config
    from rondo.launch.build_publisher import choose

    tree = {"model": {"path": "rondo:arithmetic"}, "data": {"train": "x"}, "rewards": {"functions": ["a:b"]}}
    config = parse_config(tree)
    cpu = torch.device("cpu")
    assert choose(["http://127.0.0.1:1", "http://localhost:2", "http://[::1]:3"], config, cpu) == "files"
    assert choose(["http://127.0.0.1:1", f"http://{socket.gethostname()}.example:2"], config, cpu) == "http"


def test_shared_memory_is_where_publications_go(tmp_path):
    from rondo.weights.folder import publication_folder

    assert publication_folder("", tmp_path).parent == Path("/dev/shm")
    assert publication_folder(str(tmp_path), tmp_path).parent == tmp_path
