"""Writes the table of docs/settings.md from the settings themselves: python scripts/settings_table.py"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvpage_server.setting_fields import BOTH, Fields, flag_of, is_switch, setting_of

PAGE = Path(__file__).resolve().parent.parent / "docs" / "settings.md"
BEGIN, END = "<!-- settings: written by the script -->", "<!-- end -->"


def main() -> None:
    PAGE.write_text(write(PAGE.read_text()))


def write(page: str) -> str:
    """`page` with its table written anew."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n" + "\n".join(_table()) + f"\n\n{END}{after}"


def _table() -> Iterator[str]:
    yield "| setting | flag | of | takes | default | meaning |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for name, field in Fields.model_fields.items():
        setting = setting_of(name)
        flag = flag_of(name) if is_switch(name) else f"{flag_of(name)} {setting.metavar}"
        programs = "both" if setting.programs == BOTH else setting.programs[0]
        cells = (f"`{name}`", f"`{flag}`", programs, setting.takes, _default(field.default), field.description or "")
        yield "| " + " | ".join(re.sub(r"\|", r"\\|", cell) for cell in cells) + " |"


def _default(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, tuple):
        return f"`{','.join(value)}`"
    return f"`{value:g}`" if isinstance(value, float) else f"`{str(value).lower()}`"


if __name__ == "__main__":
    main()
