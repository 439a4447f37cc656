"""Which metrics and labels an expression of PromQL names: as far as ours use the language, which promtool checks."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml

_SELECTOR = re.compile(r"\b(kvpage_\w+)(?:\{([^}]*)\})?")
_RECORDED = re.compile(r"\bkvpage:[\w:]+")
_LABEL = re.compile(r'(\w+)\s*(?:=~|!~|!=|=)\s*"')
_GROUPING = re.compile(r"\b(?:by|on|without|ignoring|group_left)\s*\(([^)]*)\)")
_STATE = re.compile(r'(\w+)\s*=\s*"([\w-]+)"')
ADDED = frozenset({"job", "instance", "le"})
"""Labels that Prometheus adds, and that of a histogram's buckets."""
_SUFFIX = re.compile(r"_(bucket|sum|count)$")


class Expression(NamedTuple):
    where: str
    text: str

    def metrics(self) -> dict[str, set[str]]:
        """Names of series, with the labels that are selected by."""
        found: dict[str, set[str]] = {}
        for name, selector in _SELECTOR.findall(self.text):
            found.setdefault(name, set()).update(_LABEL.findall(selector or ""))
        return found

    def values(self) -> set[tuple[str, str, str]]:
        """Metric, label and value, of what must be equal."""
        return {(name, *pair) for name, selector in _SELECTOR.findall(self.text) for pair in _STATE.findall(selector)}

    def grouping(self) -> set[str]:
        return {
            label.strip() for labels in _GROUPING.findall(self.text) for label in labels.split(",") if label.strip()
        }

    def recorded(self) -> set[str]:
        return set(_RECORDED.findall(self.text))


class Rules(NamedTuple):
    recorded: dict[str, str]
    """Expressions by the name they are recorded under."""
    alerts: list[dict[str, Any]]

    @classmethod
    def read(cls, path: Path) -> Rules:
        rules = [rule for group in yaml.safe_load(path.read_text())["groups"] for rule in group["rules"]]
        return cls({rule["record"]: rule["expr"] for rule in rules if "record" in rule},
                   [rule for rule in rules if "alert" in rule])  # fmt: skip

    def expressions(self) -> Iterator[Expression]:
        for name, text in self.recorded.items():
            yield Expression(name, text)
        for alert in self.alerts:
            yield Expression(alert["alert"], alert["expr"])


class Dashboard(NamedTuple):
    content: dict[str, Any]

    @classmethod
    def read(cls, path: Path) -> Dashboard:
        return cls(json.loads(path.read_text()))

    def panels(self) -> list[dict[str, Any]]:
        return [panel for panel in self.content["panels"] if panel["type"] != "row"]

    def expressions(self) -> Iterator[Expression]:
        for panel in self.panels():
            for target in panel["targets"]:
                yield Expression(panel["title"], target["expr"])

    def variables(self) -> Iterator[Expression]:
        for variable in self.content["templating"]["list"]:
            if variable["type"] == "query":
                yield Expression(f"variable {variable['name']}", variable["definition"])

    def legends(self) -> Iterator[tuple[str, str, set[str]]]:
        """Panel, expression, and the labels that the legend shows."""
        for panel in self.panels():
            for target in panel["targets"]:
                yield panel["title"], target["expr"], set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))


def as_promtool_reads(text: str) -> str:
    """An expression of the dashboard, with what Grafana puts in place of its variables."""
    return text.replace("$__rate_interval", "5m").replace("$__range", "1h")


def faults(expression: Expression, described: dict[str, tuple[str, set[str]]], recorded: set[str]) -> list[str]:
    """`described`: kind and labels by name, as /metrics has them."""
    found = []
    labels_there: set[str] = set(ADDED)
    for name, labels in expression.metrics().items():
        known = described.get(name) or described.get(_SUFFIX.sub("", name))
        if known is None or (name in described and known[0] == "histogram"):
            found.append(f"{expression.where}: there is no series {name}")
            continue
        if _SUFFIX.search(name) and name not in described and known[0] != "histogram":
            found.append(f"{expression.where}: {name} is of no histogram")
        labels_there |= known[1]
        found += [f"{expression.where}: {name} has no label {label}" for label in labels - known[1] - ADDED]
    if expression.metrics():
        found += [f"{expression.where}: nothing has a label {label}" for label in expression.grouping() - labels_there]
    found += [f"{expression.where}: nothing records {name}" for name in expression.recorded() - recorded]
    return found
