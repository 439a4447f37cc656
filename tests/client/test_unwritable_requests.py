"""A request that JSON cannot say is refused before it is sent, with the place of what cannot be said."""

from __future__ import annotations

from typing import Any

import pytest

from kvpage.client.calls import encode
from kvpage.errors import SpecInvalid

LOOP: list[Any] = []
LOOP.append(LOOP)


@pytest.mark.parametrize(
    ("request_", "place"),
    [
        ({"model": {"config": [1, {"model_type": "\ud800"}]}}, "/model/config/1/model_type"),
        ({"layers": [], "\udfff": 1}, "/\\udfff"),
        ({"layers": [object()]}, "/layers/0"),
        ({"layers": LOOP}, "/layers" + "/0" * 31),
        ("\ud800", ""),
    ],
)
def test_the_place_is_named(request_: object, place: str) -> None:
    with pytest.raises(SpecInvalid, match="cannot be written as JSON") as caught:
        encode(request_)
    assert [fault.pointer for fault in caught.value.errors] == [place]
