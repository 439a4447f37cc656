"""What shells offer after TAB: from a real service, from none, and from one that does not answer."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvpage.cli import completion
from kvpage.run_directory import API_SOCKET
from support.api_service import ApiService
from support.command_line import run_here
from support.plan_requests import small_request
from support.stand_in_service import StandInService

PROGRAM = Path(sys.executable).with_name("kvpage")
HOSTILE = "$(touch /tmp/x)"
needs_bash = pytest.mark.skipif(not shutil.which("bash"), reason="bash is not installed")


def in_bash(script: str, home: Path, **environment: str) -> list[str]:
    """Lines that a script prints; it may print nothing else."""
    path = f"{PROGRAM.parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "--norc", "-c", script], capture_output=True, text=True, check=False, timeout=120,
        env=os.environ | {"HOME": str(home), "PATH": path} | environment,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, ""), done
    return done.stdout.splitlines()


OFFERED = """
eval "$(_KVPAGE_COMPLETE=source_bash kvpage)"
offer() {
    COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMPREPLY=(); _kvpage_completion kvpage
    printf '%s\\n' "${COMPREPLY[*]}"
}
"""


@needs_bash
def test_bash_offers_commands_values_and_pools(run_dir: Path, tmp_path: Path) -> None:
    words = ["kvpage e", "kvpage pools s", "kvpage plan --strat", "kvpage plan --strategy s", "kvpage pools show ''"]
    script = OFFERED + "IFS=' '\n" + "\n".join(f"offer {line}" for line in words)
    with ApiService(run_dir, "--memory", "64MiB") as service, service.client() as client:
        for name in ("mimo", "draft", HOSTILE):
            client.create_pool(small_request(memory_bytes=4 << 20), name=name)
        offered = in_bash(script, tmp_path, KVPAGE_RUN_DIR=str(run_dir))
    assert offered == ["events", "show set-tenant", "--strategy", "scale_then_pad slab", "draft mimo"]


@needs_bash
def test_it_is_installed_for_the_shell_it_is_typed_in(tmp_path: Path) -> None:
    shown = in_bash("kvpage --show-completion; true", tmp_path)
    assert "complete -o default -F _kvpage_completion kvpage" in shown
    in_bash("kvpage --install-completion > /dev/null; true", tmp_path)
    bash = ["bash", "--rcfile", str(tmp_path / ".bashrc"), "-i", "-c", "complete -p kvpage"]
    done = subprocess.run(
        bash, capture_output=True, text=True, check=False, timeout=60, stdin=subprocess.DEVNULL,
        env=os.environ | {"HOME": str(tmp_path)},
    )  # fmt: skip
    assert done.stdout == "complete -o default -F _kvpage_completion kvpage\n", done.stderr


def protocol(shell: str, words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """What the shell's script asks, which is not needed for that."""
    asked = {"_KVPAGE_COMPLETE": f"complete_{shell}", "_TYPER_COMPLETE_ARGS": words}
    return run_here(**asked, **environment)


@pytest.mark.parametrize(
    ("shell", "environment", "expected"),
    [
        ("zsh", {}, '_arguments \'*: :(("events"'),
        ("fish", {"_TYPER_COMPLETE_FISH_ACTION": "get-args"}, "events\t"),
    ],
)
def test_zsh_and_fish_are_answered_in_their_own_way(shell: str, environment: dict[str, str], expected: str) -> None:
    done = protocol(shell, "kvpage ev", **environment)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(expected)


def offered(complete: Any, run_dir: Path | str, incomplete: str = "", **params: str) -> list[str]:
    typed: Any = SimpleNamespace(params={"run_dir": str(run_dir), **params})
    found: Sequence[str] = complete(typed, incomplete)
    return list(found)


def test_without_a_service_nothing_is_offered_and_nothing_said(
    run_dir: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(completion, "TIMEOUT_S", 0.05)
    assert offered(completion.pools, run_dir) == []
    assert offered(completion.devices, run_dir) == ["host"]
    assert offered(completion.pools, "x" * 200) == []
    run_dir.mkdir(exist_ok=True)
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(run_dir / API_SOCKET))
        silent.listen()
        assert offered(completion.pools, run_dir) == []
        assert offered(completion.tenants, run_dir, pool="mimo") == []
    (run_dir / API_SOCKET).unlink()
    with StandInService(run_dir, lambda _: (200, {"nonsense": 1})):
        assert offered(completion.pools, run_dir) == []
    assert capfd.readouterr() == ("", "")


def test_names_that_a_shell_would_obey_are_not_offered(run_dir: Path) -> None:
    names = ["good-1", "two words", "a;b", "`x`", HOSTILE, "a'b", "a\nb", "ünïcode"]
    pools = [
        {
            "id": f"pool-{number:016x}", "name": name, "device": "host", "state": "ready", "plan_id": "", "epoch": "",
            "buffer_size_bytes": 1, "committed_bytes": 1, "num_holders": 0, "holders": [],
        }
        for number, name in enumerate(names)
    ]  # fmt: skip
    with StandInService(run_dir, lambda _: (200, {"pools": pools})):
        assert offered(completion.pools, run_dir) == ["good-1"]
        assert len(offered(completion.pools, run_dir, "pool-")) == len(names)


def test_values_with_commas_between_are_completed_one_by_one() -> None:
    complete: Any = completion.listed(lambda: ["unify", "nested", "slab"])
    assert complete("unify,n") == ["unify,nested"]
    assert complete("unify,") == ["unify,nested", "unify,slab"]
