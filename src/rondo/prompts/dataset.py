"""The data: rows from a file, and the endless, seeded, resumable order in which they are drawn."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from rondo.errors import DataError

Messages = tuple[Mapping[str, Any], ...]  # chat: each with a role and a content


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One row of the data."""

    ordinal: int  # place in the endless stream (or in the file, as it was read)
    prompt: str | Messages
    columns: Mapping[str, Any]  # all others, for the rewards


class Dataset:
    """An endless stream of rows. Which row stands where is a function of the seed and the place alone."""

    def __init__(self, *, rows: Sequence[Row], seed: int, shuffle: bool) -> None:
        self.cursor = 0  # ordinal of the next row to be taken; set it to resume
        self._rows = rows
        self._seed = seed
        self._shuffle = shuffle
        self._order = lru_cache(maxsize=2)(self._draw)  # a take may reach into the next pass

    def __len__(self) -> int:
        return len(self._rows)

    def row_at(self, ordinal: int) -> Row:
        lap, place = divmod(ordinal, len(self._rows))
        return replace(self._rows[self._order(lap)[place]], ordinal=ordinal)

    def take(self, n: int) -> list[Row]:
        rows = [self.row_at(ordinal) for ordinal in range(self.cursor, self.cursor + n)]
        self.cursor += n
        return rows

    def _draw(self, lap: int) -> Sequence[int]:
        if not self._shuffle:
            return range(len(self._rows))
        order = list(range(len(self._rows)))
        digest = hashlib.sha256(f"order {self._seed} {lap}".encode()).digest()
        random.Random(int.from_bytes(digest[:8], "big")).shuffle(order)
        return order


def read_rows(path: Path, prompt: str = "prompt") -> tuple[Row, ...]:
    """The rows of a JSONL or Parquet file in its order; `prompt` names the column that holds the prompt."""
    records = _parquet(path) if path.suffix == ".parquet" else _jsonl(path)
    try:
        rows = tuple(_row(record, prompt, ordinal, where) for ordinal, (where, record) in enumerate(records))
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}: give the path of a JSONL or Parquet file") from None
    if not rows:
        raise DataError(f"{path} holds no rows: it needs at least one")
    return rows


def _row(record: dict[str, Any], column: str, ordinal: int, where: str) -> Row:
    if column not in record:
        found = ", ".join(record) or "none"
        raise DataError(f"{where}: no column {column} (data.prompt); the row's columns: {found}")
    prompt = record[column]
    columns = {name: value for name, value in record.items() if name != column}
    if isinstance(prompt, str) and prompt:
        return Row(ordinal=ordinal, prompt=prompt, columns=columns)
    if isinstance(prompt, list) and prompt and all(map(_is_message, prompt)):
        return Row(ordinal=ordinal, prompt=tuple(prompt), columns=columns)
    shown = repr(prompt) if len(repr(prompt)) <= 60 else f"{repr(prompt)[:60]}..."
    raise DataError(
        f"{where}: {column} = {shown}: a prompt is a string or a list of messages with role and content, and not empty"
    )


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(value.get(key), str) for key in ("role", "content"))


def _jsonl(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            where = f"{path}:{number}"
            try:
                record = json.loads(line)
            except json.JSONDecodeError as error:
                raise DataError(f"{where}: not valid JSON: {error.msg} at column {error.colno}") from None
            except UnicodeDecodeError as error:
                raise DataError(f"{where}: not valid UTF-8: {error.reason} at byte {error.start + 1}") from None
            if not isinstance(record, dict):
                raise DataError(f"{where}: a {type(record).__name__}: every line must be a JSON object")
            yield where, record


def _parquet(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        from pyarrow import ArrowInvalid, parquet
    except ImportError:
        raise DataError(f"{path}: reading Parquet needs pyarrow: pip install 'rondo-rl[data]'") from None
    try:
        with path.open("rb") as file:  # opened here: what pyarrow says of a missing file is its path
            table = parquet.read_table(file)
    except ArrowInvalid as error:
        raise DataError(f"{path}: not a Parquet file: {error}") from None
    for number, record in enumerate(table.to_pylist(), start=1):
        _check_plain(f"{path}: row {number}", record)
        yield f"{path}: row {number}", record


def _check_plain(where: str, record: dict[str, Any]) -> None:
    """Columns travel to the reward workers and into the journal as JSON, which knows no dates or bytes."""
    for name, value in record.items():
        try:
            json.dumps(value)
        except TypeError as error:
            raise DataError(f"{where}: column {name}: {error}: store it as text or numbers, or drop it") from None
