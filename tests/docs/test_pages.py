"""Every Markdown page: links and pictures lead somewhere, what is in code exists, figures name their command."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from support.checkout import ROOT
from support.markdown import Page, page, pages, slug
from support.page_checks import (
    CHECKS,
    absent_paths,
    bad_images,
    dead_links,
    dead_mentions,
    figures_without_a_source,
    tables_without_a_command,
    unchecked_fences,
    unknown_commands,
    unlisted,
)

Check = Callable[[Page], list[str]]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_no_page_has(check: Check) -> None:
    found = {str(path.relative_to(ROOT)): check(page(path)) for path in pages()}
    assert {name: faults for name, faults in found.items() if faults} == {}


FAULTS: list[tuple[Check, str, str]] = [
    (dead_links, "[a](nowhere.md)", "nowhere.md"),
    (dead_links, "[a](#b)", "#b"),
    (dead_links, "[a](memory.md#no-such-heading)", "memory.md#no-such-heading"),
    (bad_images, "![three words here](nowhere.svg)", "nowhere.svg"),
    (bad_images, "![picture](pages.svg)", "pages.svg"),
    (bad_images, "![three words here](https://example.com/a.svg)", "https://example.com/a.svg"),
    (unchecked_fences, "```\na\n```", "line 1: a block without a language"),
    (unchecked_fences, "```python\na\n```", "line 1: python that no test runs"),
    (unchecked_fences, "```json\n{,}\n```", "line 1: Expecting property name"),
    (unchecked_fences, "```yaml\na: b: c\n```", "line 1: mapping values are not allowed here"),
    (unchecked_fences, "```toml\na = \n```", "line 1: Invalid value"),
    (unchecked_fences, "```sh\nif true\n```", "line 1: bash: "),
    (unknown_commands, "`kvpage plot FILE`", "there is no command plot"),
    (unknown_commands, "`kvpage plan FILE --picture`", "plan has no --picture"),
    (unknown_commands, "```sh\nkvpage pools create \\\n  a.json --nam b\n```", "pools create has no --nam"),
    (unknown_commands, "```text\n$ kvpage serve --no-such\n```", "serve has no --no-such"),
    (unknown_commands, "`kvpage worker drain --no-such`", "worker drain has no --no-such"),
    (unknown_commands, "`make tea`", "make has no tea"),
    (absent_paths, "`kvpage/nowhere.py`", "kvpage/nowhere.py"),
    (absent_paths, "```sh\npython benchmarks/nothing.py\n```", "benchmarks/nothing.py"),
    (figures_without_a_source, "# A\n`make bench`\n# B\nIt takes 3 ms.", "B: 3 ms"),
    (figures_without_a_source, "# A\n\n| a | b |\n|-|-|\n| c | 1,000 µs |\n", "A: 1,000 µs"),
    (tables_without_a_command, "<!-- begin short -->\n\n<!-- end short -->\n", "short"),
]


@pytest.mark.parametrize(("check", "text", "fault"), FAULTS)
def test_a_fault_is_found(check: Check, text: str, fault: str) -> None:
    found = check(Page(ROOT / "docs" / "page.md", text))
    assert len(found) == 1
    assert found[0].startswith(fault)


def test_what_is_right_is_no_fault() -> None:
    text = (
        "# One, two: `three`\n\n[a](#one-two-three) [b](memory.md#handle-kinds) [c](https://example.com/none)\n"
        "![Pages of two layers](pages.svg)\n`kvpage pools create FILE --name a` `kvpage worker replace --memory 1GiB`\n"
        "`make test` takes 3 ms; `tests/docs/test_pages.py` `kvpage/planner/*.py`\n"
        "```json\n{}\n```\n```text\n{,}\n```\n<!-- short -->\n<!-- end -->\n"
    )
    assert {check.__name__: check(Page(ROOT / "docs" / "page.md", text)) for check in CHECKS} == {
        check.__name__: [] for check in CHECKS
    }


def test_what_is_shipped_sends_readers_to_pages_that_are_there() -> None:
    found = {str(path.relative_to(ROOT)): dead_mentions(path.read_text()) for path in shipped()}
    assert len(found) > 100
    assert {name: dead for name, dead in found.items() if dead} == {}


def shipped() -> list[Path]:
    """Text that is no page: code, settings, alerts, what is deployed."""
    folders = ("kvpage", "server", "scripts", "benchmarks", "examples", "deploy")
    suffixes = (".py", ".js", ".html", ".json", ".yaml", ".yml", ".toml", ".service", ".env")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in suffixes]
    return sorted([*files, ROOT / "Makefile", ROOT / "Dockerfile", ROOT / "pyproject.toml"])


def test_a_mention_of_what_is_not_there_is_found() -> None:
    text = "see docs/memory.md, docs/memory.md#handle-kinds, docs/memory.md#nowhere and (docs/nothing.md)"
    assert dead_mentions(text) == ["docs/memory.md#nowhere", "docs/nothing.md"]


def test_the_index_has_every_page() -> None:
    names = [str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").glob("*.md")]
    assert unlisted(page(ROOT / "docs" / "README.md"), set(names) - {"README.md"}) == []
    assert unlisted(Page(ROOT / "docs" / "README.md", "[a](a.md#b)"), ["a.md", "c.md"]) == ["c.md"]


def test_anchors_are_named_as_on_github() -> None:
    assert slug("`POST /v1/plans`: a plan's *life*, day 1") == "post-v1plans-a-plans-life-day-1"
    headings = Page(ROOT / "page.md", '# A b\n## A b\n# A b\n<a id="c"></a>')
    assert headings.anchors == ["c", "a-b", "a-b-1", "a-b-2"]
