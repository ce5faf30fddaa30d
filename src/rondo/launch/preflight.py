"""What can be found out before anything starts: model, data and rewards are there and make sense."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from rondo.config import Config, asset_or_path
from rondo.engines.vllm import check_python, find_python
from rondo.errors import ConfigError, ModelError
from rondo.prompts.dataset import read_rows
from rondo.prompts.template import Template
from rondo.rewards.runner import check_functions


def check(config: Config) -> None:
    """Raises the first problem as one sentence."""
    check_model(config.model.path)
    read_rows(Path(asset_or_path(config.data.train)), config.data.prompt)
    if config.data.eval:
        read_rows(Path(asset_or_path(config.data.eval)), config.data.prompt)
    check_functions(config.rewards.functions)
    if config.engines.backend == "vllm" and not config.engines.urls:
        check_python(find_python(config.engines.python))
    wanted = {*config.trainer.cpus, *(cpu for cpus in config.engines.cpus for cpu in cpus)}
    if missing := wanted - os.sched_getaffinity(0):
        raise ConfigError(f"trainer.cpus or engines.cpus name core {min(missing)}, which this process may not use")
    if wanted and shutil.which("taskset") is None:
        raise ConfigError(
            "trainer.cpus and engines.cpus need the taskset command (util-linux): install it or unset them"
        )


def check_prompts(config: Config) -> None:
    """Every prompt renders and fits the model's context; takes a while for large files."""
    from transformers import AutoConfig, AutoTokenizer

    path = asset_or_path(config.model.path)
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
        context = AutoConfig.from_pretrained(path).max_position_embeddings
    except (OSError, ValueError) as error:
        raise ModelError(f"model.path = {path} cannot be loaded: {str(error).splitlines()[0]}") from None
    template = Template(
        tokenizer=tokenizer,
        max_new_tokens=config.rollout.max_new_tokens,
        max_context=config.engines.max_model_len or context,
    )
    for file in filter(None, (config.data.train, config.data.eval)):
        for row in read_rows(Path(asset_or_path(file)), config.data.prompt):
            template.render(row)


def check_model(name: str) -> None:
    path = Path(asset_or_path(name))
    if path.is_dir():
        for needed in ("config.json", "tokenizer_config.json"):
            if not (path / needed).exists():
                raise ModelError(f"model.path = {name}: the folder has no {needed}: it is no Hugging Face model")
        return
    if path.is_absolute() or name.startswith((".", "rondo:")) or name.count("/") != 1:
        raise ModelError(f"model.path = {name}: there is no such folder")
    # owner/name may be on the hub; loading it will tell
