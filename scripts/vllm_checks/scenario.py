"""Engines of tiny models, stock and with kvpage's connector: the same tokens, and the bytes where others see them.

    python scenario.py TRACE_FOLDER         in an environment with vLLM and kvpage; run by scripts/vllm_check.py

A line for each engine. Exits 1 when something is not as it should be.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import kvpage
from vllm_checks import engine, models

ENGINE = Path(engine.__file__)
LOG_LINES = 25
QUIET = {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
TWO_RANKS = {"tensor_parallel_size": 2}

Fields = dict[str, Any]


class Failed(Exception):
    """What is not as it should be."""


class Ended(Failed):
    """The engine did, with what it said last."""


class Engine:
    """A vLLM engine that has generated, until it is told to end."""

    def __init__(self, model: Path, options: Fields, log: Path) -> None:
        self._log, is_only_started = log, model.name in models.ONLY_STARTED
        environment = os.environ | QUIET
        if options.get("tensor_parallel_size", 1) > 1:
            environment["VLLM_CPU_OMP_THREADS_BIND"] = "0|1"  # a core for each rank
        else:
            environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # so that it can say what it saw
        command = [sys.executable, str(ENGINE), str(model), json.dumps(options), *["--only-start"] * is_only_started]
        with log.open("wb") as errors:
            self._child = subprocess.Popen(
                command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
            )
        try:
            self.said = self._next()
        except BaseException:
            self._child.kill()
            raise

    def _next(self) -> Fields:
        assert self._child.stdout is not None
        for line in self._child.stdout:
            if line.startswith("SAID "):
                said: Fields = json.loads(line.removeprefix("SAID "))
                return said
        lines = self._log.read_text(errors="replace").splitlines()
        raise Ended("the engine ended: " + "\n".join(lines[-LOG_LINES:]))

    def end(self) -> Fields | None:
        """Tell it to; the trace, if it has one."""
        assert self._child.stdin is not None
        self._child.stdin.write("\n")
        self._child.stdin.flush()
        trace = None
        with contextlib.suppress(Ended):
            trace = self._next()
        if self._child.wait(120) != 0:
            raise Failed(f"the engine ended with {self._child.returncode}: {self._log.read_text()[-2000:]}")
        return trace

    def kill(self) -> None:
        self._child.kill()
        self._child.wait()


@contextmanager
def running(model: Path, options: Fields, log: Path) -> Iterator[Engine]:
    started = Engine(model, options, log)
    try:
        yield started
    finally:
        started.kill()


def connector(name: str, pool: str, run_dir: Path, module: str = "kvpage.integrations.vllm") -> Fields:
    extra = {"pool": pool, "run_dir": str(run_dir)}
    config = {"kv_connector": name, "kv_role": "kv_both", "kv_connector_module_path": module}
    return {"kv_transfer_config": config | {"kv_connector_extra_config": extra}}


class Scenario:
    def __init__(self, folder: Path, traces: Path) -> None:
        self._folder, self._traces = folder, traces
        self._run_dir = folder / "run"
        self._log = folder / "engine.log"

    def run(self) -> None:
        for name in models.CONFIGS:
            model = models.save(name, self._folder)
            if name in models.ONLY_STARTED:
                self._check(name, "started on its pool", model, [], record=True)
                continue
            stock = self._tokens(name, "stock", model, {})
            self._check(name, "first on its pool", model, stock, record=True)
            self._spoil(name)
            self._check(name, "on a pool full of what is no number", model, stock, record=False)
        model = self._folder / "llama"
        self._check_alone(model)
        stock = self._tokens("llama", "stock, two ranks", model, TWO_RANKS)
        self._check_ranks(model, stock)

    def _tokens(self, name: str, what: str, model: Path, options: Fields) -> Any:
        with timed(f"{name}, {what}"), running(model, options, self._log) as started:
            started.end()
            return started.said["tokens"]

    def _check(self, name: str, what: str, model: Path, stock: Any, *, record: bool) -> None:
        options = connector("RecordingConnector", name, self._run_dir, "vllm_checks.recording")
        with timed(f"{name}, {what}"), running(model, options, self._log) as started:
            same("tokens", started.said["tokens"], stock)
            if name not in models.ONLY_STARTED:
                self._check_bytes(name, started.said["digests"])
            trace = started.end()
        if record:
            if trace is None:
                raise Failed("the engine gave no trace")
            self._write(name, trace)

    def _check_alone(self, model: Path) -> None:
        """A second engine on the pool of one that lives is refused; after kill -9 the next one is not."""
        options = connector("KvpageConnector", "alone", self._run_dir)
        with timed("llama, two engines on one pool, and one after kill -9"):
            with running(model, options, self._log) as first:
                try:
                    with running(model, options, self._log.with_name("second.log")):
                        raise Failed("a second engine started on the pool of another")
                except Ended as refused:
                    if "is in use by others" not in str(refused):
                        raise
                first.kill()
            with running(model, options, self._log) as third:
                same("tokens", third.said["tokens"], first.said["tokens"])
                third.end()

    def _check_bytes(self, name: str, digests: Fields) -> None:
        """Of each layer, in this process and in the engine's."""
        with kvpage.attach(name, run_dir=str(self._run_dir)) as kv:
            mine = {layer: engine.digest(kv.tensor(layer)) for layer in kv.tensors}
            same("bytes in another process", mine, {layer: digests[layer] for layer in mine})
            if not all(torch.count_nonzero(kv.tensor(layer)) for layer in kv.tensors):
                raise Failed("a layer of the pool has nothing but zeros")

    def _check_ranks(self, model: Path, stock: Any) -> None:
        options = TWO_RANKS | connector("KvpageConnector", "ranks", self._run_dir)
        with timed("llama, two ranks on a pool each"), running(model, options, self._log) as started:
            same("tokens", started.said["tokens"], stock)
            for rank in range(2):
                with kvpage.attach(f"ranks-rank{rank}", run_dir=str(self._run_dir)) as kv:
                    if not torch.count_nonzero(kv.buffer):
                        raise Failed(f"the pool of rank {rank} has nothing but zeros")
            started.end()

    def _spoil(self, pool: str) -> None:
        with kvpage.attach(pool, run_dir=str(self._run_dir)) as kv:
            kv.buffer.fill_(255)

    def _write(self, name: str, trace: Fields) -> None:
        path = self._traces / f"vllm_{name}.json"
        text = json.dumps(trace, indent=1) + "\n"
        changed = not path.exists() or path.read_text() != text
        path.write_text(text)
        print(f"{path.name}: {'written anew' if changed else 'as it was'}", flush=True)


def same(what: str, ours: Any, stock: Any) -> None:
    if ours != stock:
        raise Failed(f"{what} differ: {ours} and {stock}")


@contextmanager
def timed(what: str) -> Iterator[None]:
    began = time.monotonic()
    yield
    print(f"{what}: as it should be ({time.monotonic() - began:.0f} s)", flush=True)


@contextmanager
def service(run_dir: Path, log: Path) -> Iterator[None]:
    """`kvpage serve`, until the end. SIGTERM ends the worker too."""
    ready_out, ready_in = os.pipe()
    command = [sys.executable, "-m", "kvpage_server", "serve", "--run-dir", str(run_dir), "--memory", "256MiB"]
    with log.open("wb") as output:
        child = subprocess.Popen(
            [*command, "--ready-fd", str(ready_in)], pass_fds=[ready_in], stdout=output, stderr=output
        )
    os.close(ready_in)
    try:
        with open(ready_out, "rb") as ready:
            if ready.readline() != b"ready\n":
                raise Failed(f"kvpage serve did not start: {log.read_text()[-2000:]}")
        yield
    finally:
        child.terminate()
        child.wait(60)


def main(traces: Path) -> int:
    with tempfile.TemporaryDirectory(prefix="kvpage-vllm-") as name:
        folder = Path(name)
        try:
            with service(folder / "run", folder / "serve.log"):
                Scenario(folder, traces).run()
        except Failed as error:
            print(f"FAILED: {error}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
