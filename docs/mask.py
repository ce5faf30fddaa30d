"""Draws `mask.svg`: what each token of a packed row sees, from the rule that the tests hold every kernel to.

python docs/mask.py
"""

from __future__ import annotations

from pathlib import Path

from rondo.attention.layout import Layout, shared_prompt_layout
from rondo.attention.reference import visible

SEGMENTS = [([1] * 4, [[2] * 3, [3] * 2]), ([4] * 3, [[5] * 2, [6] * 3])]
NAMES = ["prompt 1", "prompt 2", "response 1a", "response 1b", "response 2a", "response 2b"]
CELL, LEFT, TOP = 20, 104, 96

STYLE = """
  text { font: 12px system-ui, sans-serif; fill: #1f2328; }
  .axis { font-weight: 600; }
  .none { fill: #8b949e; fill-opacity: 0.12; }
  .prompt { fill: #2f81f7; }
  .over { fill: #2f81f7; fill-opacity: 0.5; }
  .own { fill: #d4772b; }
  .line { stroke: #8b949e; stroke-width: 1; }
  @media (prefers-color-scheme: dark) { text { fill: #e6edf3; } }
"""
LEGEND = [
    ("prompt", "a prompt over itself, once"),
    ("over", "a response over its prompt"),
    ("own", "a response over itself"),
    ("none", "not seen"),
]


def blocks(layout: Layout) -> list[range]:
    """Prompts, then responses, as they stand in the row."""
    prompts = [range(start, start + length) for start, length in layout.prompts]
    return prompts + [range(span.start, span.start + span.length) for span in layout.spans]


def kind(query: int, key: int, seen: bool, prompt_tokens: int) -> str:
    if not seen:
        return "none"
    if query < prompt_tokens:
        return "prompt"
    return "over" if key < prompt_tokens else "own"


def draw() -> str:
    layout = shared_prompt_layout(SEGMENTS)
    seen = visible(layout).tolist()
    prompt_tokens = sum(length for _, length in layout.prompts)
    total = len(seen)
    side = total * CELL
    width, height = LEFT + side + 230, TOP + side + 44
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'role="img" aria-label="Which keys each token of a packed row of two groups sees">',
        f"<style>{STYLE}</style>",
    ]
    for query in range(total):
        for key in range(total):
            look = kind(query, key, seen[query][key], prompt_tokens)
            x, y = LEFT + key * CELL + 1, TOP + query * CELL + 1
            parts.append(f'<rect class="{look}" x="{x}" y="{y}" width="{CELL - 2}" height="{CELL - 2}" rx="3"/>')
    for name, block in zip(NAMES, blocks(layout), strict=True):
        middle = (block.start + block.stop) / 2 * CELL
        parts.append(f'<text text-anchor="end" x="{LEFT - 10}" y="{TOP + middle + 4:g}">{name}</text>')
        turn = f"rotate(-45 {LEFT + middle:g} {TOP - 10})"
        parts.append(f'<text transform="{turn}" x="{LEFT + middle:g}" y="{TOP - 10}">{name}</text>')
        for x1, y1, x2, y2 in (
            (LEFT + block.stop * CELL, TOP, LEFT + block.stop * CELL, TOP + side),
            (LEFT, TOP + block.stop * CELL, LEFT + side, TOP + block.stop * CELL),
        ):
            if block.stop < total:
                parts.append(f'<line class="line" x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}"/>')
    parts.append(f'<text class="axis" x="8" y="{TOP - 10}">queries ↓ keys →</text>')
    positions = " ".join(map(str, layout.positions_T.tolist()))
    parts.append(f'<text x="{LEFT}" y="{TOP + side + 26}">positions: {positions}</text>')
    for row, (look, meaning) in enumerate(LEGEND):
        y = TOP + row * 26
        parts.append(f'<rect class="{look}" x="{LEFT + side + 28}" y="{y}" width="18" height="18" rx="3"/>')
        parts.append(f'<text x="{LEFT + side + 54}" y="{y + 13}">{meaning}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


if __name__ == "__main__":
    (Path(__file__).parent / "mask.svg").write_text(draw())
