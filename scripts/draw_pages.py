"""Draw docs/pages.svg, the picture in the README, from the plan of examples/mimo.json."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import kvpage
from kvpage.plans import LayerPlan

ROOT = Path(__file__).resolve().parent.parent
PICTURE = ROOT / "docs" / "pages.svg"
BYTES_PER_UNIT = 768  # so that a page of 98,304 bytes is 128 units wide
PAGES = 5
LEFT, TOP, HEIGHT, GAP = 120, 64, 30, 22
STYLE = """
text { font: 12px system-ui, sans-serif; fill: #24292f } .small { font-size: 11px; fill: #57606a }
.k { fill: #54aeff } .v { fill: #80ccff } .pad { fill: url(#hatch); stroke: #8c959f }
.stripe { stroke: #8c959f } .edge { fill: none; stroke: #24292f }
.free { fill: none; stroke: #8c959f; stroke-dasharray: 3 3 }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 } .small { fill: #9198a1 } .k { fill: #1f6feb } .v { fill: #388bfd } .edge { stroke: #e6edf3 }
}
"""


def draw() -> str:
    """One region of memory with pages of a target layer, and with pages of a draft layer: same pages, same stride."""
    plan = kvpage.plan(json.loads((ROOT / "examples" / "mimo.json").read_text()))
    target, draft = plan.layers["target.0"], plan.layers["draft.0"]
    width = LEFT + PAGES * target.page_size_bytes // BYTES_PER_UNIT + 30
    padding = draft.page_size_bytes - draft.real_page_size_bytes
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} 236" role="img" aria-labelledby="t d">',
        '<title id="t">Pages of two layers over one region of memory</title>',
        f'<desc id="d">Each page is {target.page_size_bytes:,} bytes. A target page is full; a draft page holds ',
        f"{draft.real_page_size_bytes:,} bytes and {padding:,} of padding.</desc>",
        f"<style>{STYLE}</style>",
        '<defs><pattern id="hatch" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">',
        '<line class="stripe" x1="0" y1="0" x2="0" y2="6"/></pattern></defs>',
        f'<text x="{LEFT}" y="24">block id</text>',
    ]
    parts += [f'<text x="{_x(page, target) + 4}" y="{TOP - 10}">{page}</text>' for page in range(PAGES)]
    rows = (("target.0", target, (1, 4)), ("draft.0", draft, (2, 3)), ("the memory", None, ()))
    for row, (label, layer, owned) in enumerate(rows):
        y = TOP + row * (HEIGHT + GAP)
        parts.append(f'<text x="8" y="{y + 19}">{label}</text>')
        for page in range(PAGES):
            owner = layer if layer else {1: target, 4: target, 2: draft, 3: draft}.get(page)
            shown = owner if layer is None or page in owned else None
            parts += _page(_x(page, target), y, shown, target.page_size_bytes)
    parts.append(
        f'<text class="small" x="8" y="224">stride {draft.page_size_bytes:,} bytes for both; K and V of the draft use '
        f"{draft.real_page_size_bytes:,}; hatched: padding; dashed: another group's page, or the null block 0</text>"
    )
    return "\n".join([*parts, "</svg>", ""])


def _x(page: int, layer: LayerPlan) -> int:
    return LEFT + page * layer.page_size_bytes // BYTES_PER_UNIT


def _page(x: int, y: int, layer: LayerPlan | None, page_size_bytes: int) -> list[str]:
    width = page_size_bytes // BYTES_PER_UNIT
    if layer is None:
        return [f'<rect class="free" x="{x}" y="{y}" width="{width}" height="{HEIGHT}"/>']
    half = layer.real_page_size_bytes // BYTES_PER_UNIT // 2
    gap = width - 2 * half
    return [
        f'<rect class="k" x="{x}" y="{y}" width="{half}" height="{HEIGHT}"/>',
        f'<rect class="v" x="{x + half}" y="{y}" width="{half}" height="{HEIGHT}"/>',
        f'<text x="{x + 5}" y="{y + 19}">K</text><text x="{x + half + 5}" y="{y + 19}">V</text>',
        *([f'<rect class="pad" x="{x + 2 * half}" y="{y}" width="{gap}" height="{HEIGHT}"/>'] if gap else []),
        f'<rect class="edge" x="{x}" y="{y}" width="{width}" height="{HEIGHT}"/>',
    ]


if __name__ == "__main__":
    PICTURE.write_text(draw())
    sys.stdout.write(f"wrote {PICTURE.relative_to(ROOT)}\n")
