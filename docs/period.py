"""Draws `period.svg`: the same groups through the synchronous and the periodic schedule.

python docs/period.py
"""

from __future__ import annotations

from pathlib import Path

GROUPS = [(0, 3.0), (1, 2.2), (2, 4.4), (3, 2.4), (4, 3.6), (5, 2.0), (6, 2.6), (7, 3.2), (8, 2.2)]  # index, seconds
ENGINES, TRAIN, STEP, PUBLISH = 3, 1.0, 0.35, 0.5
UNIT, LANE, LEFT, TOP = 40, 22, 92, 34

STYLE = """
  text { font: 12px system-ui, sans-serif; fill: #768390; }
  .title { font-weight: 600; }
  .in { fill: #ffffff; text-anchor: middle; font-size: 11px; }
  .generate { fill: #2f81f7; } .train { fill: #c4641c; } .step { fill: #a371f7; } .publish { fill: #3d9a50; }
  .lane { fill: #768390; fill-opacity: 0.12; }
"""
Bar = tuple[int, float, float, str, str]  # lane, from, to, class, label


def bars(periodic: bool) -> tuple[list[Bar], float]:
    free = [0.0] * ENGINES
    found: list[Bar] = []
    ready: list[tuple[float, int]] = []
    for index, seconds in GROUPS:
        engine = free.index(min(free))
        found.append((engine, free[engine], free[engine] + seconds, "generate", f"g{index}"))
        free[engine] += seconds
        ready.append((free[engine], index))
    now = 0.0
    for done, index in sorted(ready):
        now = max(now, done if periodic else max(free))
        found.append((ENGINES, now, now + TRAIN, "train", f"g{index}"))
        now += TRAIN
    found.append((ENGINES, now, now + STEP, "step", ""))
    found += [(lane, now + STEP, now + STEP + PUBLISH, "publish", "") for lane in range(ENGINES + 1)]
    return found, now + STEP + PUBLISH


def panel(top: int, title: str, periodic: bool, longest: float) -> list[str]:
    found, end = bars(periodic)
    parts = [f'<text class="title" x="0" y="{top - 12}">{title}</text>']
    for lane in range(ENGINES + 1):
        y = top + lane * (LANE + 6)
        name = f"engine {lane}" if lane < ENGINES else "trainer"
        parts.append(f'<text x="0" y="{y + 15}">{name}</text>')
        parts.append(f'<rect class="lane" x="{LEFT}" y="{y}" width="{longest * UNIT:.0f}" height="{LANE}" rx="3"/>')
    for lane, start, stop, kind, label in found:
        x, y, width = LEFT + start * UNIT, top + lane * (LANE + 6), (stop - start) * UNIT - 1.5
        parts.append(f'<rect class="{kind}" x="{x:.1f}" y="{y}" width="{width:.1f}" height="{LANE}" rx="3"/>')
        if label:
            parts.append(f'<text class="in" x="{x + width / 2:.1f}" y="{y + 15}">{label}</text>')
    if periodic:
        x = LEFT + end * UNIT + 10
        parts.append(f'<text x="{x:.0f}" y="{top + 15}">the next period has begun</text>')
    return parts


def draw() -> str:
    longest = bars(periodic=False)[1]
    second = TOP + (ENGINES + 1) * (LANE + 6) + 44
    legend = second + (ENGINES + 1) * (LANE + 6) + 14
    width, height = int(LEFT + longest * UNIT + 4), legend + 24
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        'aria-label="One period under the synchronous and under the periodic schedule">',
        f"<style>{STYLE}</style>",
        *panel(TOP, "synchronous: train when all is generated", False, longest),
        *panel(second, "periodic: train each group when it is whole", True, longest),
    ]
    x = LEFT
    for kind, words in (
        ("generate", "a group is generated"),
        ("train", "forward and backward"),
        ("step", "one step"),
        ("publish", "new weights to every engine"),
    ):
        parts.append(f'<rect class="{kind}" x="{x}" y="{legend}" width="12" height="12" rx="2"/>')
        parts.append(f'<text x="{x + 18}" y="{legend + 11}">{words}</text>')
        x += 34 + 7 * len(words)
    return "\n".join([*parts, "</svg>"]) + "\n"


if __name__ == "__main__":
    (Path(__file__).parent / "period.svg").write_text(draw())
