"""Do periodic and synchronous runs learn alike? The arithmetic task, several seeds each, and how long both take.

    python bench/equivalence.py [--seeds 5] [--periods 30] [--reward 0.8] [--out docs/equivalence.svg] [--json PATH]
    python bench/equivalence.py --read PATH --out docs/equivalence.svg       # from what --json left

Runs alternate between the schedules, so that a noisy machine disturbs both. Seeds are the same for both, but the
engine is not batch-invariant: samples differ here and there, as they would between two synchronous runs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path

import rondo

CONFIG = Path(__file__).resolve().parent.parent / "configs" / "arithmetic.toml"
COLOURS = {"periodic": "#1f6fb4", "synchronous": "#d1641b"}
WIDTH, HEIGHT, MARGIN, GAP = 420, 260, 46, 30


def run(mode: str, seed: int, periods: int) -> dict[str, list[float]]:
    """Per period: mean reward, and seconds since the first began."""
    with tempfile.TemporaryDirectory() as folder:
        settings = [f"run.folder='{folder}/run'", f"run.seed={seed}", f"schedule.mode={mode}"]
        settings += [f"schedule.periods={periods}", "data.eval=''"]
        done = rondo.train(rondo.read_config(CONFIG, settings))
        lines = [json.loads(line) for line in (done / "metrics.jsonl").read_text().splitlines()]
    elapsed, seconds = 0.0, []
    for line in lines:
        elapsed += line["seconds"]
        seconds.append(elapsed)
    return {"reward": [line["reward_mean"] for line in lines], "seconds": seconds}


def time_to(curve: dict[str, list[float]], reward: float) -> tuple[int, float] | None:
    """The first period whose mean over three periods reaches it, and when it was over."""
    values = curve["reward"]
    for period in range(2, len(values)):
        if statistics.fmean(values[period - 2 : period + 1]) >= reward:
            return period + 1, curve["seconds"][period]
    return None


def spread(values: list[float]) -> str:
    return f"{statistics.fmean(values):.1f} ({min(values):.1f} to {max(values):.1f})"


def report(curves: dict[str, list[dict[str, list[float]]]], reward: float) -> str:
    lines = [f"| | periods to reward {reward} | seconds to reward {reward} | seconds per period | final reward |"]
    lines.append("|---|---|---|---|---|")
    for mode, found in curves.items():
        reached = [time_to(curve, reward) for curve in found]
        hit = [one for one in reached if one is not None]
        last = [statistics.fmean(curve["reward"][-3:]) for curve in found]
        pace = [curve["seconds"][-1] / len(curve["seconds"]) for curve in found]
        shown = (spread([float(one[0]) for one in hit]), spread([one[1] for one in hit])) if hit else ("never", "never")
        final = f"{statistics.fmean(last):.3f} ({min(last):.3f} to {max(last):.3f})"
        lines.append(f"| {mode} | {shown[0]} | {shown[1]} | {spread(pace)} | {final} |")
    lines.append(overlap(curves))
    return "\n".join(lines)


def overlap(curves: dict[str, list[dict[str, list[float]]]]) -> str:
    """In how many periods each schedule's mean lies within the other's range over seeds."""
    one, other = (
        [[*values] for values in zip(*(c["reward"] for c in found), strict=True)] for found in curves.values()
    )
    inside = [
        sum(min(b) <= statistics.fmean(a) <= max(b) for a, b in zip(x, y, strict=True))
        for x, y in ((one, other), (other, one))
    ]
    apart = statistics.fmean(statistics.fmean(a) - statistics.fmean(b) for a, b in zip(one, other, strict=True))
    within = statistics.fmean(statistics.stdev(values) for values in [*one, *other])
    return (
        f"\nThe mean of the one lies within the range of the other in {inside[0]} and {inside[1]} of {len(one)} "
        f"periods; the means differ by {apart:+.4f} on average, and seeds of one schedule have a standard deviation of "
        f"{within:.4f}."
    )


def panel(curves, left: float, across: str, label: str) -> list[str]:
    """One plot: every run as a thin line, over periods or seconds."""
    longest = max(
        max(curve["seconds"]) if across == "seconds" else len(curve["reward"]) for f in curves.values() for curve in f
    )
    inner, tall = WIDTH - MARGIN - 10, HEIGHT - 2 * MARGIN

    def x(value: float) -> float:
        return left + MARGIN + inner * value / longest

    def y(reward: float) -> float:
        return MARGIN + tall * (1 - reward)

    drawn = []
    for tick in (0.0, 0.25, 0.5, 0.75, 1.0):
        drawn.append(
            f'<line x1="{x(0):.1f}" x2="{x(longest):.1f}" y1="{y(tick):.1f}" y2="{y(tick):.1f}" stroke="#ddd"/>'
        )
        drawn.append(f'<text x="{x(0) - 6:.1f}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick:g}</text>')
    for share in (0, 0.5, 1):
        place = longest * share
        drawn.append(f'<text x="{x(place):.1f}" y="{HEIGHT - MARGIN + 16}" text-anchor="middle">{place:.0f}</text>')
    drawn.append(f'<text x="{x(longest / 2):.1f}" y="{HEIGHT - 8}" text-anchor="middle">{label}</text>')
    for mode, width in (("synchronous", 4.0), ("periodic", 1.2)):  # the thin ones on top: they often coincide
        for curve in curves[mode]:
            places = curve["seconds"] if across == "seconds" else [float(n + 1) for n in range(len(curve["reward"]))]
            points = " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in zip(places, curve["reward"], strict=True))
            stroke = f'stroke-width="{width}" stroke-opacity="{0.4 if width > 2 else 1}"'
            drawn.append(f'<polyline points="{points}" fill="none" stroke="{COLOURS[mode]}" {stroke}/>')
    return drawn


def plot(curves: dict[str, list[dict[str, list[float]]]]) -> str:
    drawn = panel(curves, 0, "periods", "periods: what is learned") + panel(
        curves, WIDTH + GAP, "seconds", "seconds: what it takes"
    )
    for number, (mode, colour) in enumerate(COLOURS.items()):
        place = MARGIN + 130 * number
        drawn.append(f'<line x1="{place}" x2="{place + 24}" y1="22" y2="22" stroke="{colour}" stroke-width="3"/>')
        drawn.append(f'<text x="{place + 30}" y="26">{mode}</text>')
    body = "\n".join(drawn)
    whole = 2 * WIDTH + GAP
    style = 'font-family="sans-serif" font-size="12"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {whole} {HEIGHT}" {style}>\n'
        f'<rect width="{whole}" height="{HEIGHT}" fill="white"/>\n{body}\n</svg>\n'
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--periods", type=int, default=30)
    parser.add_argument("--reward", type=float, default=0.8)
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--read", type=Path, default=None)
    options = parser.parse_args()
    curves: dict[str, list[dict[str, list[float]]]] = {mode: [] for mode in COLOURS}
    if options.read:
        curves = json.loads(options.read.read_text())
    for seed in range(0 if options.read else options.seeds):
        for mode in COLOURS:
            curves[mode].append(run(mode, seed, options.periods))
            if options.json:
                options.json.write_text(json.dumps(curves))
    print(report(curves, options.reward))
    if options.out:
        options.out.write_text(plot(curves))


if __name__ == "__main__":
    main()
