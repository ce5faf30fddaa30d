"""What a run asks of a cluster: one bundle of resources per process, and where rank 0's has to be. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rondo.config import Config

Bundle = Mapping[str, float]
Nodes = Sequence[tuple[str, Bundle]]  # living machines: address, and what each has in all
LITTLE = 0.001  # of the resource by which a cluster names one of its machines


def bundles(config: Config, nodes: Nodes, here: str) -> list[dict[str, float]]:
    """Trainer ranks first, then engines. `here`: the launcher's own address."""
    ray = config.launch.ray
    has_devices = any(node.get(ray.accelerator, 0) for _, node in nodes)
    devices = _wanted(ray.rank_devices, config.trainer.device, 1, has_devices)
    rank = _bundle(ray.rank_cpus, devices, ray.accelerator)
    per_engine = config.engines.tensor_parallel if config.engines.backend == "vllm" else 1
    devices = _wanted(ray.engine_devices, config.engines.device, per_engine, has_devices)
    engine = _bundle(ray.engine_cpus, devices, ray.accelerator)
    count = 0 if config.engines.urls else config.engines.count
    asked = [dict(rank) for _ in range(config.trainer.ranks)] + [dict(engine) for _ in range(count)]
    roomy = any(address == here and _fits(rank, node) for address, node in nodes)
    if lead := ray.lead or (here if roomy else ""):
        asked[0][f"node:{lead}"] = LITTLE
    return asked


def described(asked: Sequence[Bundle]) -> str:
    """2 x (1 CPU, 1 GPU) and 1 x (4 CPU)"""
    counts: dict[str, int] = {}
    for bundle in asked:
        words = ", ".join(f"{amount:g} {name}" for name, amount in bundle.items() if not name.startswith("node:"))
        counts[words] = counts.get(words, 0) + 1
    return " and ".join(f"{count} x ({words})" for words, count in counts.items())


def machines(nodes: Nodes, accelerator: str) -> str:
    """10.0.0.1 (8 CPU, 2 GPU), 10.0.0.2 (8 CPU)"""
    shown = []
    for address, node in nodes:
        words = [f"{node[name]:g} {name}" for name in ("CPU", accelerator) if node.get(name)]
        shown.append(f"{address} ({', '.join(words) or 'nothing'})")
    return ", ".join(shown)


def _wanted(configured: float | None, device: str, default: int, has_devices: bool) -> float:
    if configured is not None:
        return configured
    return default if has_devices and device != "cpu" else 0


def _bundle(cpus: float, devices: float, accelerator: str) -> dict[str, float]:
    return {"CPU": cpus} | ({accelerator: devices} if devices else {})


def _fits(bundle: Bundle, node: Bundle) -> bool:
    return all(node.get(name, 0) >= amount for name, amount in bundle.items())
