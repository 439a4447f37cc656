"""Draw docs/img/batches.svg from the table of short requests in docs/planning.md: live bytes over memory."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html import escape
from pathlib import Path

from kvpage.drawing.style import css

ROOT = Path(__file__).resolve().parent.parent
DOCUMENT = ROOT / "docs" / "planning.md"
PICTURE = ROOT / "docs" / "img" / "batches.svg"
COLUMNS = ("unify", "slab", "pools", "nested")
SHOWN = ("unify", "slab", "nested")
LEFT, TOP, BAR, GAP, FULL = 190, 92, 12, 14, 520
ROW = re.compile(r"^\| ([^|]+?) \| " + " \\| ".join([r"(–|\d+ \(\.\d+\))"] * len(COLUMNS)) + r" \|$")


def rows() -> Iterator[tuple[str, dict[str, tuple[int, float]]]]:
    """(model, {strategy: (requests running, live bytes over memory)}) of the table."""
    text = DOCUMENT.read_text()
    table = text[text.index("<!-- begin short -->") : text.index("<!-- end short -->")]
    for line in table.splitlines():
        if match := ROW.match(line):
            cells = dict(zip(COLUMNS, match.groups()[1:], strict=True))
            yield match[1], {name: _numbers(cell) for name, cell in cells.items() if cell != "–"}


def _numbers(cell: str) -> tuple[int, float]:
    running, share = cell.split()
    return int(running), float(share.strip("()"))


def draw() -> str:
    models = list(rows())
    step = len(SHOWN) * BAR + GAP
    height = TOP + len(models) * step + 34
    width = LEFT + FULL + 90
    said = ", ".join(f"{model} {cells['nested'][0]}" for model, cells in models)
    box = f'viewBox="0 0 {width} {height}" class="k" role="img" aria-labelledby="bt bd"'
    what = "Bars: bytes that requests need, over memory. Numbers: requests running."
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {box}>',
        '<title id="bt">Short requests: how much of the memory holds what requests need</title>',
        f'<desc id="bd">Requests running at once in 20 GiB with strategy nested: {escape(said)}.</desc>',
        f"<style>{css('k')}</style>",
        f'<rect class="paper" width="{width}" height="{height}" stroke="none"/>',
        '<text class="bold" x="16" y="30" font-size="17">Requests that run at once in 20 GiB</text>',
        f'<text class="soft" x="16" y="50" font-size="12">prompts of 16-400 tokens, answers of 16-300. {what}</text>',
    ]
    parts += list(_key())
    for place, (model, cells) in enumerate(models):
        parts += _model(TOP + place * step, model, cells)
    parts += list(_axis(height - 26))
    return "\n".join([*parts, "</svg>", ""])


def _key() -> Iterator[str]:
    for place, name in enumerate(SHOWN):
        x = LEFT + place * 110
        yield f'<rect class="h{place}" x="{x}" y="62" width="14" height="12"/>'
        yield f'<text x="{x + 20}" y="73" font-size="12">{name}</text>'


def _model(top: int, model: str, cells: dict[str, tuple[int, float]]) -> Iterator[str]:
    middle = top + len(SHOWN) * BAR / 2
    yield f'<text x="{LEFT - 10}" y="{middle + 4:g}" font-size="12" text-anchor="end">{escape(model)}</text>'
    for place, name in enumerate(SHOWN):
        y = top + place * BAR
        if name not in cells:
            yield f'<text class="soft" x="{LEFT + 6}" y="{y + BAR - 2}" font-size="10">no plan</text>'
            continue
        running, share = cells[name]
        yield f'<rect class="h{place}" x="{LEFT}" y="{y}" width="{share * FULL:g}" height="{BAR}"/>'
        yield f'<text class="soft" x="{LEFT + share * FULL + 5:g}" y="{y + BAR - 2}" font-size="10">{running}</text>'


def _axis(y: int) -> Iterator[str]:
    for percent in range(0, 101, 25):
        x = LEFT + percent / 100 * FULL
        yield f'<path class="line" stroke-opacity="0.25" d="M{x:g} {TOP - 8}V{y}"/>'
        yield f'<text class="soft" x="{x:g}" y="{y + 16}" font-size="11" text-anchor="middle">{percent} %</text>'


def main() -> None:
    PICTURE.write_text(draw())


if __name__ == "__main__":
    main()
