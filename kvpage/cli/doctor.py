"""Printing the doctor's report."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

import typer
from rich.console import Console
from rich.markup import escape

from kvpage.doctor.findings import Finding

_MARKS = {"ok": "[green]ok[/]     ", "absent": "[yellow]absent[/] ", "problem": "[bold red]problem[/]"}


def print_report(findings: Sequence[Finding], *, as_json: bool) -> None:
    """A line each, and what to do below it."""
    if as_json:
        typer.echo(json.dumps({"findings": [asdict(finding) for finding in findings]}))
        return
    console = Console(highlight=False)
    for finding in findings:
        topic, text = escape(finding.topic), escape(finding.text)
        console.print(f"{_MARKS[finding.state]} [bold]{topic}[/] {text}", soft_wrap=True)
        if finding.advice:
            console.print(f"        → {escape(finding.advice)}", soft_wrap=True)
