"""JSON is read one way or not at all."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpage.errors import JsonInvalid, TooLarge
from kvpage.strict_json import MAX_BODY_BYTES, MAX_DEPTH, MAX_INTEGER_DIGITS, loads, pointer

REFUSED = {
    "nothing": b"",
    "only space": b" \n",
    "not UTF-8": b'{"a": "\xff"}',
    "UTF-8 of a surrogate": b'"\xed\xa0\x80"',
    "UTF-16": '{"a": 1}'.encode("utf-16"),
    "byte order mark": b'\xef\xbb\xbf{"a": 1}',
    "cut off": b'{"a": [1, 2',
    "open string": b'"abc',
    "open string of escapes": b'"' + b'\\"' * 1000,
    "lone backslash": b'"\\',
    "unknown escape": b'"\\x41"',
    "trailing comma": b"[1,]",
    "comment": b"[1] // one",
    "two values": b"{} {}",
    "single quotes": b"{'a': 1}",
    "bare key": b"{a: 1}",
    "control character": b'"\x01"',
    "leading zero": b"01",
    "plus sign": b"+1",
    "hexadecimal": b"0x10",
    "no digit": b"-",
    "NaN": b"NaN",
    "Infinity": b"[Infinity]",
    "-Infinity": b'{"a": -Infinity}',
    "too large a double": b"1e400",
    "too many digits": b"1" * (MAX_INTEGER_DIGITS + 1),
    "a million digits": b"1" * 1_000_000,
    "same key": b'{"a": 1, "a": 1}',
    "same key, escaped": b'{"a": 1, "\\u0061": 2}',
    "high surrogate": b'"\\ud800"',
    "low surrogate": b'["\\udc00x"]',
    "surrogate in a key": b'{"\\ud800": 1}',
    "swapped surrogates": b'"\\udc00\\ud800"',
    "deep arrays": b"[" * (MAX_DEPTH + 1) + b"]" * (MAX_DEPTH + 1),
    "deep objects": b'{"a":' * (MAX_DEPTH + 1) + b"1" + b"}" * (MAX_DEPTH + 1),
    "very deep": b"[" * 1_000_000,
}


@pytest.mark.parametrize("document", REFUSED.values(), ids=REFUSED.keys())
def test_what_is_not_plain_json_is_refused(document: bytes) -> None:
    with pytest.raises(JsonInvalid):
        loads(document)


@pytest.mark.parametrize(
    ("document", "where"),
    [
        (b'{"a": 1, "a": 2}', "/a"),
        (b'{"a": {"b": [0, {"c": 1, "c": 2}]}}', "/a/b/1/c"),
        (b'{"a": {"b": 1, "b": 2}, "a": 3}', "/a"),
        (b'{"x/y~z": {"": 1, "": 2}}', "/x~1y~0z/"),
        (b'[0, "\\ud800"]', "/1"),
        (b'{"a": {"\\ud800": 1}}', "/a"),
    ],
)
def test_the_fault_is_pointed_at(document: bytes, where: str) -> None:
    with pytest.raises(JsonInvalid) as raised:
        loads(document)
    assert [error.pointer for error in raised.value.errors] == [where]


@pytest.mark.parametrize(
    ("document", "value"),
    [
        (b'{"a": {"a": {"a": 1}}, "b": [{"a": 1}, {"a": 2}]}', {"a": {"a": {"a": 1}}, "b": [{"a": 1}, {"a": 2}]}),
        (b'"\\ud83d\\ude00 \\u00e9"', "😀 é"),
        (b'"[[[[[{{{{{\\"[[[["', '[[[[[{{{{{"[[[['),
        (b"[" * MAX_DEPTH + b"]" * MAX_DEPTH, json.loads("[" * MAX_DEPTH + "]" * MAX_DEPTH)),
        (b"9" * MAX_INTEGER_DIGITS, int("9" * MAX_INTEGER_DIGITS)),
        (b"-" + b"9" * MAX_INTEGER_DIGITS, -int("9" * MAX_INTEGER_DIGITS)),
        (b"[-0, 1.5e3, true, null]", [0, 1500.0, True, None]),
    ],
)
def test_plain_json_means_what_it_says(document: bytes, value: Any) -> None:
    assert loads(document) == value


def test_size_is_checked_before_anything_else() -> None:
    assert loads(b"[1,2]", max_bytes=5) == [1, 2]
    with pytest.raises(TooLarge) as raised:
        loads(b"\xff" * 6, max_bytes=5)
    assert raised.value.details == {"size_bytes": 6, "limit_bytes": 5}


def test_nesting_needs_no_stack() -> None:
    limit = sys.getrecursionlimit()

    def deeper(levels: int) -> Any:
        return loads(b"[" * MAX_DEPTH + b"]" * MAX_DEPTH) if levels == 0 else deeper(levels - 1)

    assert deeper(limit - 200)
    with pytest.raises(JsonInvalid):
        loads(b'{"a":' * 100_000)


@pytest.mark.parametrize("unit", [b'\\"', b'"', b'"\\', b"[],", b'"a":1,', b"1,", b"\\ud800"])
def test_the_largest_document_is_read_in_linear_time(unit: bytes) -> None:
    # Nothing is timed: a quadratic reader would need hours for four million characters and be stopped by the suite.
    with pytest.raises(JsonInvalid):
        loads(b'["' + unit * ((MAX_BODY_BYTES - 2) // len(unit)))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@given(json_values, st.booleans(), st.sampled_from([None, 1]))
def test_everything_python_writes_is_read_back(value: Any, ascii_only: bool, indent: int | None) -> None:
    assert loads(json.dumps(value, ensure_ascii=ascii_only, indent=indent).encode("utf-8")) == value


@given(st.binary(max_size=64) | st.text(alphabet='{}[]",:\\u0d8190-.eE \n', max_size=40).map(str.encode))
def test_arbitrary_bytes_are_read_as_json_reads_them_or_refused(document: bytes) -> None:
    try:
        value = loads(document)
    except JsonInvalid:
        return
    assert value == json.loads(document)


def test_a_pointer_escapes_and_shortens() -> None:
    assert pointer("a/b", 0, "~") == "/a~1b/0/~0"
    assert len(pointer("k" * 10_000)) == 201
