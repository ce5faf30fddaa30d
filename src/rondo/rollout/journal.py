"""The journal: what a run saw and did, one file per period, written before it is trained.

    RUN/journal/period-000042.journal = magic, then records
    record = length, kind, CRC-32 of the payload; CRC-32 of these; payload

    header    how it is trained: ranks, token budget, threads, versions of the software
    group     as it was settled: trained (kept) or filtered out; bit for bit what the trainer got
    micro     a round as it was trained: parts as (index, first, last), and the groups skipped
    step      hashes of the gradient and of the weights after it
    end       the period's account; what comes after it is no part of the period

Groups come from the producer's thread, the rest from the trainer's; a lock keeps records whole. Everything is
handed to the operating system before a micro-batch is trained: what was trained is on record even if the process dies.
What power loss may leave, half a record or zeros at the end, is dropped when read; damage anywhere else is an error.
A resumed run carries the groups of the interrupted period over into the new file before it replaces the old one.
"""

from __future__ import annotations

import json
import os
import struct
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

from rondo.errors import JournalError, StorageError
from rondo.rollout.record import pack_group, unpack_group
from rondo.types import Group, MicroBatch, Part, StepHashes

MAGIC = b"rondo journal 1 " + sys.byteorder.encode().ljust(8)
FRAME = struct.Struct("<IcI")  # length, kind, CRC of the payload
CHECK = struct.Struct("<I")  # CRC of the frame
BUFFER = 1 << 16  # a write to the operating system lets other threads in: not for every group
PENDING = 64  # groups
PENDING_SECONDS = 0.5  # where groups come slowly, each is worth a write of its own
ALIKE = ("ranks", "threads", "micro_tokens")  # of the header: what decides about bits beside the settings
HEADER, GROUP, MICRO, STEP, END = b"H", b"G", b"M", b"S", b"E"


@dataclass(frozen=True, kw_only=True)
class RecordedMicro:
    """A round: which responses of which groups went through it, in order."""

    parts: tuple[tuple[int, int, int], ...]  # index, first, last
    skipped: tuple[int, ...]  # indexes

    def rebuilt(self, groups: Mapping[int, Group]) -> MicroBatch:
        """As the trainer got it."""
        return MicroBatch(
            parts=tuple(Part(group=groups[index], first=first, last=last) for index, first, last in self.parts),
            skipped=tuple(groups[index] for index in self.skipped),
        )


@dataclass(frozen=True, kw_only=True)
class RecordedUpdate:
    micros: tuple[RecordedMicro, ...]
    hashes: StepHashes | None  # None: the run wrote none


@dataclass(frozen=True, kw_only=True)
class RecordedPeriod:
    period: int
    header: Mapping[str, Any]
    groups: tuple[Group, ...]  # kept ones, in order of arrival
    filtered: tuple[Group, ...]  # settled, but not trained
    updates: tuple[RecordedUpdate, ...]  # those that were stepped
    end: Mapping[str, Any] | None = None  # the period's account; None: it was interrupted
    unfinished: tuple[RecordedMicro, ...] = field(default=())  # micro-batches of an update without its step

    @property
    def complete(self) -> bool:
        return self.end is not None

    @property
    def settled(self) -> tuple[tuple[Group, bool], ...]:
        """Every group, in prompt order, and whether it was kept."""
        both = [(group, True) for group in self.groups] + [(group, False) for group in self.filtered]
        return tuple(sorted(both, key=lambda pair: pair[0].index))

    def rebuilt(self, finish: Callable[[list[Group]], list[Group]] | None) -> list[list[MicroBatch]]:
        """The updates that were stepped, as they were trained; `finish` is what was done to the period's groups when
        all were there."""
        kept = [group for group, trained in self.settled if trained]
        groups = {group.index: group for group in (finish(kept) if finish else kept)}
        return [[micro.rebuilt(groups) for micro in update.micros] for update in self.updates]


class Journal:
    def __init__(
        self,
        *,
        folder: Path,
        header: Mapping[str, Any],
        keep: int = 0,
        published: Callable[[], str] = str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder = folder / "journal"
        self._header = header
        self._keep = keep
        self._published = published  # checksum of the weights that groups are sampled from
        self._clock = clock
        self._lock = threading.Lock()
        self._file: IO[bytes] | None = None
        self._pending: list[tuple[Group, bool]] = []  # settled, not yet written, not yet trained
        self._written_at = clock()
        self._carried: RecordedPeriod | None = None
        self._held: set[int] = set()  # indexes of the open period's groups that came with it

    def carry(self, interrupted: RecordedPeriod) -> None:
        """The groups of this period need not be written again: its new file will begin with them."""
        self._carried = interrupted

    def group(self, group: Group, kept: bool) -> None:
        """Called for every settled group, before anybody can train it. Written with the next micro-batch or step, when
        many wait, or after a while: one after the other they cost a fraction of what each costs in between other
        work."""
        with self._lock:
            if self._file is None:
                self._begin(group.period)
            if group.index in self._held:
                return
            self._pending.append((group, kept))
            late = self._clock() - self._written_at >= PENDING_SECONDS
            if late or len(self._pending) >= PENDING:
                self._write_pending(flush=late)

    def micro(self, micro: MicroBatch) -> None:
        parts = [(part.group.index, part.first, part.last) for part in micro.parts]
        skipped = [group.index for group in micro.skipped]
        self._write_json(MICRO, [parts, skipped])

    def step(self, hashes: StepHashes | None) -> None:
        self._write_json(STEP, hashes and asdict(hashes))

    def finish(self, account: Mapping[str, Any]) -> None:
        """The period is over and its account balances: on disk, even if the power fails."""
        self._write_json(END, account)
        with self._lock:
            if self._file is not None:
                os.fsync(self._file.fileno())
        self.close()
        for old in recorded_paths(self._folder.parent)[: -self._keep] if self._keep else ():
            old.unlink()

    def close(self) -> None:
        with self._lock:
            if self._file is None:
                return
            try:
                self._write_pending(flush=True)
            finally:
                with suppress(OSError):  # what it could not write was said by the flush
                    self._file.close()
                self._file = None

    def _begin(self, period: int) -> None:
        carried = self._carried.settled if self._carried and self._carried.period == period else ()
        self._held = {group.index for group, _ in carried}
        try:
            self._open(period, carried)
        except OSError as error:
            raise self._unwritable(error) from error

    def _open(self, period: int, carried: Sequence[tuple[Group, bool]]) -> None:
        """Written aside first: until the new file holds what the old one did, the old one stays."""
        self._folder.mkdir(exist_ok=True)
        path = _path(self._folder.parent, period)
        aside = path.with_suffix(".partial")
        self._file = aside.open("wb", buffering=BUFFER)
        self._file.write(MAGIC)
        header = {**self._header, "period": period, "published": self._published()}
        self._write(HEADER, json.dumps(header).encode())
        for group, kept in carried:
            self._write(GROUP, pack_group(group, kept))
        self._file.flush()
        if carried:
            os.fsync(self._file.fileno())
        os.replace(aside, path)

    def _write_json(self, kind: bytes, record: object) -> None:
        with self._lock:
            self._write_pending(flush=False)
            self._write(kind, json.dumps(record).encode())
            self._flush()

    def _write_pending(self, *, flush: bool) -> None:
        for group, kept in self._pending:
            self._write(GROUP, pack_group(group, kept))
        self._pending.clear()
        self._written_at = self._clock()
        if flush:
            self._flush()

    def _write(self, kind: bytes, payload: bytes) -> None:
        if self._file is None:
            raise JournalError("the journal was asked to write before the period's first group: a bug in the producer")
        frame = FRAME.pack(len(payload), kind, zlib.crc32(payload))
        try:
            self._file.write(b"".join((frame, CHECK.pack(zlib.crc32(frame)), payload)))
        except OSError as error:
            raise self._unwritable(error) from error

    def _flush(self) -> None:
        try:
            if self._file is not None:
                self._file.flush()
        except OSError as error:
            raise self._unwritable(error) from error

    def _unwritable(self, error: OSError) -> StorageError:
        return StorageError(
            f"{self._folder} cannot be written: {error.strerror}: make room and go on with --resume, or set "
            "journal.enabled = false"
        )


def read_period(folder: Path, period: int) -> RecordedPeriod:
    """What the run in `folder` wrote about this period; raises JournalError when it did not, or when it is damaged."""
    path = _path(folder, period)
    if not path.exists():
        held = recorded_periods(folder)
        known = f"it holds {held[0]} to {held[-1]}" if held else "it has none: journal.enabled was off"
        raise JournalError(f"{folder} has no journal of period {period}: {known}")
    header: dict[str, Any] | None = None
    end: dict[str, Any] | None = None
    groups: list[Group] = []
    filtered: list[Group] = []
    updates: list[RecordedUpdate] = []
    micros: list[RecordedMicro] = []
    for kind, payload in _records(path):
        if end is not None or (header is None) != (kind == HEADER):
            raise JournalError(f"{path} is damaged: its records are out of order")
        if kind == HEADER:
            header = json.loads(payload)
        elif kind == GROUP:
            group, kept = unpack_group(payload)
            (groups if kept else filtered).append(group)
        elif kind == MICRO:
            parts, skipped = json.loads(payload)
            micros.append(
                RecordedMicro(parts=tuple((i, first, last) for i, first, last in parts), skipped=tuple(skipped))
            )
        elif kind == STEP:
            hashes = json.loads(payload)
            updates.append(RecordedUpdate(micros=tuple(micros), hashes=hashes and StepHashes(**hashes)))
            micros = []
        elif kind == END:
            end = json.loads(payload)
    return RecordedPeriod(
        period=period,
        header=header or {},
        groups=tuple(groups),
        filtered=tuple(filtered),
        updates=tuple(updates),
        end=end,
        unfinished=tuple(micros),
    )


def recorded_paths(folder: Path) -> list[Path]:
    """Oldest first."""
    return sorted((folder / "journal").glob("period-*.journal"))


def recorded_periods(folder: Path) -> list[int]:
    return [int(path.stem.removeprefix("period-")) for path in recorded_paths(folder)]


def forget_periods(folder: Path, start: int) -> None:
    """Drop the journal of periods that a resumed run will train again."""
    for period in recorded_periods(folder):
        if period >= start:
            _path(folder, period).unlink()


def _path(folder: Path, period: int) -> Path:
    return folder / "journal" / f"period-{period:06d}.journal"


def _records(path: Path) -> Iterator[tuple[bytes, bytes]]:
    """All whole records; a torn one is tolerated at the end alone."""
    data = path.read_bytes()
    if not MAGIC.startswith(data[: len(MAGIC)]):
        raise JournalError(f"{path} is no journal that this version on this machine can read")
    cursor = len(MAGIC)
    while len(data) - cursor >= FRAME.size + CHECK.size:
        frame = data[cursor : cursor + FRAME.size]
        length, kind, expected = FRAME.unpack(frame)
        start = cursor + FRAME.size + CHECK.size
        payload = data[start : start + length]
        whole = CHECK.unpack_from(data, cursor + FRAME.size)[0] == zlib.crc32(frame)
        if whole and len(payload) == length and zlib.crc32(payload) == expected:
            yield kind, payload
            cursor = start + length
            continue
        if any(data[start + length if whole else start :]):  # more than the zeros of an unwritten block
            raise JournalError(f"{path} is damaged at byte {cursor}: restore it from a copy, or remove the file")
        return


def covered(micros: Sequence[RecordedMicro]) -> dict[int, list[int]]:
    """Of every group's index, which of its responses went through a micro-batch, as often as they did."""
    seen: dict[int, list[int]] = {}
    for micro in micros:
        for index, first, last in micro.parts:
            seen.setdefault(index, []).extend(range(first, last))
    return seen
