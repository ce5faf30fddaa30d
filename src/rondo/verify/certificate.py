"""The verdict: what each mode promises, whether it was kept, as a table for people and as certificate.json."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from rondo.config import Config
from rondo.observe.ledger import software
from rondo.rollout.journal import RecordedPeriod
from rondo.verify.compare import SPREAD, Difference, Rounding, bound
from rondo.verify.plan import Check, Results

WORST = 5  # tensors that are named per check
BOUND = f"|v - g| <= gamma(n - 1) S + {1 + SPREAD:g} e for every tensor; docs/verify.md derives it"


@dataclass(frozen=True, kw_only=True)
class Line:
    """One check over all periods."""

    name: str
    what: str  # gradient | weights | hashes | journal
    promise: str  # bits | bound | none
    holds: bool
    comparisons: int  # updates or periods
    elements: int = 0
    differing: int = 0  # elements whose bits differ
    ulps: int = 0
    relative: float = 0.0  # the worst tensor's |v - g| / |g|
    of_bound: float | None = None  # the worst tensor's share of its bound
    worst: tuple[dict[str, Any], ...] = ()
    remark: str = ""


@dataclass(frozen=True, kw_only=True)
class Certificate:
    run: str
    mode: dict[str, Any]
    software: dict[str, dict[str, str]]  # as recorded, and now
    weights: dict[str, str]  # hashes before the first period and after the last
    lines: tuple[Line, ...]
    on_policy: dict[str, Any]
    seconds: float
    timings: dict[str, float]  # of the parts of it
    bound: str = BOUND

    @property
    def holds(self) -> bool:
        return all(line.holds for line in self.lines)

    def write(self, path: Path) -> None:
        record = {"verdict": "holds" if self.holds else "broken", **asdict(self)}
        path.write_text(json.dumps(record, indent=2) + "\n")

    def show(self, console: Console) -> None:
        mode = self.mode
        title = (
            f"periodic = synchronous?  {mode['order']} order, {mode['accumulation']} sums, {mode['periods']} periods"
        )
        table = Table(title=title, title_justify="left", box=box.SIMPLE)
        for column in ("against the synchronous", "", "promised", "differing", "max ulp", "worst", "of bound", ""):
            table.add_column(
                column, justify="left" if column in ("against the synchronous", "promised", "") else "right"
            )
        for line in self.lines:
            measured = line.what in ("gradient", "weights")
            table.add_row(
                f"{line.what}, {line.name}",
                f"x{line.comparisons}",
                {"bits": "same bits", "bound": "rounding", "none": "nothing"}[line.promise],
                _percent(line.differing, line.elements) if measured else "",
                f"{line.ulps:.2g}" if measured else "",
                f"{line.relative:.1e}" if measured else "",
                "" if line.of_bound is None else f"{line.of_bound:.2g}",
                "[green]holds[/]" if line.holds else "[red]BROKEN[/]",
            )
        console.print(table)
        for line in self.lines:
            if not line.holds:
                worst = "; ".join(f"{tensor['name']} {tensor['relative']:.1e}" for tensor in line.worst)
                console.print(f"[red]{line.name}[/] ({line.what}): {line.remark or 'worst: ' + worst}")
        console.print(
            f"{'[green]Holds[/]' if self.holds else '[red]BROKEN[/]'}: weights {self.weights['before']} -> "
            f"{self.weights['after']}, {mode['groups']} groups, {self.seconds:.0f} s",
            f"the certificate is {self.run}/certificate.json",
            sep="\n",
            soft_wrap=True,
        )


def _percent(part: int, whole: int) -> str:
    return "0" if not part else f"{100 * part / whole:.2g} %"


def promise(config: Config, kind: str, what: str, device: str) -> str:
    """What the mode says about a change of order, packing or rank count: the same bits, a bound, or nothing."""
    exact, ordered = config.trainer.accumulation == "exact", config.schedule.order == "prompt"
    if device == "cpu" and ((kind == "order" and (exact or ordered)) or (kind == "ranks" and exact)):
        return "bits"
    # A rounding in a near-zero gradient can move a weight by a whole step of Adam: weights are reported.
    return "bound" if what == "gradient" else "none"


def judge(
    *,
    folder: Path,
    config: Config,
    periods: Sequence[RecordedPeriod],
    violations: Sequence[str],
    results: Results,
    seconds: float,
) -> Certificate:
    lines = [
        Line(name="one version, fixed set, each once", what="journal", promise="bits", holds=not violations,
             comparisons=len(periods), remark="; ".join(violations[:4])),
        _reproduction(results),
    ]  # fmt: skip
    for name, what in dict.fromkeys((check.name, check.what) for check in results.checks):
        same = [check for check in results.checks if (check.name, check.what) == (name, what)]
        lines.append(_line(same, promise(config, same[0].kind, what, results.device), results))
    header = periods[0].header
    last = results.reproduced[-1].found or {}
    return Certificate(
        run=str(folder),
        mode={
            "schedule": config.schedule.mode,
            "order": config.schedule.order,
            "accumulation": config.trainer.accumulation,
            "updates_per_period": config.schedule.updates_per_period,
            "periods": len(periods),
            "first_period": periods[0].period,
            "groups": sum(len(period.groups) for period in periods),
            "ranks": header["ranks"],
            "threads": header["threads"],
            "engines": len({group.answer.engine for period in periods for group in period.groups}),
            "device": results.device,
        },
        software={"recorded": dict(header["software"]), "now": software()},
        weights={"before": results.before, "after": str(last.get("weights", ""))},
        lines=tuple(lines),
        on_policy=_on_policy(folder),
        seconds=seconds,
        timings={name: round(spent, 3) for name, spent in results.seconds.items()},
    )


def _reproduction(results: Results) -> Line:
    wrong = [f"period {found.period} update {found.update}" for found in results.reproduced if not found.same]
    return Line(
        name="recorded order and packs",
        what="hashes",
        promise="bits" if results.device == "cpu" else "none",
        holds=not wrong or results.device != "cpu",
        comparisons=len(results.reproduced),
        remark=f"other bits than recorded in {', '.join(wrong[:6])}: another software, CPU or thread count, or a change"
        if wrong
        else "",
    )


def _line(checks: Sequence[Check], promised: str, results: Results) -> Line:
    found = [
        (tensor, check, results.rounding.get(f"{check.period}-{check.update}", {}).get(tensor.name))
        for check in checks
        for tensor in check.tensors
    ]
    shares = [
        _share(tensor, check, rounding) for tensor, check, rounding in found if check.what == "gradient" and rounding
    ]
    differing = sum(tensor.differing for tensor, _, _ in found)
    of_bound = max(shares, default=None)
    within = not differing or (of_bound is not None and of_bound <= 1)
    holds = {"bits": not differing, "bound": within, "none": True}[promised]
    worst = sorted(found, key=lambda one: -one[0].relative)[:WORST]
    return Line(
        name=checks[0].name,
        what=checks[0].what,
        promise=promised,
        holds=holds,
        comparisons=len(checks),
        elements=sum(tensor.elements for tensor, _, _ in found),
        differing=differing,
        ulps=max(tensor.ulps for tensor, _, _ in found),
        relative=max(tensor.relative for tensor, _, _ in found),
        of_bound=of_bound,
        worst=tuple(
            {**asdict(tensor), "relative": tensor.relative, "period": check.period, "update": check.update}
            for tensor, check, _ in worst
        ),
    )


def _share(tensor: Difference, check: Check, rounding: Rounding) -> float:
    """Of the bound that the distance takes up; more than 1 is more than rounding can explain."""
    if not tensor.distance:
        return 0.0
    allowed = bound(rounding, check.micros)
    return tensor.distance / allowed if allowed else float("inf")


def _on_policy(folder: Path) -> dict[str, Any]:
    """The certificate that the run wrote as it went, in short."""
    path = folder / "certificate.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    gaps = [line["logp_gap_max"] for line in lines if line["logp_gap_max"] is not None]
    return {
        "periods": len(lines),
        "groups": sum(line["groups"] for line in lines),
        "groups_filtered": sum(line["groups_filtered"] for line in lines),
        "logp_gap_max": max(gaps, default=None),
    }
