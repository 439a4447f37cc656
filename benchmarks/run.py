"""Everything that is measured, in one report. `make bench` writes it into docs/benchmarks.md.

    python benchmarks/run.py                     print it
    python benchmarks/run.py --write             and write docs/benchmarks.md, and build/benchmarks.json
    python benchmarks/run.py Planning Attaching  only these subjects, which are printed

`VLLM_SOURCE=FOLDER` names a folder with an unpacked wheel of vLLM, whose planner and block pool are peers then.
"""

from __future__ import annotations

import argparse

import attaching
import generating
import importing
import leasing
import machine
import memory_views
import pages
import planning
import prefixes
import serving
from measure import Effort
from report import DOCUMENT, ROOT, Subject, as_json, as_page, as_text, measured

SUBJECTS: tuple[Subject, ...] = (
    planning.SUBJECT,
    pages.SUBJECT,
    prefixes.SUBJECT,
    attaching.SUBJECT,
    memory_views.SUBJECT,
    leasing.SUBJECT,
    serving.SUBJECT,
    generating.SUBJECT,
    importing.SUBJECT,
)


def main() -> None:
    arguments = _arguments()
    use = machine.Use()
    chosen = [subject for subject in SUBJECTS if subject.title in arguments.subjects or not arguments.subjects]
    parts = []
    for subject in chosen:
        parts.append(measured(subject, Effort(arguments.scale)))
        print(as_text(parts[-1]), flush=True)
    facts = machine.facts() | use.facts()
    if arguments.write:
        (ROOT / "build").mkdir(exist_ok=True)
        (ROOT / "build" / "benchmarks.json").write_text(as_json(facts, parts), encoding="utf-8")
        DOCUMENT.write_text(as_page(facts, parts), encoding="utf-8")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure kvpage beside its peers.")
    titles = [subject.title for subject in SUBJECTS]
    parser.add_argument("subjects", nargs="*", metavar="SUBJECT", help=f"of {', '.join(titles)}; all by default")
    parser.add_argument("--write", action="store_true", help="write docs/benchmarks.md and build/benchmarks.json")
    parser.add_argument("--scale", type=float, default=1.0, help="so many times as many rounds (default: 1)")
    arguments = parser.parse_args()
    if unknown := set(arguments.subjects) - set(titles):
        parser.error(f"no subject {', '.join(sorted(unknown))}; there are {', '.join(titles)}")
    if arguments.write and (arguments.subjects or arguments.scale < 1):
        parser.error("the page has all subjects, with all rounds: leave --scale and the subjects out to --write it")
    return arguments


if __name__ == "__main__":
    main()
