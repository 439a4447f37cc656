"""What a hook into SGLang needs is in its released source: recorded, and read again where there is one.

SGLANG_SOURCE names the folder that holds the package `sglang`, as an unpacked wheel has; an installed one is found. It
is parsed and never run: it needs a GPU and kernels of its own.
"""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path

import pytest

import kvpage
from integrations.sglang_source import POOL_HOOK, POOLS, REGISTRY, Json, Missing, facts
from support.checkout import ROOT

RECORD = ROOT / "tests/data/readers/sglang.json"
PAGE = ROOT / "docs/sglang.md"

MADE_UP = {
    "sglang/srt/plugins/__init__.py": (
        'GENERAL_PLUGINS_GROUP = "sglang.srt.plugins"\ndef load_plugins():\n    HookRegistry.apply_hooks()\n'
    ),
    REGISTRY: (
        'class HookType:\n    AROUND = "around"\n    REPLACE = "replace"\n'
        "class HookRegistry:\n    def register(cls, target, hook, hook_type): ...\n"
    ),
    "sglang/srt/managers/scheduler.py": "def run_scheduler_process():\n    load_plugins()\n",
    POOL_HOOK: "def maybe_init_custom_mem_pool(device: str): ...\n",
    POOLS: (
        "from sglang.srt.mem_cache.utils import maybe_init_custom_mem_pool\n"
        "class KVCache:\n    def __init__(self):\n        maybe_init_custom_mem_pool(device=1)\n"
        "class MHATokenToKVPool(KVCache):\n"
        "    def __init__(self):\n        self._create_buffers()\n"
        "    def _create_buffers(self):\n        self._create_buffers_normal()\n"
        "    def _create_buffers_normal(self):\n        torch.cuda.use_mem_pool(1)\n"
    ),
}
"""The least that a hook needs."""


def recorded() -> Json:
    record: Json = json.loads(RECORD.read_text())
    return record


def test_the_document_says_what_was_found_and_where() -> None:
    record, text = recorded(), PAGE.read_text()
    names = [record["plugins"]["entry_point_group"], record["hook"]["name"], record["pool"]["name"]]
    names += [f"SGLang {record['sglang']}", *record["pool"]["buffers_made_by"], *record["pool"]["replaced_in"]]
    names += [path.removeprefix("sglang/srt/mem_cache/") for path in record["hook"]["imported_by_name_in"]]
    assert [name for name in names if name not in text] == []
    assert "AROUND" in record["plugins"]["HookType"]


def test_its_buffers_are_those_of_a_layout_that_kvpage_has() -> None:
    """One allocation for each layer, (2, blocks × tokens, heads, width), K before V: as the document says."""
    layer = {"name": "a.{i}", "count": 2, "kind": "full_attention", "num_kv_heads": 4, "head_size": 64}
    attention = layer | {"dtype": "bfloat16", "block_size": 16, "backend": "rocm_attn"}
    plan = kvpage.plan({"layers": [attention], "num_blocks": 10, "strategy": "unify"})
    view = plan.layers["a.1"].tensors[0]
    rows = 10 * 16
    assert view.shape == (2, 10, 16, 4, 64)
    assert view.strides_bytes == (rows * 512, 16 * 512, 512, 128, 2)
    assert view.offset_bytes == 2 * rows * 512


def write(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def test_the_least_that_a_hook_needs_is_enough(tmp_path: Path) -> None:
    found = facts(write(tmp_path, MADE_UP))
    assert found["hook"]["imported_by_name_in"] == [POOLS]
    assert (found["sglang"], found["pool"]["replaced_in"]) == ("unknown", [])


@pytest.mark.parametrize(
    ("there", "instead"),
    [
        ("GENERAL_PLUGINS_GROUP", "PLUGINS"),
        ("HookRegistry.apply_hooks", "apply"),
        ("    AROUND", "    BEFORE"),
        ("def register", "def add"),
        ("    load_plugins", "    start"),
        ("def maybe_init", "def init"),
        ("        maybe_init", "        init"),
        ("class MHATokenToKVPool", "class Pool"),
        ("def _create_buffers_normal", "def _make"),
        ("self._create_buffers_normal", "self._make"),
        ("torch.cuda.use_mem_pool", "use"),
    ],
)
def test_what_is_missing_is_found(tmp_path: Path, there: str, instead: str) -> None:
    changed = {path: text.replace(there, instead) for path, text in MADE_UP.items()}
    assert changed != MADE_UP
    with pytest.raises(Missing):
        facts(write(tmp_path, changed))


def test_a_file_that_is_not_there_is_missing(tmp_path: Path) -> None:
    with pytest.raises(Missing, match=r"scheduler\.py"):
        facts(write(tmp_path, {name: text for name, text in MADE_UP.items() if "scheduler" not in name}))


def source() -> Path:
    """The folder of the package; skips where there is none."""
    named = os.environ.get("SGLANG_SOURCE")
    found = importlib.util.find_spec("sglang") if named is None else None
    if named is None and (found is None or found.origin is None):
        pytest.skip("no SGLang: install it, or name its folder in SGLANG_SOURCE")
    return Path(named) if named else Path(str(found.origin if found else "")).parents[1]


def test_a_real_sglang_is_as_recorded() -> None:
    assert facts(source()) == recorded()
