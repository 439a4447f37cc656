"""Every look that a picture has is explained under it, and no other."""

from __future__ import annotations

import pytest

from drawing import plans, reading
from kvpage.drawing.picture import layout_svg

MEANINGS = {"pad": "padding of a page", "free": "unused by the group", "other": "other layers of the block, or unused"}


@pytest.mark.parametrize("name", plans.arrangements())
def test_looks_are_explained(name: str) -> None:
    picture = reading.read(layout_svg(plans.arrangements()[name]))
    looks = {rect.look for bar in picture.bars if bar.panel != "waste" for rect in bar.rects}
    texts = [text.text for text in picture.texts]
    assert {look for look, meaning in MEANINGS.items() if meaning in texts} == looks & MEANINGS.keys()
    hues = [look for look in looks if look[0] == "h"]
    assert sum("bytes a page" in text for text in texts) == len(hues)
