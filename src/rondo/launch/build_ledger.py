"""Who keeps the books of a run, from the config: the ledger, and the journal where it writes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from rondo.config import Config
from rondo.launch.resume import journal_header
from rondo.observe.ledger import Ledger, LedgerSettings
from rondo.rollout.journal import Journal
from rondo.types import Publication


def build_ledger(
    config: Config,
    folder: Path,
    ranks: int,
    *,
    published: Callable[[], Publication | None],
    measured: Callable[[], Mapping[str, float]],
    retried: Callable[[], int],
) -> tuple[Ledger, Journal | None]:
    def checksum() -> str:
        held = published()
        return held.checksum if held else ""

    journal = None
    if config.journal.enabled:
        header = journal_header(config, ranks)
        journal = Journal(folder=folder, header=header, keep=config.journal.keep, published=checksum)
    settings = LedgerSettings(
        groups=config.rollout.prompts_per_period,
        updates=config.schedule.updates_per_period,
        filtered=config.algorithm.filter != "none",
        max_logp_gap=config.logp_gap_limit,
    )
    ledger = Ledger(
        folder=folder, journal=journal, settings=settings, published=published, measured=measured, retried=retried
    )
    return ledger, journal
