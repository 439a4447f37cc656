"""`kvpage demo`: the whole of kvpage once, in real processes. Fails loudly when a single value is wrong."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from kvpage.cli.demo_models import hybrid, target_and_draft
from kvpage.cli.demo_page import HOW_TO_GET_IT, show_page
from kvpage.cli.demo_service import STEP_TIMEOUT_S, run_directory, service
from kvpage.cli.ending import Ending
from kvpage.cli.output import print_plan
from kvpage.cli.sizes import format_bytes
from kvpage.client.http import Client
from kvpage.errors import InternalError, KvpageError, NotSupported, how_to_install
from kvpage.memory.cuda import probe
from kvpage.planner.planner import plan as compute
from kvpage.plans import LayerPlan, Plan

_console = Console(highlight=False, soft_wrap=True)
_ENDING = Ending()


def run_demo(
    memory_bytes: int, keep: Path | None, device: str | None = None, *, as_json: bool = False, with_page: bool = False
) -> None:
    """Plan two models, create their pools on a service of our own, write in one process, check in another.

    `device`: None for a GPU where one can be used, else the host. `as_json`: print only what was measured, at the end.
    `with_page`: then serve the web page, until Ctrl-C.
    """
    _ENDING.begin()
    _console.quiet = as_json
    for package, extra in (("uvicorn", "server"), ("torch", "torch")):
        if find_spec(package) is None:
            raise NotSupported(f"the demo needs {package}: {how_to_install(extra)}")
    where, reason = (device, "as asked") if device else _best_device()
    measured = []
    with run_directory(keep) as run_dir, service(run_dir, where, _ENDING), Client(run_dir=run_dir) as client:
        _console.print(f"memory of device {where} ({escape(reason)})")
        for name, title, request in (
            ("mimo", "MiMo: target heads of 192, draft heads of 128 (pages 3:2)", target_and_draft(memory_bytes)),
            ("qwen3-next", "Qwen3-Next 80B: attention and recurrent states", hybrid(memory_bytes)),
        ):
            _console.rule(title)
            measured.append({"pool": name} | _run_model(client, run_dir, where, name, request))
    if as_json:
        sys.stdout.write(json.dumps({"device": where, "pools": measured}) + "\n")
    _console.print("\n[bold]all values right[/], padding untouched, no process left behind")
    if with_page:
        show_page(_console, _ENDING, memory_bytes, where)
    else:
        _console.print(HOW_TO_GET_IT)


def _best_device() -> tuple[str, str]:
    """`cuda:0` where its memory can be shared and torch can use it, else `host`; and the reason."""
    try:
        facts = probe("cuda:0")
    except KvpageError as error:
        return "host", f"no GPU can be used: {error.message}"
    if "cuda_vmm" in facts.unsupported or version("torch").endswith("+cpu"):
        reason = facts.unsupported.get("cuda_vmm", "torch is a build without CUDA")
        return "host", f"there is {facts.name}, but {reason}"
    return "cuda:0", f"{facts.name}, {facts.uuid}"


def _run_model(client: Client, run_dir: str, device: str, name: str, request: dict[str, Any]) -> dict[str, Any]:
    """What was measured and counted."""
    started = time.perf_counter()
    plan = compute(request)
    planned_s = time.perf_counter() - started
    if not _console.quiet:
        print_plan(plan)
        _print_strides(plan)

    started = time.perf_counter()
    pool = client.create_pool(request, device=device, name=name, plan_id=plan.plan_id)
    created_s = time.perf_counter() - started
    written = _process("write", name, run_dir)
    checked = _process("check", name, run_dir)
    if written["values"] != checked["values"]:
        raise InternalError(f"{written['values']} values were written, {checked['values']} checked")
    client.delete_pool(pool.id)
    _console.print(f"\nplanned in            {planned_s * 1e3:.1f} ms")
    _console.print(
        f"pool created in       {created_s * 1e3:.0f} ms ({format_bytes(pool.buffer_size_bytes)} on {device})"
    )
    _console.print(f"attached in           {written['attach_s'] * 1e3:.1f} ms (connect, map, wrap; first use of torch)")
    _console.print(f"process {written['pid']:<7} wrote {written['values']:,} values through the views")
    _console.print(f"process {checked['pid']:<7} read and compared {checked['values']:,} values: [bold]equal[/]")
    _console.print(
        f"                      and {checked['untouched_bytes']:,} bytes of padding and free pages: untouched"
    )
    return {
        "plan_id": plan.plan_id,
        "buffer_size_bytes": pool.buffer_size_bytes,
        "planned_s": planned_s,
        "created_s": created_s,
        "attached_s": written["attach_s"],
        "values": checked["values"],
        "untouched_bytes": checked["untouched_bytes"],
    }


def _print_strides(plan: Plan) -> None:
    _console.print()
    for layer in _one_of_each(plan):
        for view in layer.tensors:
            _console.print(
                f"{layer.name}/{view.name}: shape {view.shape} {view.dtype}, strides {view.strides_bytes} bytes"
            )


def _one_of_each(plan: Plan) -> Iterator[LayerPlan]:
    seen: set[object] = set()
    for layer in plan.layers.values():
        look = tuple((view.shape, view.strides_bytes) for view in layer.tensors)
        if look not in seen:
            seen.add(look)
            yield layer


def _process(role: str, pool: str, run_dir: str) -> dict[str, Any]:
    """Run one process that shares nothing with this one but the run directory; its report."""
    done = subprocess.run(
        [sys.executable, "-m", "kvpage.cli.demo_process", role, pool, run_dir],
        capture_output=True,
        text=True,
        timeout=STEP_TIMEOUT_S,
        start_new_session=True,
        check=False,
    )
    if done.returncode != 0:
        raise InternalError(f"the process that should {role} pool {pool!r} failed:\n{done.stderr.strip()}")
    report: dict[str, Any] = json.loads(done.stdout)
    return report
