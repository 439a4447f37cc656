"""What is looked at in every Markdown page. Each check returns its findings, so that a test can see it find one."""

from __future__ import annotations

import json
import re
import subprocess
import tomllib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from support.checkout import ROOT
from support.known_commands import fault, named, targets
from support.markdown import Fence, Page, page

RUN_BY: Mapping[str, str] = {
    "README.md": "docs/test_examples.py",
    "docs/allocator.md": "docs/test_documents.py",
    "docs/api.md": "docs/test_api_document.py",
    "docs/layout.md": "docs/test_documents.py",
    "docs/leases.md": "docs/test_documents.py",
    "docs/models.md": "models/test_document.py",
    "docs/prefix.md": "pages/test_prefix_document.py",
    "docs/transformers.md": "integrations/test_transformers.py",
    "docs/protocol.md": "wire/test_protocol_document.py",
    "docs/ranks.md": "docs/test_documents.py",
    "docs/readers.md": "docs/test_documents.py",
    "docs/strategies.md": "docs/test_documents.py",
    "docs/vllm.md": "integrations/test_vllm_document.py",
}
"""Python that a page shows is run by this file of tests; bytes of the protocol are compared."""

OUR_FOLDERS = r"(?:kvpage|server|docs|tests|scripts|examples|benchmarks|deploy)"
PROJECT_PATH = re.compile(rf"(?<![\w/.:@-]){OUR_FOLDERS}/[\w./*@-]*[\w/*](?!=|:(?!:)|\w)")
"""Not what is followed by a value: that is a label, or an image."""
MEASURED = re.compile(r"\d[\d,.]*\s(?:µs|ms|ns|GiB/s|GB/s|MiB/s|tokens/s|requests/s)(?!\w)")
SOURCE = re.compile(r"make [a-z]+|(?:benchmarks|scripts|tests)/\w+|kvpage \w+")
PEERS = ("comparison.md",)
"""There figures are what others say of themselves, with a link."""


def dead_links(checked: Page) -> list[str]:
    return [link for link in checked.links if "://" not in link and not _leads_somewhere(checked, link)]


def _leads_somewhere(checked: Page, link: str) -> bool:
    path, _, anchor = link.partition("#")
    if not path:
        return anchor in checked.anchors
    target = (checked.path.parent / path).resolve()
    if not target.exists():
        return False
    if not anchor:
        return True
    return target.suffix == ".md" and anchor in page(target).anchors


MENTION = re.compile(r"\bdocs/([\w/-]+\.md)(#[\w-]+)?")


def dead_mentions(text: str) -> list[str]:
    """Pages, and places in them, that code, settings and alerts send their readers to."""
    root = Page(ROOT / "README.md", "")
    mentions = {f"docs/{path}{anchor}" for path, anchor in MENTION.findall(text)}
    return sorted(mention for mention in mentions if not _leads_somewhere(root, mention))


def unlisted(index: Page, names: Iterable[str]) -> list[str]:
    """Pages that the index does not name."""
    return sorted(set(names) - {link.partition("#")[0] for link in index.links})


def bad_images(checked: Page) -> list[str]:
    """Pictures that are not there, come from elsewhere, or say nothing to who cannot see them."""
    return [
        source
        for source, alternative in checked.images
        if "://" in source or not (checked.path.parent / source).is_file() or len(alternative.split()) < 3
    ]


def unchecked_fences(checked: Page) -> list[str]:
    """A block is run, parsed, or marked as `text`: an illustration, or what a command printed."""
    faults = (_fault_of(checked, fence) for fence in checked.fences)
    return [f"line {fence.line}: {fault}" for fence, fault in zip(checked.fences, faults, strict=True) if fault]


def _fault_of(checked: Page, fence: Fence) -> str | None:
    language = fence.info.partition(" ")[0]
    if language == "text":
        return None
    if language in PARSERS:
        return PARSERS[language](fence.text)
    if not language:
        return "a block without a language"
    return None if _is_run(checked) else f"{language} that no test runs"


def _is_run(checked: Page) -> bool:
    """Whether the tests that the table names speak of the page."""
    name = str(checked.path.relative_to(ROOT))
    return name in RUN_BY and any(form in (ROOT / "tests" / RUN_BY[name]).read_text() for form in _spellings(name))


def _spellings(name: str) -> list[str]:
    return [f'"{name}"', f'"{Path(name).name}"']


def _parsed_by(parse: Callable[[str], Any]) -> Callable[[str], str | None]:
    def fault(text: str) -> str | None:
        try:
            parse(text)
        except (ValueError, yaml.YAMLError) as error:
            return str(error)
        return None

    return fault


def _shell_fault(text: str) -> str | None:
    read = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True, check=False)
    return read.stderr or None


PARSERS: Mapping[str, Callable[[str], str | None]] = {
    "json": _parsed_by(json.loads),
    "toml": _parsed_by(tomllib.loads),
    "yaml": _parsed_by(lambda text: list(yaml.safe_load_all(text))),
    "sh": _shell_fault,
}


def unknown_commands(checked: Page) -> list[str]:
    """Commands, options and make targets that there are not."""
    faults = [fault(words) for words in named(checked, "kvpage")]
    made = [word for words in named(checked, "make") for word in words[:1] if word not in targets()]
    return [found for found in faults if found] + [f"make has no {target}" for target in made]


def absent_paths(checked: Page) -> list[str]:
    code = [*checked.code_spans, *(fence.text for fence in checked.fences if fence.info != "python")]
    paths = {path for text in code for path in PROJECT_PATH.findall(text)}
    return sorted(path for path in paths if not any(ROOT.glob(path.rstrip("/"))))


def figures_without_a_source(checked: Page) -> list[str]:
    """Times and rates are measured by somebody: the section says by which command."""
    if checked.path.name in PEERS:
        return []
    return [
        f"{section.title}: {figure}"
        for section in checked.sections
        for figure in MEASURED.findall(section.text)
        if not SOURCE.search(section.text)
    ]


def tables_without_a_command(checked: Page) -> list[str]:
    """Between markers a command writes; the page says which."""
    markers = re.findall(r"^<!-- (?:begin )?(.+?) -->$", checked.text, re.MULTILINE)
    written = [marker for marker in markers if not marker.startswith("end")]
    return [] if re.search(r"`(?:make [a-z-]+|python (?:-m|scripts/)[\w. /]+)`", checked.text) else written


CHECKS: tuple[Callable[[Page], list[str]], ...] = (
    dead_links,
    bad_images,
    unchecked_fences,
    unknown_commands,
    absent_paths,
    figures_without_a_source,
    tables_without_a_command,
)
