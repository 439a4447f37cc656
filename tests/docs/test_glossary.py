"""docs/glossary.md: in alphabetical order, each word with a page, and no word that a guide defines is missing."""

from __future__ import annotations

import re

import pytest

from support.checkout import ROOT
from support.markdown import Page, Section, page

GLOSSARY = ROOT / "docs" / "glossary.md"
GUIDES = ("layout.md", "allocator.md", "leases.md", "prefix.md", "strategies.md")
DEFINED = re.compile(r"^\*\*([a-z][a-z -]+)\*\*: ", re.MULTILINE)
"""How a list of words defines one."""
BOLD = re.compile(r"\*\*([a-z][a-z -]+)\*\*")
NO_ENTRIES = {"in use", "free", "real page"}
"""Said of blocks and slabs as everybody says it; and half of a word that has an entry."""


def entries(glossary: Page) -> list[Section]:
    return [section for section in glossary.sections if section.tokens[0].tag == "h2"]


def out_of_order(glossary: Page) -> list[str]:
    titles = [entry.title for entry in entries(glossary)]
    wanted = sorted(set(titles), key=str.casefold)
    return (
        [] if titles == wanted else [title for title, right in zip(titles, wanted, strict=False) if title != right][:1]
    )


def without_page(glossary: Page) -> list[str]:
    return [entry.title for entry in entries(glossary) if ".md" not in entry.text]


def missing(glossary: Page, defined: set[str]) -> list[str]:
    return sorted(defined - {entry.title for entry in entries(glossary)} - NO_ENTRIES)


def defined_words() -> set[str]:
    """In bold where a guide has a section of words; elsewhere, in bold before a colon."""
    words = set()
    for name in GUIDES:
        for section in page(ROOT / "docs" / name).sections:
            words |= set((BOLD if section.title == "Words" else DEFINED).findall(section.text))
    return words


def test_words_are_in_alphabetical_order() -> None:
    assert out_of_order(page(GLOSSARY)) == []


def test_every_word_has_a_page_to_read_on() -> None:
    assert len(entries(page(GLOSSARY))) > 50
    assert without_page(page(GLOSSARY)) == []


def test_every_word_that_a_guide_defines_is_there() -> None:
    assert {"block", "slab", "group", "stride order", "held", "cached"} <= defined_words()
    assert missing(page(GLOSSARY), defined_words()) == []


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("# G\n## a\n[x](x.md)\n## c\n[x](x.md)\n## b\n[x](x.md)", (["c"], [], [])),
        ("# G\n## a\n[x](x.md)\n## a\n[x](x.md)\n## b\n[x](x.md)", (["a"], [], [])),
        ("# G\n## a\nwords\n## b\n[x](x.md)", ([], ["a"], [])),
        ("# G\n## a\n[x](x.md)", ([], [], ["b"])),
    ],
)
def test_a_fault_is_found(text: str, found: tuple[list[str], list[str], list[str]]) -> None:
    glossary = Page(GLOSSARY, text)
    assert (out_of_order(glossary), without_page(glossary), missing(glossary, {"a", "b"})) == found
