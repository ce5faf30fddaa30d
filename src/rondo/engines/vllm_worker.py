"""What Rondo adds to vLLM's workers: which weights they hold, and how they take new ones.

Given to vLLM as `--worker-extension-cls`, it becomes a base of vLLM's worker class, in each of vLLM's worker processes;
its methods are called by name over `/collective_rpc`, with JSON texts. Nothing that is pickled is accepted.

An update goes: start, one or more updates (each some of the tensors, the last one the checksum of all), finish. From
the first tensor until a finish that found the announced checksum, the version is BROKEN_VERSION.

It runs in vLLM's own environment: it imports torch, vLLM, and of Rondo only what needs nothing else.
"""

from __future__ import annotations

import itertools
import json
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from rondo.engines.process import SUPERVISOR, alive, end_group
from rondo.engines.protocol import SHAPE
from rondo.errors import PublicationError
from rondo.weights.checksum import Checksum
from rondo.weights.receive import Receiver

BASE_VERSION = -1  # the weights the engine was started with
BROKEN_VERSION = -2

_WATCH_SECONDS = 0.5
_PLAIN = ("UnquantizedLinearMethod", "UnquantizedEmbeddingMethod")

Named = tuple[str, torch.Tensor]


class RondoWorker:
    """Methods for `/collective_rpc`. vLLM calls no constructor of ours: what is held is made when first needed."""

    def rondo_state(self) -> dict[str, Any]:
        return self._rondo.state()

    def rondo_start(self) -> dict[str, Any]:
        return _answer(self._rondo.start)

    def rondo_update(self, info: str) -> dict[str, Any]:
        return _answer(lambda: self._rondo.update(json.loads(info)))

    def rondo_finish(self) -> dict[str, Any]:
        return _answer(self._rondo.finish)

    @property
    def _rondo(self) -> WorkerUpdates:
        held: WorkerUpdates | None = self.__dict__.get("_rondo_updates")
        if held is None:
            held = self.__dict__["_rondo_updates"] = WorkerUpdates(self)
        return held


class WorkerUpdates:
    """One worker's weights and their version."""

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self.boot = secrets.token_hex(8)
        self.version = BASE_VERSION
        self.checksum = ""
        self._session: _Session | None = None
        self._receiver = Receiver(device=worker.device, worker=getattr(worker, "rank", 0))

    def state(self) -> dict[str, Any]:
        config = self._worker.vllm_config
        text = config.model_config.hf_text_config
        return {
            "boot": self.boot,
            "version": self.version,
            "checksum": self.checksum,
            "slots": config.scheduler_config.max_num_seqs,
            "max_model_len": config.model_config.max_model_len,
            "model": config.model_config.model,
            "shape": {name: getattr(text, name, 0) for name in SHAPE},
            "logprobs_mode": str(config.model_config.logprobs_mode),
            "prefix_caching": bool(config.cache_config.enable_prefix_caching),
        }

    def start(self) -> None:
        """Open an update; one that was left open is given up."""
        left, self._session = self._session, None
        if left is not None:
            left.close()
        model = self._worker.model_runner.get_model()
        self._receiver.begin()
        self._session = _Session(model, self._worker.vllm_config, self._worker.device)

    def update(self, info: dict[str, Any]) -> None:
        if self._session is None:
            raise PublicationError("no weight update is open: start one first")
        session, version = self._session, int(info["version"])
        if session.version not in (None, version):
            raise PublicationError(f"this update announces version {version}, an earlier one {session.version}")
        session.announced = str(info.get("checksum", session.announced))
        if "transport" not in info:
            return
        tensors = self._receiver.receive(info)
        first = next(tensors, None)  # what cannot be read at all changes nothing
        if first is None:
            raise PublicationError("the update holds no tensors")
        session.version = version
        self.version = BROKEN_VERSION
        session.load(itertools.chain([first], tensors), lasting=info["transport"] == "files")

    def finish(self) -> dict[str, Any]:
        session, self._session = self._session, None
        if session is None or session.version is None or not session.announced:
            raise PublicationError("no weights were loaded: start an update and send some first")
        session.close()
        held = session.checksum.digest()
        if held != session.announced:
            raise PublicationError(
                f"the weights received for version {session.version} have checksum {held}, but {session.announced} was "
                "announced"
            )
        if missing := session.missing():
            raise PublicationError(f"the update lacks {len(missing)} of the engine's tensors, {missing[0]} first")
        self.version, self.checksum = session.version, held
        self._receiver.sealed(self.version)
        return {"boot": self.boot, "version": self.version, "checksum": held}


class _Session:
    """One update, from start to finish, in whichever way this model can take weights.

    In place: every published tensor is copied straight into the running model. Layerwise, vLLM's own reloading, for
    models whose weights were rearranged after loading (all of them on CPU, quantised ones and experts anywhere): it
    holds on to a layer's tensors until the layer is whole.
    """

    def __init__(self, model: torch.nn.Module, config: Any, device: torch.device) -> None:
        self.version: int | None = None
        self.announced = ""  # checksum
        self.checksum = Checksum()
        self._model, self._config, self._device = model, config, device
        self._loaded: set[str] = set()
        self._expected = {name for name, _ in model.named_parameters()}
        self._in_place = device.type != "cpu" and all(
            type(method).__name__ in _PLAIN
            for module in model.modules()
            if (method := getattr(module, "quant_method", None)) is not None
        )
        if not self._in_place:
            self._layerwise("initialize_layerwise_reload", model)

    def load(self, tensors: Iterable[Named], *, lasting: bool) -> None:
        loaded = self._within(lambda: self._model.load_weights(self._summed(tensors, lasting)))  # type: ignore[operator]
        self._loaded |= set(loaded or self._expected)
        if self._device.type != "cpu":
            torch.accelerator.synchronize()  # the sender may reuse its memory once this returns

    def close(self) -> None:
        if not self._in_place:
            self._layerwise("finalize_layerwise_reload", self._model, self._config.model_config)
        if self._device.type == "cpu":
            _repack_heads(self._model)

    def missing(self) -> list[str]:
        return sorted(self._expected - self._loaded)

    def _summed(self, tensors: Iterable[Named], lasting: bool) -> Iterator[Named]:
        for name, tensor in tensors:
            self.checksum.add(name, tensor)
            yield name, tensor if self._in_place or lasting else tensor.clone()

    def _layerwise(self, function: str, *arguments: Any) -> None:
        from vllm.model_executor.model_loader import reload

        self._within(lambda: getattr(reload, function)(*arguments))

    def _within(self, action: Callable[[], Any]) -> Any:
        """As vLLM's own worker calls them: weights are made on its device, under its config."""
        from vllm.config import set_current_vllm_config

        with set_current_vllm_config(self._config), torch.device(self._device), torch.no_grad():
            return action()


def _repack_heads(model: torch.nn.Module) -> None:
    """An output head that is tied to the embedding multiplies by a packed copy, which reloading does not renew."""
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

    for module in model.modules():
        weight = getattr(module, "weight", None)
        if hasattr(module, "cpu_linear") and weight is not None and weight.numel() > 0:
            dispatch_cpu_unquantized_gemm(module, remove_weight=False)


def _answer(action: Callable[[], dict[str, Any] | None]) -> dict[str, Any]:
    """The sentence of what went wrong travels in the answer: vLLM would show its callers a traceback or nothing."""
    try:
        return action() or {}
    except PublicationError as error:
        return {"error": str(error)}
    except Exception as error:  # a model that cannot take these weights raises whatever it likes
        return {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}


def _watch(supervisor: str) -> None:
    while alive(supervisor):
        time.sleep(_WATCH_SECONDS)
    end_group(os.getpgrp())  # vLLM was started as a group of its own


if os.environ.get(SUPERVISOR):  # vLLM imports this module once in each worker process, and calls nothing at start
    threading.Thread(target=_watch, args=(os.environ[SUPERVISOR],), name="rondo-lifeline", daemon=True).start()
