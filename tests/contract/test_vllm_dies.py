"""What is seen and what is left when a real vLLM ends early. Run last of the contract: each test ends one engine."""

from __future__ import annotations

import os
import signal
import time

import pytest

from rondo.engines.client import HttpEngine
from rondo.errors import EngineError
from tests.contract.conftest import Subjects
from tests.contract.test_engines import bucket
from tests.integration.harness import wait_for
from tests.vllm import named, running, shared_memory

pytestmark = pytest.mark.heavy


def test_a_vllm_killed_in_a_publication_is_one_sentence_and_leaves_nobody(subjects: Subjects):
    subject = subjects.get("vllm", tied=True)
    url = subject.server.url
    everyone = subject.server.descendants()
    held = shared_memory(everyone)
    tensors = {name: parameter.detach() for name, parameter in subject.model.named_parameters()}
    info = bucket(subject.folder / "99", list(tensors), tensors, 99)

    async def scenario(engine: HttpEngine) -> None:
        await engine.pause()
        await engine.start_update()
        os.kill(named(everyone, "VLLM::EngineCore"), signal.SIGKILL)
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            await engine.update(info)  # the server may take a moment to notice

    with pytest.raises(EngineError, match=url) as caught:
        subject.drive(scenario)
    assert "\n" not in str(caught.value)
    wait_for(lambda: not any(map(running, everyone)), seconds=20)
    assert not [name for name in held if os.path.exists(name)]
    wait_for(lambda: subject.server.process.poll() is not None, seconds=20)
    assert subject.server.process.returncode == 1
    assert "error: vLLM" in subject.server.log.read_text().splitlines()[-1]


def test_when_its_parent_is_killed_vllms_workers_end_vllm(subjects: Subjects):
    server = subjects.get("vllm", tied=False).server
    assert server.url
    everyone = server.descendants()
    held = shared_memory(everyone)
    assert len(everyone) >= 2
    assert held
    server.process.kill()
    server.process.wait()
    wait_for(lambda: not any(map(running, everyone)), seconds=20)
    assert not [name for name in held if os.path.exists(name)]
