"""What a Markdown page of the project holds: fences, links, anchors, pictures, code and tables."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

from support.checkout import ROOT

_PARSER = MarkdownIt("commonmark").enable("table")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fence:
    info: str
    text: str
    line: int
    """Of the page, from 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """What stands between one heading and the next."""

    title: str
    tokens: tuple[Token, ...]

    @property
    def text(self) -> str:
        return "\n".join(token.content for token in self.tokens)


class Page:
    def __init__(self, path: Path, text: str | None = None) -> None:
        self.path = path
        self.text = path.read_text() if text is None else text
        self.tokens = _PARSER.parse(self.text)

    def __repr__(self) -> str:
        return str(self.path)

    @property
    def fences(self) -> list[Fence]:
        return [
            Fence(info=token.info.strip(), text=token.content, line=(token.map or [0])[0] + 1)
            for token in self.tokens
            if token.type == "fence"
        ]

    @property
    def links(self) -> list[str]:
        return [str(token.attrs["href"]) for token in self._inline() if token.type == "link_open"]

    @property
    def images(self) -> list[tuple[str, str]]:
        """Target and alternative text of each."""
        return [(str(token.attrs["src"]), token.content) for token in self._inline() if token.type == "image"]

    @property
    def code_spans(self) -> list[str]:
        return [token.content for token in self._inline() if token.type == "code_inline"]

    @property
    def anchors(self) -> list[str]:
        """As GitHub names them: those of headings, and `id` or `name` of HTML tags."""
        tags = (token for token in [*self.tokens, *self._inline()] if token.type in ("html_block", "html_inline"))
        named = [name for token in tags for name in re.findall(r"<a (?:id|name)=\"([^\"]+)\"", token.content)]
        return named + _numbered(slug(_plain(heading)) for heading in self._headings())

    @property
    def sections(self) -> list[Section]:
        starts = [place for place, token in enumerate(self.tokens) if token.type == "heading_open"]
        bounds = [0, *starts, len(self.tokens)]
        parts = [tuple(self.tokens[start:end]) for start, end in pairwise(bounds)]
        return [Section(title=_title(part), tokens=part) for part in parts if part]

    def _headings(self) -> Iterator[Token]:
        for place, token in enumerate(self.tokens):
            if token.type == "heading_open":
                yield self.tokens[place + 1]

    def _inline(self) -> Iterator[Token]:
        for token in self.tokens:
            yield from token.children or ()


def slug(heading: str) -> str:
    """GitHub's rule: lower case, no punctuation but hyphens and underscores, a hyphen for each space."""
    kept = [letter for letter in heading.strip().lower() if _stays(letter)]
    return "".join("-" if letter == " " else letter for letter in kept)


def _stays(letter: str) -> bool:
    return letter in " -_" or unicodedata.category(letter)[0] in "LNM"


def _plain(heading: Token) -> str:
    """The text that a reader sees."""
    shown = (child.content for child in heading.children or () if child.type in ("text", "code_inline"))
    return "".join(shown)


def _title(tokens: tuple[Token, ...]) -> str:
    return tokens[1].content if tokens[0].type == "heading_open" else ""


def _numbered(names: Iterator[str]) -> list[str]:
    """The second of a name is name-1."""
    seen: dict[str, int] = {}
    numbered = []
    for name in names:
        numbered.append(f"{name}-{seen[name]}" if name in seen else name)
        seen[name] = seen.get(name, 0) + 1
    return numbered


@cache
def page(path: Path) -> Page:
    """Read once; pages do not change while tests run."""
    return Page(path)


def pages() -> list[Path]:
    """Every Markdown page of the project, of folders that hold no environment or build."""
    folders = ("docs", "examples", "tests", "deploy", "benchmarks", "scripts", "kvpage", "server")
    inside = [path for folder in folders for path in (ROOT / folder).rglob("*.md")]
    return sorted([*ROOT.glob("*.md"), *inside])
