"""What the documents say is true: Python runs, JSON plans, numbers and pictures are those of the planner."""

from __future__ import annotations

import importlib.util
import json
import re
from typing import Any

import pytest

import kvpage
from kvpage.backends import BACKENDS
from support.checkout import ROOT

FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(document: str, language: str) -> list[str]:
    return [text for kind, text in FENCE.findall((ROOT / document).read_text()) if kind == language]


@pytest.mark.parametrize(
    ("document", "asserts"),
    [
        ("docs/layout.md", 8),
        ("docs/strategies.md", 6),
        ("docs/allocator.md", 1),
        ("docs/leases.md", 1),
        ("docs/ranks.md", 6),
        ("docs/readers.md", 5),
    ],
)
def test_a_guide_runs(document: str, asserts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    code = "\n".join(blocks(document, "python"))
    assert code.count("assert ") >= asserts
    exec(compile(code, document, "exec"), {})


def test_the_requests_in_the_layout_guide_are_valid() -> None:
    request, backend = map(json.loads, blocks("docs/layout.md", "json"))
    plan = kvpage.plan(request)
    assert plan == kvpage.plan(json.loads((ROOT / "examples/mimo.json").read_text()))
    layer = request["layers"][0] | {"backend": backend}
    assert kvpage.plan(request | {"layers": [layer]}).num_blocks


def readme_table() -> dict[str, list[str]]:
    """Cells by the first word of the row, of the table in the example."""
    rows = re.findall(r"^\| (\w+\.0) … \S+ \| (\w+) \| (\d+) \| ([\d,]+) \| (.+?) \|$", readme(), re.MULTILINE)
    return {name: cells for name, *cells in rows}


def readme() -> str:
    return (ROOT / "README.md").read_text()


def test_the_table_in_the_readme_is_the_plan() -> None:
    plan = kvpage.plan(json.loads((ROOT / "examples/mimo.json").read_text()))
    table = readme_table()
    assert set(table) == {"target.0", "draft.0"}
    for name, cells in table.items():
        layer = plan.layers[name]
        padding = layer.page_size_bytes - layer.real_page_size_bytes
        share = f" ({padding / layer.page_size_bytes:.1%})" if padding else ""
        expected = [layer.decision, str(layer.block_size), f"{layer.page_size_bytes:,}", f"{padding:,}{share}"]
        assert cells == expected, name
    view = plan.layers["draft.0"].tensors[0]
    text = readme()
    assert f"has {plan.num_blocks} blocks of {plan.bytes_per_block:,} bytes" in text
    assert f"shape {view.shape} with strides {view.strides_bytes} bytes" in text


def test_the_picture_is_drawn_from_the_plan() -> None:
    assert _script("draw_pages").draw() == (ROOT / "docs/pages.svg").read_text(), "run python scripts/draw_pages.py"


def test_the_pictures_of_layouts_are_drawn_from_their_plans() -> None:
    drawn = dict(_script("draw_layouts").draw())
    others = {ROOT / "docs/img/batches.svg", ROOT / "docs/img/ui.png"}
    assert set(drawn) | others == set((ROOT / "docs/img").iterdir())
    for path, svg in drawn.items():
        assert path.read_text() == svg, "run python scripts/draw_layouts.py"


def test_the_picture_of_batches_is_drawn_from_the_table() -> None:
    script = _script("draw_batches")
    models = dict(script.rows())
    assert len(models) == 12
    assert models["gemma-3-27b"]["nested"] == (138, 0.97)
    assert script.draw() == (ROOT / "docs/img/batches.svg").read_text(), "run python scripts/draw_batches.py"


def test_the_picture_of_the_page_is_a_png_of_bounded_size() -> None:
    picture = (ROOT / "docs/img/ui.png").read_bytes()
    assert picture[:8] == b"\x89PNG\r\n\x1a\n"
    assert len(picture) < 250_000, "run python scripts/draw_ui.py"


def _script(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_registered_backends_are_listed() -> None:
    text = (ROOT / "docs/layout.md").read_text()
    listed = re.search(r"^Registered: (.+)\.$", text, re.MULTILINE)
    assert listed is not None
    assert listed[1].replace("`", "").split(", ") == sorted(BACKENDS)
