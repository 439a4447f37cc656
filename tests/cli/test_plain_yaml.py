"""YAML reads as the JSON it stands for; what JSON has no word for is refused with its place, never with a traceback."""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from kvpage.cli import plain_yaml
from kvpage.errors import JsonInvalid
from support.plan_requests import small_request

texts = st.text(st.characters(codec="utf-8", exclude_categories=["Cc"]), max_size=12)
scalars = st.none() | st.booleans() | st.integers(-(10**30), 10**30) | texts
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4), max_leaves=20
)


@given(values)
def test_what_yaml_writes_is_read(value: Any) -> None:
    assert plain_yaml.load(yaml.safe_dump(value).encode()) == value
    assert plain_yaml.load(json.dumps(value).encode()) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("", None),
        ("a: ~", {"a": None}),
        ("a: yes", {"a": True}),
        ("a: +1_000", {"a": 1000}),
        ("a: 0.5", {"a": 0.5}),
        ("a: !!str 5", {"a": "5"}),
        ("a: '2020-01-01'", {"a": "2020-01-01"}),
        ("# a request\nlayers:\n- {name: a}\n", {"layers": [{"name": "a"}]}),
        (yaml.safe_dump(small_request()), small_request()),
    ],
)
def test_what_people_write_is_read(text: str, value: object) -> None:
    assert plain_yaml.load(text.encode()) == value


@pytest.mark.parametrize(
    "text",
    [
        "? [a]\n: 1", "? {a: 1}\n: 1", "1: a", "~: a", ".nan: a", "yes: a", "2020-01-01: a", "<<: {a: 1}", "<<: 1",
        "a: 1\na: 2", "a: 1\n'a': 2", "a: &x [1]\nb: *x", "&a a: 1\nb: *a",
        "a: !!timestamp x", "a: !!bool x", "a: !!int x", "a: !!int ''", "a: !!int '-'", "a: !!float x", "a: !!float ''",
        "a: !!null x", "a: !!map [b]", "a: !!map b", "a: !!seq {b: 1}", "a: !!seq b", "a: !!str [b]", "a: !!str {b: 1}",
        "a: !!binary AAAA", "a: !!binary x", "a: !!set {b, c}", "a: !!omap [b: 1]", "a: !!pairs [b: 1]", "a: !!merge b",
        "a: !!value b", "a: =", "a: !mine b", "!!python/object/apply:os.system ['id']",
        "a: 2020-01-01", "a: 2020-99-99", "a: 1:30", "a: 0x10", "a: 0b1", "a: 010", "a: .inf", "a: .nan",
        "a: 0x" + "f" * 20_000, "a: " + "9" * 20_000, "a: 1" + ":1" * 10_000, "a: 1." + "1" * 20_000,
        '"\\UFFFFFFFF": 1', '"\\U00110000": 1', '"\\ud800": 1', 'a: "\\udfff"',
        "a: [", "a: \x00", "a: 1\n---\nb: 2", "%YAML 9.9\n---\na: 1", "[" * 5000, "- " * 5000, "- " * 40 + "a",
        "\n".join(" " * depth + "a:" for depth in range(1500)),
    ],
)  # fmt: skip
def test_what_json_has_no_word_for_is_refused(text: str) -> None:
    with pytest.raises(JsonInvalid) as caught:
        plain_yaml.load(text.encode())
    assert len(caught.value.message) < 500
    assert "\n" not in caught.value.message


@pytest.mark.parametrize("data", [b"a: \xff\xfe", b"\xff\xfea", b"\x80", b"\xff\xff\xff\xff"])
def test_bytes_that_are_no_text_are_refused(data: bytes) -> None:
    with pytest.raises(JsonInvalid):
        plain_yaml.load(data)


@given(st.text(st.sampled_from(list("a:-?*&!<>|'\"[]{},#%@`~=\n 01.\t\\U"))) | st.binary(max_size=60))
def test_anything_is_read_or_refused(text: str | bytes) -> None:
    try:
        value = plain_yaml.load(text if isinstance(text, bytes) else text.encode())
    except JsonInvalid:
        return
    json.dumps(value, allow_nan=False).encode()


def test_a_refusal_says_where() -> None:
    with pytest.raises(JsonInvalid, match=r"line 2, column 4: "):
        plain_yaml.load(b"a: 1\nb: !!int x\n")
