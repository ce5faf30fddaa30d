"""Reading data files, and the endless order in which rows are drawn."""

from __future__ import annotations

import datetime
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from rondo.errors import DataError
from rondo.prompts.dataset import Dataset, Row, read_rows

sizes = st.integers(1, 40)
seeds = st.integers(0, 2**63)


def make_dataset(size: int, seed: int, shuffle: bool = True) -> Dataset:
    rows = [Row(ordinal=place, prompt=f"row {place}", columns={"place": place}) for place in range(size)]
    return Dataset(rows=rows, seed=seed, shuffle=shuffle)


def places(rows: list[Row]) -> list[int]:
    return [row.columns["place"] for row in rows]


def write(folder: Path, *lines: str) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


# The order


@given(size=sizes, seed=seeds, lap=st.integers(0, 5))
def test_every_pass_is_a_permutation_of_all_rows(size: int, seed: int, lap: int) -> None:
    dataset = make_dataset(size, seed)
    rows = [dataset.row_at(ordinal) for ordinal in range(lap * size, (lap + 1) * size)]
    assert sorted(places(rows)) == list(range(size))
    assert [row.ordinal for row in rows] == list(range(lap * size, (lap + 1) * size))


@given(size=sizes, seed=seeds, ordinals=st.lists(st.integers(0, 300), max_size=30))
def test_a_row_depends_on_seed_and_ordinal_alone(size: int, seed: int, ordinals: list[int]) -> None:
    walked, jumped = make_dataset(size, seed), make_dataset(size, seed)
    stream = walked.take(301)
    assert [jumped.row_at(ordinal) for ordinal in ordinals] == [stream[ordinal] for ordinal in ordinals]


@given(size=sizes, seed=seeds, before=st.integers(0, 90), after=st.integers(0, 90))
def test_resuming_at_the_cursor_equals_going_on(size: int, seed: int, before: int, after: int) -> None:
    whole, first, second = (make_dataset(size, seed) for _ in range(3))
    head = first.take(before)
    second.cursor = first.cursor
    assert head + second.take(after) == whole.take(before + after)
    assert second.cursor == whole.cursor == before + after


def test_passes_and_seeds_differ_in_order() -> None:
    dataset = make_dataset(50, seed=1)
    first, second = places(dataset.take(50)), places(dataset.take(50))
    assert first != second
    assert first != places(make_dataset(50, seed=2).take(50))


def test_the_order_is_the_same_on_every_machine() -> None:
    assert places(make_dataset(8, seed=7).take(16)) == [4, 0, 1, 3, 7, 2, 6, 5, 1, 2, 6, 5, 0, 3, 4, 7]


def test_the_order_does_not_depend_on_python_s_own_hash_seed() -> None:
    program = (
        "from rondo.prompts.dataset import Dataset, Row\n"
        "rows = [Row(ordinal=i, prompt=str(i), columns={}) for i in range(20)]\n"
        "print(*(row.prompt for row in Dataset(rows=rows, seed=3, shuffle=True).take(40)))\n"
    )
    orders = {
        subprocess.run(
            [sys.executable, "-c", program], env={"PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout
        for seed in ("1", "2")
    }
    assert len(orders) == 1


def test_without_shuffling_rows_come_in_the_file_s_order() -> None:
    assert places(make_dataset(3, seed=1, shuffle=False).take(7)) == [0, 1, 2, 0, 1, 2, 0]


# The files


def test_rows_keep_the_prompt_apart_from_the_other_columns(tmp_path: Path) -> None:
    path = write(tmp_path, '{"question": "1+1=", "answer": "2"}', "", '{"question": "é", "level": [1, null]}')
    assert read_rows(path, "question") == (
        Row(ordinal=0, prompt="1+1=", columns={"answer": "2"}),
        Row(ordinal=1, prompt="é", columns={"level": [1, None]}),
    )


def test_a_prompt_can_be_chat_messages(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": ""}, {"role": "user", "content": "hi"}]
    (row,) = read_rows(write(tmp_path, json.dumps({"prompt": messages})))
    assert row.prompt == tuple(messages)


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ('{"prompt": "a" "b"}', r"rows.jsonl:2: not valid JSON: Expecting ',' delimiter at column 16"),
        ("[1, 2]", "rows.jsonl:2: a list: every line must be a JSON object"),
        ('{"promt": "a", "answer": 1}', r"rows.jsonl:2: no column prompt \(data.prompt\).*: promt, answer"),
        ("{}", "no column prompt.*columns: none"),
        ('{"prompt": 5}', "rows.jsonl:2: prompt = 5: a prompt is a string or a list of messages"),
        ('{"prompt": ""}', "prompt = '': .*not empty"),
        ('{"prompt": []}', r"prompt = \[\]: .*not empty"),
        ('{"prompt": ["hi"]}', "with role and content"),
        ('{"prompt": [{"role": "user"}]}', "with role and content"),
        ('{"prompt": [{"role": "user", "content": 1}]}', "with role and content"),
    ],
)
def test_a_bad_line_is_named_with_what_is_wrong(tmp_path: Path, line: str, complaint: str) -> None:
    with pytest.raises(DataError, match=complaint):
        read_rows(write(tmp_path, '{"prompt": "good"}', line))


def test_a_line_that_is_not_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_bytes(b'{"prompt": "\xff\xfe"}\n')
    with pytest.raises(DataError, match=r"rows.jsonl:1: not valid UTF-8: .* at byte 13"):
        read_rows(tmp_path / "rows.jsonl")


@pytest.mark.parametrize("name", ["absent.jsonl", "absent.parquet"])
def test_a_missing_file_is_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(DataError, match=f"{name}: .*[Nn]o such file.*: give the path of a JSONL or Parquet file"):
        read_rows(tmp_path / name)


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"rows.jsonl holds no rows"):
        read_rows(write(tmp_path, "", " "))


def write_parquet(folder: Path, **columns: list[Any]) -> Path:
    parquet.write_table(pyarrow.table(columns), folder / "rows.parquet")
    return folder / "rows.parquet"


def test_parquet_reads_like_jsonl(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "hi"}]
    path = write_parquet(tmp_path, prompt=[messages, messages], answer=["a", "b"])
    assert read_rows(path)[1] == Row(ordinal=1, prompt=tuple(messages), columns={"answer": "b"})


def test_a_parquet_row_without_a_prompt_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"rows.parquet: row 2: prompt = None"):
        read_rows(write_parquet(tmp_path, prompt=["a", None]))


def test_a_parquet_column_that_json_cannot_hold_is_refused(tmp_path: Path) -> None:
    path = write_parquet(tmp_path, prompt=["a"], day=[datetime.date(2024, 1, 1)])
    with pytest.raises(DataError, match=r"row 1: column day: .*date.*: store it as text or numbers, or drop it"):
        read_rows(path)


def test_a_file_that_is_only_called_parquet_is_refused(tmp_path: Path) -> None:
    (tmp_path / "rows.parquet").write_text("no such thing\n")
    with pytest.raises(DataError, match=r"rows.parquet: not a Parquet file"):
        read_rows(tmp_path / "rows.parquet")


def test_parquet_without_pyarrow_says_what_to_install(tmp_path: Path) -> None:
    # A process whose import path has a broken pyarrow in front: to Python, one that is not installed.
    (tmp_path / "pyarrow.py").write_text("raise ImportError\n")
    program = (
        "from pathlib import Path; from rondo.errors import DataError\n"
        "from rondo.prompts.dataset import read_rows\n"
        "try: read_rows(Path('x.parquet'))\n"
        "except DataError as error: print(error)\n"
    )
    told = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert told.stdout == "x.parquet: reading Parquet needs pyarrow: pip install 'rondo-rl[data]'\n"
