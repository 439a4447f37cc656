"""Draw docs/img: the plan of examples/mimo.json by vLLM's rule, and in nested slabs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import kvpage
from kvpage.drawing.picture import layout_svg

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "docs" / "img"
STRATEGIES = ("unify", "nested")


def draw() -> Iterator[tuple[Path, str]]:
    """Each picture's file and text."""
    request = json.loads((ROOT / "examples" / "mimo.json").read_text())
    for strategy in STRATEGIES:
        # With this memory a slab holds all ten layers of the target; in the example's own it would be held too large.
        plan = kvpage.plan(request | {"strategy": strategy, "memory_bytes": 1 << 30})
        yield FOLDER / f"mimo-{strategy}.svg", layout_svg(plan)


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for path, svg in draw():
        path.write_text(svg)
        print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
