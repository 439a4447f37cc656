"""Every Markdown page: links and pictures lead somewhere, what is in code exists, figures name their command."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from support.checkout import ROOT
from support.markdown import Page, page, pages, slug
from support.page_checks import (
    CHECKS,
    absent_paths,
    bad_images,
    dead_links,
    figures_without_a_source,
    tables_without_a_command,
    unchecked_fences,
    unknown_commands,
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


def test_anchors_are_named_as_on_github() -> None:
    assert slug("`POST /v1/plans`: a plan's *life*, day 1") == "post-v1plans-a-plans-life-day-1"
    headings = Page(ROOT / "page.md", '# A b\n## A b\n# A b\n<a id="c"></a>')
    assert headings.anchors == ["c", "a-b", "a-b-1", "a-b-2"]
