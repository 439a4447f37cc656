"""What `import kvpage`, short commands and the start of a worker cost beside an empty interpreter, and the memory of
the two server processes beside that of an empty server.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import kvpage
from measure import MIN_ROUNDS, Effort, Row, Runs, beside, compare, take_turns
from report import Pair, Subject, main_of
from serving import floor

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "mimo.json"
EMPTY = "`python -c pass`"
SERVER, WORKER = "resident memory of an idle API process", "resident memory of an idle worker"
EMPTY_SERVER, EMPTY_MEMORY = "an idle server with an empty FastAPI", f"that of {EMPTY}"
STARTS: dict[str, Callable[[], object]] = {
    EMPTY: lambda: _python("pass"),
    "`import kvpage`": lambda: _python("import kvpage"),
    "`import kvpage; kvpage.plan`": lambda: _python("import kvpage; kvpage.plan"),
    "`kvpage health`, nobody there": lambda: _command("health", "--run-dir", "/nonexistent"),
    "`kvpage --help`": lambda: _command("--help"),
    "`kvpage plan examples/mimo.json`": lambda: _command("plan", str(EXAMPLE)),
    "a worker, until clients can connect": lambda: _worker("worker"),
    "the same, which reads its settings": lambda: _worker("start-worker"),
}
START_ROUNDS, MEMORY_ROUNDS = 10, 3
ABOUT = """
`benchmarks/importing.py`. Processes are started until they have ended, or, of workers, until clients can connect.
Beside them: an interpreter that does nothing. The memory is that of idle processes of `kvpage serve`, beside a server
of uvicorn and FastAPI with two empty endpoints, and beside an interpreter that waits.
"""


def measure(effort: Effort) -> list[Row]:
    rows = beside(EMPTY, take_turns(STARTS, rounds=effort.rounds(START_ROUNDS), warm_up=1))
    sizes = [_memory() for _ in range(max(MIN_ROUNDS, effort.rounds(MEMORY_ROUNDS)))]
    by_name = {name: Runs(name, tuple(one[name] for one in sizes)) for name in sizes[0]}
    rows.append(compare(by_name[SERVER], by_name[EMPTY_SERVER], unit="bytes"))
    rows.append(compare(by_name[WORKER], by_name[EMPTY_MEMORY], unit="bytes"))
    return rows


def _worker(program: str) -> None:
    with tempfile.TemporaryDirectory(prefix="kvpage-bench-") as folder:
        ready, told = os.pipe()
        command = [sys.executable, "-m", "kvpage_server", program, "--device", "host", "--run-dir", folder]
        worker = subprocess.Popen([*command, "--ready-fd", str(told)], pass_fds=[told], stderr=subprocess.DEVNULL)
        os.close(told)
        os.read(ready, 1)
        os.close(ready)
        worker.kill()
        worker.wait()


def _python(code: str) -> None:
    subprocess.run([sys.executable, "-c", code], check=True)


def _command(*arguments: str) -> None:
    """As a person types it; a probe that finds nobody ends with 1."""
    command = [sys.executable, "-c", "from kvpage.cli import main; main()", *arguments]
    subprocess.run(command, check=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def _memory() -> dict[str, float]:
    """Bytes of an API process, its worker, an empty server and an empty interpreter, all just started."""
    with tempfile.TemporaryDirectory(prefix="kvpage-bench-") as folder:
        sizes = _memory_of_ours(folder)
        with floor(f"{folder}/floor.sock", "fastapi") as pid:
            sizes[EMPTY_SERVER] = _resident_bytes(pid)
        code = "print(flush=True); input()"
        with subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as interpreter:
            assert interpreter.stdout is not None
            interpreter.stdout.readline()
            sizes[EMPTY_MEMORY] = _resident_bytes(interpreter.pid)
            interpreter.communicate(b"\n")
    return sizes


def _memory_of_ours(folder: str) -> dict[str, float]:
    ready, told = os.pipe()
    command = [sys.executable, "-m", "kvpage_server", "serve", "--run-dir", folder, "--ready-fd", str(told)]
    command += ["--config", os.devnull]  # no settings of this machine
    server = subprocess.Popen(command, pass_fds=[told], stderr=subprocess.DEVNULL)
    os.close(told)
    try:
        os.read(ready, 1)
        with kvpage.Client(run_dir=folder) as client:
            [device] = client.devices()
        assert device.worker_pid is not None
        return {SERVER: _resident_bytes(server.pid), WORKER: _resident_bytes(device.worker_pid)}
    finally:
        os.close(ready)
        server.terminate()
        server.wait()


def _resident_bytes(pid: int) -> float:
    found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return float(found[1]) * 1024


PAIRS: tuple[Pair, ...] = (
    *((name, EMPTY) for name in STARTS if name != EMPTY),
    (SERVER, EMPTY_SERVER),
    (WORKER, EMPTY_MEMORY),
)
SUBJECT = Subject(title="Starting", about=ABOUT, pairs=PAIRS, measure=measure)

if __name__ == "__main__":
    main_of(SUBJECT)
