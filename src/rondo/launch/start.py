"""Runs a config to its end, by the launcher that it names."""

from __future__ import annotations

from pathlib import Path

from rondo.config import Config


def launch(config: Config, *, resume: bool = False, overwrite: bool = False) -> Path:
    """Returns the run's folder. Raises what stopped it."""
    if config.launch.backend == "ray":
        from rondo.launch.ray import launch as launch_with_ray

        return launch_with_ray(config, resume=resume, overwrite=overwrite)
    from rondo.launch.local import launch as launch_here

    return launch_here(config, resume=resume, overwrite=overwrite)
