"""Rows of the data as rendered prompts, in the stream's order."""

from __future__ import annotations

from rondo.prompts.dataset import Dataset
from rondo.prompts.template import Template
from rondo.types import Prompt


class PromptStream:
    def __init__(self, *, dataset: Dataset, template: Template) -> None:
        self.dataset = dataset
        self._template = template

    def take(self, count: int) -> list[Prompt]:
        return [self._template.render(row) for row in self.dataset.take(count)]
