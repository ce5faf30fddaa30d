"""What a publication costs, over each way that this machine has.

    python bench/publication.py                                # CPU: embedded engine, 0.5B in bfloat16 (1 GB)
    python bench/publication.py --backend vllm --size 1.5B      # on an accelerator: vLLM, 1.5B in bfloat16 (3 GB)

A real engine in a process of its own takes publication after publication over HTTP: pause, buckets, checksum,
confirmation, prefix reset, resume. Beside it, in the same process and at the same time of day, a plain copy of as many
bytes. For deltas, real optimizer steps at a learning rate of 1e-6 come in between.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")  # some CPUs advertise what they cannot execute

import aiohttp
import torch
import transformers

from models import SIZES, save_qwen2
from rondo.engines.client import HttpEngine
from rondo.observe.lane import Lane
from rondo.rollout.background import Background
from rondo.weights.http import WeightServer
from rondo.weights.ipc import IpcTransport
from rondo.weights.publisher import Publisher
from rondo.weights.store import Store
from rondo.weights.stored import StoredTransport
from rondo.weights.transport import Transport

REPETITIONS = 7
DTYPE = torch.bfloat16


def start_engine(folder: Path, backend: str) -> tuple[subprocess.Popen[bytes], str]:
    announced = folder.parent / "engine.json"
    line = [sys.executable, "-m", "rondo", "serve", "--model", str(folder), "--dtype", "bfloat16", "--slots", "4"]
    line += ["--max-model-len", "512", "--announce", str(announced)]
    line += ["--backend", "vllm", "--memory-share", "0.3"] if backend == "vllm" else ["--threads", "1"]
    with (folder.parent / "engine.log").open("wb") as log:
        engine = subprocess.Popen(line, stdout=log, stderr=subprocess.STDOUT)
    while not announced.exists():
        if engine.poll() is not None:
            sys.exit((folder.parent / "engine.log").read_text())
        time.sleep(0.1)
    return engine, json.loads(announced.read_text())["url"]


def plain_copy(size: int, device: torch.device) -> float:
    source, target = (torch.ones(size, dtype=torch.uint8, device=device) for _ in range(2))
    return median_seconds(lambda: target.copy_(source), device)


def median_seconds(action, device: torch.device, between=lambda: None) -> float:
    seconds = []
    for repetition in range(REPETITIONS + 2):  # two to warm up: both generations of files are touched
        between()
        if device.type != "cpu":
            torch.accelerator.synchronize()
        began = time.perf_counter()
        action()
        if device.type != "cpu":
            torch.accelerator.synchronize()
        if repetition >= 2:
            seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def transports(
    backend: str, folder: Path, background: Background, device: torch.device
) -> Iterator[tuple[str, Transport]]:
    shm = Path("/dev/shm")
    if device.type != "cpu" and backend == "vllm":
        yield "ipc", IpcTransport(dtype=DTYPE, device=device)
    yield "files (shared memory)", StoredTransport(name="files", store=Store(shm / "rondo-weights-bench", DTYPE))
    for delta in (False, True):
        store = Store(shm / "rondo-weights-bench", DTYPE)
        server = WeightServer(store.folder, host="127.0.0.1")
        background.call(server.start())
        yield (
            "http, delta" if delta else "http",
            StoredTransport(
                name="http",
                store=store,
                delta=delta,
                address=server.url,
                on_close=lambda server=server: background.call(server.close()),
            ),
        )


class Steps:
    """Real optimizer steps at lr 1e-6, on the gradient of a small random batch."""

    def __init__(self, model: transformers.PreTrainedModel) -> None:
        self._model = model
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, weight_decay=0.0)

    def __call__(self) -> None:
        token_ids = torch.randint(0, 1000, (1, 16), device=self._model.device)
        self._model(input_ids=token_ids, labels=token_ids).loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()


async def open_session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession()


class Watch:
    """Seconds inside some calls, and how many there were."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.counts: dict[str, int] = {}

    def add(self, name: str, began: float) -> None:
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - began
        self.counts[name] = self.counts.get(name, 0) + 1

    def around(self, target: object, *names: str) -> None:
        for name in names:
            setattr(target, name, self._timed(name, getattr(target, name)))

    def _timed(self, name, call):
        async def asynchronous(*words):
            began = time.perf_counter()
            try:
                return await call(*words)
            finally:
                self.add(name, began)

        def plain(*words):
            began = time.perf_counter()
            try:
                return call(*words)
            finally:
                self.add(name, began)

        return asynchronous if inspect.iscoroutinefunction(call) else plain

    def line(self) -> str:
        return "  ".join(
            f"{name} {self.counts[name]}x{1e3 * seconds / self.counts[name]:.1f}"
            for name, seconds in self.seconds.items()
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", choices=("embedded", "vllm"), default="embedded")
    parser.add_argument("--size", choices=tuple(SIZES), default="0.5B")
    parser.add_argument("--bucket-mb", type=int, default=256)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
    background = Background("bench")
    figures: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "model"
        model = save_qwen2(folder, arguments.size, vocabulary=151_936, device=device).float()
        engine, url = start_engine(folder, arguments.backend)
        session = background.call(open_session())
        client = HttpEngine(url, session, seconds=600)
        background.call(client.state())
        watch = Watch()
        watch.around(client, "pause", "start_update", "update", "finish_update", "reset_prefix_cache", "resume")
        size = sum(parameter.numel() for parameter in model.parameters()) * DTYPE.itemsize
        copy = plain_copy(size, device)
        print(f"{size / 1e9:.2f} GB; plain copy on {device}: {copy:.4f} s ({size / copy / 1e9:.1f} GB/s)", flush=True)
        try:
            version = 0
            for label, transport in transports(arguments.backend, folder, background, device):
                watch.seconds, watch.counts = {}, {}
                watch.around(transport, "offer")
                publisher = Publisher(
                    transport=transport,
                    weights=lambda: ((name, parameter.detach()) for name, parameter in model.named_parameters()),
                    dtype=DTYPE,
                    bucket_bytes=arguments.bucket_mb << 20,
                    receivers=lambda: [client],
                    submit=background.submit,
                    probe=lambda version, engines: None,
                    on_repeat=print,
                    lane=Lane(),
                )

                def publish(publisher: Publisher = publisher) -> None:
                    nonlocal version
                    publisher.publish(version)
                    version += 1

                step = Steps(model) if "delta" in label else lambda: None
                seconds = median_seconds(publish, device, between=step)
                figures[label] = {
                    "seconds": seconds,
                    "GB_per_s": size / seconds / 1e9,
                    "copies": seconds / copy,
                    "share_sent": publisher.bytes / size,
                }
                print(
                    f"{label:<24} {seconds:7.3f} s {size / seconds / 1e9:7.1f} GB/s {seconds / copy:7.1f} plain copies "
                    f"{publisher.bytes / size:9.2%} of the bytes sent",
                    flush=True,
                )
                print("    ms per call:", watch.line(), flush=True)
                publisher.close()
        finally:
            background.call(session.close())
            engine.terminate()
            engine.wait()
            background.close()
    if arguments.json:
        record = {"bytes": size, "copy_seconds": copy, "device": str(device), "torch": torch.__version__, **figures}
        arguments.json.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
