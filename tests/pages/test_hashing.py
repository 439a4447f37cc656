"""Block hashes: byte for byte as docs/protocol.md says, and different whenever the content may be."""

from __future__ import annotations

import hashlib
import re
import struct
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpage.errors import SpecInvalid
from kvpage.pages.hashing import (
    HASH_VERSION,
    MAX_CONTENT_BYTES,
    BlockHasher,
    Span,
    TokenHashes,
    block_hashes,
    token_bytes,
)
from support.checkout import ROOT

TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=40)
SPANS = st.lists(
    st.builds(
        lambda start, length, content: Span(start_tokens=start, end_tokens=start + length, content=content),
        st.integers(0, 30),
        st.integers(1, 20),
        st.binary(max_size=3),
    ),
    max_size=3,
)


def by_the_document(
    tokens: list[int], group: int, block_size: int, salt: bytes = b"", spans: list[Span] | None = None
) -> list[bytes]:
    """Written from docs/protocol.md, not from the module."""
    hashes, parent = [], b"\0" * 16
    for start in range(0, len(tokens) - block_size + 1, block_size):
        extra = b""
        for span in sorted(spans or [], key=lambda span: (span.start_tokens, span.end_tokens, span.content)):
            if span.start_tokens < start + block_size and start < span.end_tokens:
                extra += (span.start_tokens - start).to_bytes(8, "little", signed=True)
                extra += len(span.content).to_bytes(4, "little") + span.content
        data = b"".join(number.to_bytes(4, "little") for number in (1, group, block_size, len(salt), len(extra)))
        data += salt + parent
        data += b"".join(token.to_bytes(4, "little") for token in tokens[start : start + block_size])
        parent = hashlib.blake2b(data + extra, digest_size=16).digest()
        hashes.append(parent)
    return hashes


@given(TOKENS, st.integers(0, 3), st.integers(1, 9), st.binary(max_size=5), SPANS)
def test_hashes_are_what_the_document_says(
    tokens: list[int], group: int, block_size: int, salt: bytes, spans: list[Span]
) -> None:
    expected = by_the_document(tokens, group, block_size, salt, spans)
    assert block_hashes(tokens, group=group, block_size=block_size, salt=salt, spans=spans) == expected


def vectors() -> list[tuple[dict[str, Any], list[str]]]:
    """The table of vectors in docs/protocol.md: group, block size, salt, spans, tokens, hashes."""
    text = (ROOT / "docs" / "protocol.md").read_text()
    section = text.split("## Block hashes")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (\d+) \| (\d+) \| (\S+) \| (\S+) \| (.+?) \| (.+?) \|$", section, re.MULTILINE)
    return [(read_vector(row), re.findall(r"[0-9a-f]{32}", row[5])) for row in rows]


def read_vector(row: tuple[str, ...]) -> dict[str, Any]:
    group, block_size, salt, spans, tokens, _ = row
    found = re.findall(r"(\d+)–(\d+):([0-9a-f]+)", spans)
    return {
        "group": int(group),
        "block_size": int(block_size),
        "salt": b"" if salt == "none" else bytes.fromhex(salt.strip("`")),
        "spans": [
            Span(start_tokens=int(start), end_tokens=int(end), content=bytes.fromhex(text))
            for start, end, text in found
        ],
        "tokens": [int(token) for token in re.findall(r"\d+", tokens)],
    }


def test_the_vectors_of_the_document_hold() -> None:
    found = vectors()
    assert len(found) >= 5
    assert any(vector["spans"] for vector, _ in found)
    assert any(vector["salt"] for vector, _ in found)
    for vector, expected in found:
        assert [one.hex() for one in block_hashes(**vector)] == expected
        assert [one.hex() for one in by_the_document(**vector)] == expected


def test_the_document_names_the_version() -> None:
    assert f"version {HASH_VERSION}" in (ROOT / "docs" / "protocol.md").read_text().split("## Block hashes")[1]


@pytest.mark.parametrize(
    "make", [list, tuple, np.array, lambda ids: np.array(ids, np.int64), lambda ids: list(np.array(ids))]
)
def test_lists_and_arrays_of_ids_hash_alike(make: Any) -> None:
    ids = [0, 7, 2**31, 2**32 - 1]
    assert token_bytes(make(ids)) == struct.pack("<4I", *ids)


@pytest.mark.parametrize(
    "wrong",
    [
        [1, -1],
        [2**32],
        [1.0],
        ["a"],
        [None],
        "text",
        b"1234",
        np.array([-1]),
        np.array([2**32]),
        np.array([1.0]),
        np.ones((2, 2), int),
        7,
    ],
)
def test_what_is_no_token_id_is_refused_with_its_place(wrong: Any) -> None:
    with pytest.raises(SpecInvalid):
        token_bytes(wrong)


def test_the_refusal_names_position_and_value() -> None:
    with pytest.raises(SpecInvalid, match="token 2 is -5"):
        token_bytes([1, 2, -5])
    with pytest.raises(SpecInvalid, match="token 1 is -5"):
        token_bytes(np.array([1, -5]))


def test_only_whole_blocks_have_a_hash() -> None:
    assert [len(block_hashes(list(range(n)), group=0, block_size=4)) for n in (0, 3, 4, 7, 8)] == [0, 0, 1, 1, 2]


def test_everything_that_may_change_the_content_changes_the_hash() -> None:
    image = Span(start_tokens=1, end_tokens=6, content=b"image")
    same: dict[str, Any] = {"tokens": [5, 6, 7, 8, 9, 10, 11, 12], "group": 0, "block_size": 4}
    variants: list[dict[str, Any]] = [
        same,
        same | {"tokens": [6, 6, 7, 8, 9, 10, 11, 12]},  # another first block, the same second
        same | {"group": 1},
        same | {"block_size": 8},
        same | {"salt": b"a"},
        same | {"salt": b"b"},
        same | {"spans": [image]},
        same | {"spans": [Span(start_tokens=2, end_tokens=6, content=b"image")]},
        same | {"spans": [Span(start_tokens=1, end_tokens=6, content=b"other")]},
        same | {"spans": [image, image]},
    ]
    last = [block_hashes(**variant)[-1] for variant in variants]
    assert all(a != b for a, b in combinations(last, 2))


def test_a_span_changes_its_own_blocks_and_those_after_it_only() -> None:
    tokens = list(range(16))
    plain = block_hashes(tokens, group=0, block_size=4)
    spanned = block_hashes(tokens, group=0, block_size=4, spans=[Span(start_tokens=5, end_tokens=6, content=b"x")])
    assert [a == b for a, b in zip(plain, spanned, strict=True)] == [True, False, False, False]


def test_the_order_in_which_spans_are_named_does_not_matter() -> None:
    spans = [Span(start_tokens=n, end_tokens=n + 3, content=bytes([n])) for n in range(4)]
    one, other = (block_hashes(range(8), group=0, block_size=4, spans=order) for order in (spans, spans[::-1]))
    assert one == other


@pytest.mark.parametrize(("start", "end"), [(-1, 3), (3, 3), (4, 3), (0, 2**62)])
def test_a_span_that_is_none_is_refused(start: int, end: int) -> None:
    with pytest.raises(SpecInvalid):
        Span(start_tokens=start, end_tokens=end, content=b"")


def test_salts_and_contents_have_a_limit() -> None:
    largest = bytes(MAX_CONTENT_BYTES)
    BlockHasher(0, 4, largest, [Span(start_tokens=0, end_tokens=1, content=largest)])
    with pytest.raises(SpecInvalid):
        BlockHasher(0, 4, largest + b"x")
    with pytest.raises(SpecInvalid):
        Span(start_tokens=0, end_tokens=1, content=largest + b"x")


@given(st.lists(st.one_of(TOKENS, st.integers(0, 60)), max_size=12), SPANS, st.binary(max_size=2))
def test_tokens_that_come_and_go_hash_as_if_they_had_come_at_once(
    changes: list[list[int] | int], spans: list[Span], salt: bytes
) -> None:
    """A list appends, a number cuts; hashes are asked for after each, and of a copy too."""
    sizes = (3, 8)
    hashes, tokens = TokenHashes(sizes, salt=salt, spans=spans), list[int]()
    for change in changes:
        if isinstance(change, int):
            tokens = tokens[:change]
            hashes.truncate(change)
        else:
            tokens += change
            hashes.append(change)
        assert len(hashes) == len(tokens)
        twin = hashes.copy()
        twin.append([1, 2, 3, 4, 5, 6, 7, 8])
        for group, size in enumerate(sizes):
            expected = by_the_document(tokens, group, size, salt, spans)
            assert hashes.of(group, len(tokens) // size) == expected
            longer = by_the_document([*tokens, 1, 2, 3, 4, 5, 6, 7, 8], group, size, salt, spans)
            assert twin.of(group, len(longer)) == longer
