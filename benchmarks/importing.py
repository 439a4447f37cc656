"""What `import kvpage`, short commands and the settings of a worker cost beside an empty interpreter, and the memory
of the two server processes.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import kvpage
from measure import print_table, take_turns

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "mimo.json"


def main() -> None:
    timings = take_turns(
        {
            "python -c pass": lambda: _python("pass"),
            "import kvpage": lambda: _python("import kvpage"),
            "import kvpage; kvpage.plan": lambda: _python("import kvpage; kvpage.plan"),
            "kvpage health": lambda: _command("health", "--run-dir", "/nonexistent"),
            "kvpage --help": lambda: _command("--help"),
            "kvpage plan examples/mimo.json": lambda: _command("plan", str(EXAMPLE)),
        },
        rounds=20,
    )
    print_table("starting", timings, floor="python -c pass")
    _print_start_of_worker()
    _print_memory()


def _print_start_of_worker() -> None:
    """Until clients can connect: a worker that is given everything, and one whose settings are read for it."""
    timings = take_turns(
        {"worker": lambda: _worker("worker"), "settings, then worker": lambda: _worker("start-worker")}, rounds=10
    )
    print_table("starting a worker", timings, floor="worker")


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


def _print_memory() -> None:
    """Resident memory of an idle API process and its worker."""
    with tempfile.TemporaryDirectory(prefix="kvpage-bench-") as folder:
        ready, told = os.pipe()
        command = [sys.executable, "-m", "kvpage_server", "serve", "--run-dir", folder, "--ready-fd", str(told)]
        command += ["--config", os.devnull]  # no settings of this machine
        server = subprocess.Popen(command, pass_fds=[told], stderr=subprocess.DEVNULL)
        os.close(told)
        os.read(ready, 1)
        os.close(ready)
        with kvpage.Client(run_dir=folder) as client:
            [device] = client.devices()
        print("resident memory of idle processes")
        print(f"  {'API process':<40} {_resident_mib(server.pid):6.1f} MiB")
        if device.worker_pid is not None:
            print(f"  {'device worker':<40} {_resident_mib(device.worker_pid):6.1f} MiB")
        server.terminate()
        server.wait()


def _resident_mib(pid: int) -> float:
    found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) / 1024


if __name__ == "__main__":
    main()
