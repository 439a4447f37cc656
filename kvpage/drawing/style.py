"""Colours of pictures, in light and dark. Plain classes and no variables: programs for slides do not know those."""

from __future__ import annotations

from typing import NamedTuple


class Hue(NamedTuple):
    """Hues after Okabe and Ito, which people tell apart who see few colours. Text lies on `fill`, `edge` bounds it."""

    fill: str
    edge: str
    dark_fill: str
    dark_edge: str


HUES = (
    Hue("#9fd0f5", "#0a66a8", "#124f7f", "#66b7f0"),
    Hue("#ffd27a", "#9a6300", "#6e4a00", "#f0b340"),
    Hue("#8ee0c0", "#00795a", "#045a43", "#3fc79c"),
    Hue("#f7b39b", "#b04410", "#84330c", "#f2855a"),
    Hue("#e6bcd8", "#994a7d", "#6b3258", "#dd8fc0"),
    Hue("#b9bdc4", "#3a3f45", "#2e3238", "#d5d9df"),
)
PAPER, DARK_PAPER = "#ffffff", "#0d1117"
INK, DARK_INK = "#14202b", "#eef3f8"
SOFT, DARK_SOFT = "#55606b", "#9aa6b2"


def css(scope: str) -> str:
    """Rules for what lies inside class `scope`, so that a picture inside a page changes nothing else there."""
    light = _theme(PAPER, INK, SOFT, "#b4bdc6", "#c9d6e2", "#eef2f6")
    light |= {f".h{index}": f"fill:{hue.fill};stroke:{hue.edge}" for index, hue in enumerate(HUES)}
    dark = _theme(DARK_PAPER, DARK_INK, DARK_SOFT, "#4b5561", "#2f4052", "#1a222b")
    dark |= {f".h{index}": f"fill:{hue.dark_fill};stroke:{hue.dark_edge}" for index, hue in enumerate(HUES)}
    shape = {
        "text": "font-family:system-ui,-apple-system,'Segoe UI',sans-serif",
        ".mono": "font-family:ui-monospace,Menlo,Consolas,'DejaVu Sans Mono',monospace",
        ".bold": "font-weight:600",
        ".name": "unicode-bidi:isolate",
        "rect": "stroke-width:1",
        ".line": "fill:none;stroke-width:1.5",
        ".free,.other": "stroke-dasharray:3 3",
    }
    return f"{_rules(scope, shape)}{_rules(scope, light)}@media (prefers-color-scheme:dark){{{_rules(scope, dark)}}}"


def _theme(paper: str, ink: str, soft: str, stripe: str, live: str, tail: str) -> dict[str, str]:
    return {
        ".paper": f"fill:{paper}",
        "text,.tip": f"fill:{ink}",
        ".soft": f"fill:{soft}",
        ".line": f"stroke:{ink}",
        ".stripe": f"stroke:{stripe};stroke-width:2",
        ".pad": f"stroke:{soft}",
        ".free": f"fill:{paper};stroke:{soft}",
        ".other": f"fill:{tail};stroke:{soft}",
        ".slab": f"fill:none;stroke:{ink};stroke-width:1.5",
        ".live": f"fill:{live};stroke:{soft}",
        ".tail": f"fill:{tail};stroke:{soft}",
    }


def _rules(scope: str, rules: dict[str, str]) -> str:
    return "".join(
        ",".join(f".{scope} {part}" for part in selector.split(",")) + "{" + body + "}"
        for selector, body in rules.items()
    )
