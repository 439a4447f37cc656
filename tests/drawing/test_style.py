"""Colours that can be told apart and read, in light and in dark, also by those who see few of them."""

from __future__ import annotations

from itertools import combinations

import pytest

from kvpage.drawing import style

Rgb = tuple[float, float, float]
# Machado, Oliveira and Fernandes 2009, severity 1.0: what is left of linear red, green and blue.
PROTANOPIA = ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998))
DEUTERANOPIA = ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881))
EVERYTHING = ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0))
THEMES = {
    "light": (style.PAPER, style.INK, style.SOFT, [(hue.fill, hue.edge) for hue in style.HUES]),
    "dark": (style.DARK_PAPER, style.DARK_INK, style.DARK_SOFT, [(hue.dark_fill, hue.dark_edge) for hue in style.HUES]),
}


def linear(colour: str) -> Rgb:
    red, green, blue = (int(colour[index : index + 2], 16) / 255 for index in (1, 3, 5))
    return _linear(red), _linear(green), _linear(blue)


def _linear(value: float) -> float:
    return value / 12.92 if value <= 0.04045 else float(((value + 0.055) / 1.055) ** 2.4)


def contrast(one: str, other: str) -> float:
    """WCAG 2: at least 4.5 for text, 3 for shapes."""
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def luminance(colour: str) -> float:
    red, green, blue = linear(colour)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def distance(one: str, other: str, seen: tuple[Rgb, ...]) -> float:
    """In CIE Lab; about 2 can just be seen side by side."""
    pairs = zip(lab(one, seen), lab(other, seen), strict=True)
    return float(sum((a - b) ** 2 for a, b in pairs) ** 0.5)


def lab(colour: str, seen: tuple[Rgb, ...]) -> Rgb:
    red, green, blue = (
        max(0.0, sum(factor * value for factor, value in zip(row, linear(colour), strict=True))) for row in seen
    )
    x = (0.4124 * red + 0.3576 * green + 0.1805 * blue) / 0.9505
    y = 0.2126 * red + 0.7152 * green + 0.0722 * blue
    z = (0.0193 * red + 0.1192 * green + 0.9505 * blue) / 1.089
    fx, fy, fz = (value ** (1 / 3) if value > 0.008856 else 7.787 * value + 16 / 116 for value in (x, y, z))
    return 116 * fy - 16, 500 * (fx - fy), 200 * (fy - fz)


@pytest.mark.parametrize("theme", THEMES)
def test_text_and_edges_stand_out(theme: str) -> None:
    paper, ink, soft, hues = THEMES[theme]
    for ground in (paper, *(fill for fill, _ in hues)):
        assert contrast(ink, ground) >= 7, ground
    assert contrast(soft, paper) >= 4.5
    for fill, edge in hues:
        assert contrast(edge, paper) >= 3, edge
        assert contrast(edge, fill) >= 1.9, edge


@pytest.mark.parametrize("seen", [EVERYTHING, PROTANOPIA, DEUTERANOPIA], ids=["all", "protanopia", "deuteranopia"])
@pytest.mark.parametrize("theme", THEMES)
def test_hues_differ_also_for_those_who_see_few(theme: str, seen: tuple[Rgb, ...]) -> None:
    hues = THEMES[theme][3]
    for (one, one_edge), (other, other_edge) in combinations(hues, 2):
        apart = distance(one, other, seen) + distance(one_edge, other_edge, seen)
        assert apart > 20, (one, other, apart)


def test_the_measures_are_right() -> None:
    assert contrast("#ffffff", "#000000") == pytest.approx(21)
    assert distance("#ffffff", "#000000", EVERYTHING) == pytest.approx(100, abs=0.1)
    assert distance("#ff0000", "#807000", DEUTERANOPIA) < distance("#ff0000", "#807000", EVERYTHING) / 2


@pytest.mark.parametrize("theme", THEMES)
def test_the_rules_hold_the_colours(theme: str) -> None:
    rules = style.css("kvpage")
    light, dark = rules.split("@media (prefers-color-scheme:dark)")
    for fill, edge in THEMES[theme][3]:
        assert f"fill:{fill};stroke:{edge}" in (light if theme == "light" else dark)
    assert all(rule.startswith(".kvpage ") for rule in light.split("}") if rule)
    assert "var(" not in rules
