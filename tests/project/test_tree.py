"""The checkout as a whole: sizes, what files must not mention, and that the documented commands exist."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

from support.checkout import ROOT, python_sources, tracked_files
from support.tree import MAX_FILE_LINES, MAX_FUNCTION_LINES, forbidden_mentions, too_long

# What may be longer than the limits, each with its reason.
ALLOWED_LENGTHS: dict[str, str] = {}

TARGET = re.compile(r"^([a-z-]+):.*## ", re.MULTILINE)
MENTIONED = re.compile(r"(?:^|`)make ([a-z-]+)", re.MULTILINE)


def makefile_targets() -> set[str]:
    """Those that have help."""
    return set(TARGET.findall((ROOT / "Makefile").read_text()))


def test_no_tracked_file_mentions_one_machine() -> None:
    mentions = []
    for path in tracked_files():
        text = path.read_bytes().decode("utf-8", errors="replace")
        mentions += [f"{path.relative_to(ROOT)} {mention}" for mention in forbidden_mentions(text)]
    assert mentions == []


@pytest.mark.parametrize(
    "text",
    [
        "see /" + "root/x",
        "\n'/" + "home/someone/x'",
        "--index-url https://py" + "pi.org/simple",
        "<" * 7 + " HEAD\n",
        "pip in" + "stall 'kvpage[server]'",
        "/opt/x/bin/pip in" + "stall --upgrade kvpage==1",
        "then in" + "stall kvpage[cuda]",
    ],
)
def test_the_mention_check_fires(text: str) -> None:
    assert len(forbidden_mentions(text)) == 1


@pytest.mark.parametrize("what", [".", "'.[server]'", "dist/kvpage-0.1-py3-none-any.whl", "'FILE.whl[server]'"])
def test_what_is_installed_from_the_checkout_may_be_mentioned(what: str) -> None:
    assert forbidden_mentions(f"pip install {what}  # kvpage serve") == []


def test_files_and_functions_are_short_or_say_why() -> None:
    found = {
        long
        for path in python_sources("kvpage", "server", "scripts", "examples", "benchmarks")
        for long in too_long(path.read_text(), str(path.relative_to(ROOT)))
    }
    assert found == set(ALLOWED_LENGTHS), "split it by decision, or name it in ALLOWED_LENGTHS with the reason"


def test_the_length_check_fires() -> None:
    body = "    x = 1\n" * MAX_FUNCTION_LINES
    assert list(too_long(f"def long():\n{body}", "a.py")) == ["a.py:long"]
    assert list(too_long(f"def fits():\n{body[10:]}", "a.py")) == []
    assert list(too_long("x = 1\n" * (MAX_FILE_LINES + 1), "a.py")) == ["a.py"]
    assert list(too_long("x = 1\n" * MAX_FILE_LINES, "a.py")) == []


def test_the_readme_names_the_two_commands_and_no_target_that_is_missing() -> None:
    mentioned = set(MENTIONED.findall((ROOT / "README.md").read_text()))
    assert {"demo", "test"} <= mentioned
    assert mentioned <= makefile_targets()


@pytest.mark.parametrize("page", sorted(path.relative_to(ROOT) for path in tracked_files("*.md")), ids=str)
def test_no_document_names_a_target_that_is_missing(page: Path) -> None:
    assert set(MENTIONED.findall((ROOT / page).read_text())) <= makefile_targets()


def test_every_folder_with_python_is_type_checked() -> None:
    folders = {path.relative_to(ROOT).parts[0] for path in tracked_files("*.py")}
    checked = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mypy"]["files"]
    assert folders == {name.split("/")[0] for name in checked}


def test_ci_runs_what_a_person_runs() -> None:
    lines = (ROOT / ".ci" / "run").read_text().splitlines()
    assert [line for line in lines if "make" in line] == ["exec make test"]


def test_every_target_says_what_it_does_in_one_line_of_a_group() -> None:
    # Without the words of a make around it that runs this suite.
    command = ["make", "--no-print-directory", "help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    groups = [line for line in done.stdout.splitlines() if line and not line.startswith(" ")]
    assert groups == ["Use", "Test", "Measure", "Write tables of the documents", "Maintain"]
    lines = [line for line in done.stdout.splitlines() if line.startswith("  make ")]
    assert {line.split()[1] for line in lines} == makefile_targets()
    assert {line[: len("  make ") + 19][-2:] for line in lines} == {"  "}, "a name is too long for its column"
    assert [line for line in lines if len(line) > 120] == []


def test_every_target_but_the_one_for_all_has_help() -> None:
    named = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert named - makefile_targets() == {"environment"}


def test_the_makefile_has_the_targets_everybody_guesses() -> None:
    assert {"help", "demo", "test", "lint", "bench", "coverage", "clean", "dev"} <= makefile_targets()
