"""Rows of the data as rendered prompts, in the stream's order."""

from __future__ import annotations

from collections.abc import Callable

from rondo.prompts.dataset import Dataset
from rondo.prompts.template import Template
from rondo.types import Prompt


class PromptStream:
    def __init__(self, *, dataset: Dataset, template: Template) -> None:
        self.dataset = dataset
        self._template = template

    def take(self, count: int) -> list[Prompt]:
        return [self._template.render(row) for row in self.dataset.take(count)]

    def ahead(self) -> Callable[[int], Prompt]:
        """The prompts from the cursor on, by their distance from it; the cursor stays."""
        start = self.dataset.cursor
        return lambda distance: self._template.render(self.dataset.row_at(start + distance))

    def advance(self, count: int) -> None:
        self.dataset.cursor += count
