"""Three machines, and the run on one machine that runs on several are compared with."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.hosts.network import Host, Network
from tests.integration.harness import rondo

# The samples do not depend on engines, nor the weights on ranks: any number of machines gives the same bits.
SAME_BITS = (
    "engines.batch_invariant=true", "engines.max_model_len=32", "engines.threads=1", "trainer.accumulation=exact",
    "data.eval=''", "schedule.periods=8",
)  # fmt: skip


@pytest.fixture(scope="session")
def hosts() -> Iterator[list[Host]]:
    network = Network(3)
    try:
        network.open()
        yield network.hosts
    except (OSError, subprocess.CalledProcessError) as error:
        said = getattr(error, "stderr", "") or str(error)
        pytest.skip(f"NO NETWORK NAMESPACES here ({said.strip()}): runs on several machines are not tested")
    finally:
        network.close()


@pytest.fixture(scope="session")
def on_one_machine(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """The model that the local launcher trains."""
    outcome = rondo(tmp_path_factory.mktemp("one"), *SAME_BITS)
    assert outcome.code == 0, outcome.err
    return model_of(outcome.folder)


def model_of(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "model" / "model.safetensors")


def assert_same_bits(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
