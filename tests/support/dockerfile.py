"""A Dockerfile as stages of instructions, as far as this project's uses the language."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")
_PAIR = re.compile(r'(\w[\w.]*)=("[^"]*"|\S+)')


@dataclass(frozen=True, slots=True)
class Instruction:
    name: str
    """Such as RUN, in capitals."""
    text: str
    """All that follows it, continued lines joined."""

    @property
    def words(self) -> list[str]:
        """Of the exec form, which is JSON, or separated by blanks."""
        return list(json.loads(self.text)) if self.text.startswith("[") else self.text.split()

    @property
    def flags(self) -> dict[str, str]:
        found = (word[2:].partition("=") for word in self.words if word.startswith("--"))
        return {name: value for name, _, value in found}

    @property
    def operands(self) -> list[str]:
        return [word for word in self.words if not word.startswith("--")]

    @property
    def pairs(self) -> dict[str, str]:
        """Of ENV and LABEL."""
        return {name: value.strip('"') for name, value in _PAIR.findall(self.text)}


@dataclass(frozen=True, slots=True)
class Stage:
    name: str
    base: str
    """Another stage, or an image."""
    instructions: tuple[Instruction, ...]

    def all(self, name: str) -> list[Instruction]:
        return [one for one in self.instructions if one.name == name]

    def last(self, name: str) -> Instruction | None:
        return next(iter(self.all(name)[::-1]), None)


@dataclass(frozen=True, slots=True)
class Dockerfile:
    arguments: Mapping[str, str]
    """Defaults of those before the first stage."""
    stages: Mapping[str, Stage]

    @classmethod
    def read(cls, path: Path) -> Dockerfile:
        lines = [line for line in path.read_text().splitlines() if not line.lstrip().startswith("#")]
        joined = re.sub(r"\s*\\\n\s*", " ", "\n".join(lines))
        arguments: dict[str, str] = {}
        stages: dict[str, Stage] = {}
        for line in filter(None, map(str.strip, joined.splitlines())):
            one = Instruction(*line.split(maxsplit=1))
            if one.name == "FROM":
                base, _, name = one.words
                stages[name] = Stage(name, expanded(base, arguments), ())
            elif stages:
                name, stage = stages.popitem()
                stages[name] = Stage(name, stage.base, (*stage.instructions, one))
            else:
                name, _, default = one.text.partition("=")
                arguments[name] = default
        return cls(arguments, stages)

    def lineage(self, name: str) -> list[Stage]:
        """The stage and those it is made from, the first one first."""
        stage = self.stages[name]
        return [*(self.lineage(stage.base) if stage.base in self.stages else []), stage]

    def last(self, target: str, name: str) -> Instruction:
        """The instruction that holds for an image. Raises StopIteration where there is none."""
        return next(found for stage in reversed(self.lineage(target)) if (found := stage.last(name)))

    def environment(self, target: str) -> dict[str, str]:
        found: dict[str, str] = {}
        for stage in self.lineage(target):
            for one in stage.all("ENV"):
                found |= one.pairs
        return found


def expanded(text: str, variables: Mapping[str, str]) -> str:
    return _VARIABLE.sub(lambda found: variables.get(found[1] or found[2], ""), text)
