"""Engines that are killed, and those after them: as many tokens from old bytes as there can be, and the same answers.

    python store_scenario.py [NUM_KILLS]    in an environment with vLLM and kvpage; run by scripts/vllm_check.py

A line for each case. Exits 1 when something is not as it should be. Loads vLLM once; engines are forked.
"""

from __future__ import annotations

import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from kvpage.client.http import Client
from vllm_checks.store_engine import ENVIRONMENT, OPTIONS, EngineEnded, Fields, StoreEngine

PROMPT_TOKENS, NEW_TOKENS = 4096, 20
BLOCK_SIZE = OPTIONS["block_size"]
MOST_FOUND = PROMPT_TOKENS - BLOCK_SIZE
"""The block of the last token is computed: its logits are wanted."""
LEAST_FOUND = PROMPT_TOKENS * 9 // 10
NUM_KILLS = 20
STORE_BLOCKS = 2000
COST = Path(__file__).with_name("store_cost.py")
HELD_BYTES = 1 << 30
MAKE_MODEL = """
import sys, torch, transformers
from vllm_checks import models
for path, seed in zip(sys.argv[1:], (0, 1)):
    config = models.CONFIGS["llama"]()
    config.max_position_embeddings = 8192
    torch.manual_seed(seed)
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(path)
"""
SPOIL = """
import sys, kvpage
with kvpage.attach(sys.argv[1], run_dir=sys.argv[2]) as kv:
    kv.buffer.random_()
"""


class Failed(Exception):
    """What is not as it should be."""


class Service:
    """`kvpage serve`, which is killed and started again."""

    def __init__(self, folder: Path) -> None:
        self.run_dir, self._log = folder / "run", folder / "serve.log"
        self.start()

    def start(self) -> None:
        ready_out, ready_in = os.pipe()
        command = [sys.executable, "-m", "kvpage_server", "serve", "--run-dir", str(self.run_dir), "--memory", "2GiB"]
        with self._log.open("ab") as output:
            self._child = subprocess.Popen(
                [*command, "--ready-fd", str(ready_in)], pass_fds=[ready_in], stdout=output, stderr=output
            )
        os.close(ready_in)
        with open(ready_out, "rb") as ready:
            if ready.readline() != b"ready\n":
                raise Failed(f"kvpage serve did not start: {self._log.read_text()[-2000:]}")

    def client(self) -> Client:
        return Client(run_dir=str(self.run_dir), timeout_s=60)

    def kill(self) -> None:
        self._child.kill()
        self._child.wait()

    def kill_worker(self) -> None:
        with self.client() as client:
            [device] = client.devices()
        assert device.worker_pid is not None
        os.kill(device.worker_pid, signal.SIGKILL)

    def end(self) -> None:
        """The worker too."""
        self._child.terminate()
        self._child.wait(60)


class StoreScenario:
    def __init__(self, folder: Path, service: Service) -> None:
        self._folder, self._service = folder, service
        self._model, self._other = folder / "model", folder / "other"
        self._stock: dict[int, list[int]] = {}
        self._random = random.Random(time.time_ns())

    def run(self, num_kills: int) -> None:
        python(MAKE_MODEL, str(self._model), str(self._other))
        self._answer_stock(num_kills)
        self._check_restarts()
        self._check_refusals()
        self._check_memory()
        self._check_random_kills(num_kills)
        print(python_file(COST, str(self._service.run_dir)))

    # --- engines ------------------------------------------------------------------------------------------------------

    def _extra(self, **changes: Any) -> Fields:
        run_dir = str(self._service.run_dir)
        return {"pool": "engine", "run_dir": run_dir, "store": "kept", "store_blocks": STORE_BLOCKS} | changes

    def _engine(self, extra: Fields | None, model: Path | None = None, **options: Any) -> StoreEngine:
        is_one_process = options.pop("is_one_process", True)
        if extra is not None:
            config = {"kv_connector": "KvpageConnector", "kv_role": "kv_both"}
            config |= {"kv_connector_module_path": "kvpage.integrations.vllm"}
            options["kv_transfer_config"] = config | {"kv_connector_extra_config": extra}
        log = self._folder / "engine.log"
        return StoreEngine(model or self._model, options, log, is_one_process=is_one_process)

    def _answer_stock(self, num_kills: int) -> None:
        with self._engine(None, enable_prefix_caching=False).ready() as engine:
            for seed in range(num_kills + 2):
                self._stock[seed] = engine.answer(prompt_of(seed), NEW_TOKENS)["tokens"]
        if len(set(map(tuple, self._stock.values()))) < len(self._stock):
            raise Failed("a stock engine answers different prompts alike, so answers tell nothing")

    def _check(self, what: str, seed: int, engine: StoreEngine, least: int = LEAST_FOUND) -> Fields:
        """The answer, which is the stock engine's, with so many tokens from the store at least."""
        said = engine.answer(prompt_of(seed), NEW_TOKENS)
        if said["tokens"] != self._stock[seed]:
            raise Failed(f"{what}: the tokens are {said['tokens']}, of a stock engine {self._stock[seed]}")
        if said["external"] < least:
            raise Failed(f"{what}: {said['external']} of {PROMPT_TOKENS} tokens came from the store, not {least}")
        return said

    def _restarted(self, what: str, **options: Any) -> None:
        with self._engine(self._extra(), **options).ready() as engine:
            said = self._check(what, 0, engine)
        share = said["external"] / PROMPT_TOKENS
        print(
            f"{what}: {said['external']} of {PROMPT_TOKENS} tokens from the store ({share:.1%}), same answer",
            flush=True,
        )

    # --- cases --------------------------------------------------------------------------------------------------------

    def _check_restarts(self) -> None:
        with self._engine(self._extra()).ready() as engine:
            self._check("first engine", 0, engine, least=0)
        self._restarted("engine killed")
        self._restarted("again, scheduling in a process of its own", is_one_process=False)
        self._service.kill()
        self._service.start()
        self._restarted("engine and API process killed")
        self._service.kill_worker()
        self._restarted("engine and worker killed")
        self._service.kill()
        self._service.start()
        self._service.kill_worker()
        self._restarted("engine, API process, then worker killed")

    def _check_refusals(self) -> None:
        with self._engine(self._extra(), self._other).ready() as engine:
            if engine.answer(prompt_of(0), NEW_TOKENS)["external"]:
                raise Failed("an engine of other weights found blocks")
        print("other weights: nothing found")
        others: list[tuple[Fields, Fields]] = [
            ({"store_blocks": 99}, {}),
            ({"pool": "engine16"}, {"dtype": "bfloat16"}),
        ]
        for extra, options in others:
            with self._engine(self._extra(**extra), **options) as engine:
                refusal = refused(engine, "another layout or number")
            print(f"another layout: {refusal}")
        python(SPOIL, "kept", str(self._service.run_dir))
        with self._engine(self._extra()).ready() as engine:
            said = engine.answer(prompt_of(0), NEW_TOKENS)
        if said["tokens"] == self._stock[0] or not said["external"]:
            raise Failed("the answer does not depend on the bytes of the store, so it proves nothing")
        with self._service.client() as client:
            client.clear_prefixes(client.find_pool("kept").id)
        with self._engine(self._extra()).ready() as engine:
            if self._check("after clearing", 0, engine, least=0)["external"]:
                raise Failed("an engine found blocks of before everything was forgotten")
        print("bytes spoilt: another answer; everything forgotten: nothing found, same answer")

    def _check_memory(self) -> None:
        """Pools are memory that vLLM counts as taken by others, and its cache as if it were still to be taken."""
        layer = {"name": "l", "kind": "full_attention", "block_size": 16, "num_kv_heads": 8, "head_size": 128}
        with self._service.client() as client:
            held = client.create_pool(
                {"layers": [layer | {"dtype": "bfloat16"}], "strategy": "unify", "memory_bytes": HELD_BYTES},
                name="held",
            )
        total_bytes, available_bytes = memory_of_machine()
        most = (available_bytes + HELD_BYTES // 2) / total_bytes  # without the pool so much would be there
        for share, why in ((most, "desired CPU memory utilization"), (most / 10, "exists with plan")):
            options: Fields = {"kv_cache_memory_bytes": None, "gpu_memory_utilization": share}
            with self._engine(self._extra(), **options) as engine:
                print(f"memory, utilization {share:.2f} and no size: {refused(engine, why)}")
        with self._engine(self._extra(), gpu_memory_utilization=most).ready() as engine:
            self._check("memory", 0, engine)
        print(f"memory, utilization {most:.2f} and the size of before: starts, and finds its blocks")
        with self._service.client() as client:
            client.delete_pool(held.id, wait_s=60)

    def _check_random_kills(self, num_kills: int) -> None:
        """Each engine answers what the one before was killed in, then is killed in a prompt of its own."""
        with self._engine(self._extra()).ready() as engine:
            took_s = self._check("no kill", num_kills + 1, engine, least=0)["took_s"]
        found: list[int] = []
        for kill in range(num_kills + 1):
            with self._engine(self._extra(), is_one_process=bool(kill % 2)).ready() as engine:
                if kill:
                    found.append(self._check(f"after kill {kill}", kill, engine, least=0)["external"])
                if kill and (kill % 20 == 0 or kill == num_kills):
                    print(_killed(found, took_s))
                if kill == num_kills:
                    break
                engine.ask(prompt_of(kill + 1), NEW_TOKENS)
                time.sleep(self._random.uniform(0, took_s))
                engine.kill()


def _killed(found: list[int], took_s: float) -> str:
    """`found`: tokens that each next engine had of the prompt that the one before was killed in."""
    parts = sum(0 < tokens < MOST_FOUND for tokens in found)
    return (
        f"{len(found)} kills at random within {took_s:.2f} s of a prompt: the engines after gave the same answers; "
        f"{found.count(0)} found nothing of it, {parts} a part, {found.count(MOST_FOUND)} all; the median is "
        f"{statistics.median(found):.0f} of {PROMPT_TOKENS} tokens"
    )


def prompt_of(seed: int) -> list[int]:
    chosen = random.Random(seed)
    return [chosen.randrange(1, 96) for _ in range(PROMPT_TOKENS)]


def refused(engine: StoreEngine, why: str) -> str:
    """The line of its log that says so."""
    try:
        engine.ready()
    except EngineEnded as error:
        for line in str(error).splitlines():
            if why in line:
                return line.strip()[-300:]
        raise Failed(f"the engine ended, and not because of {why}: {error}") from None
    raise Failed(f"the engine started, in spite of {why}")


def memory_of_machine() -> tuple[int, int]:
    """Bytes, all and available, as vLLM counts them at start-up."""
    from vllm.v1.worker import cpu_worker

    status = cpu_worker.get_memory_node_info(cpu_worker.get_allowed_cpu_list()[0].numa_node)
    return status.total_memory, status.available_memory


def python_file(path: Path, *arguments: str) -> str:
    """What it prints."""
    done = subprocess.run([sys.executable, str(path), *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise Failed(done.stderr[-2000:])
    return done.stdout.strip()


def python(program: str, *arguments: str) -> None:
    """In a process of its own: this one forks, and must not compute."""
    done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise Failed(done.stderr[-2000:])


def main(num_kills: int) -> int:
    os.environ.update(ENVIRONMENT)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr] # and nothing for a fork to write again
    import vllm  # noqa: F401 - for all engines

    with tempfile.TemporaryDirectory(prefix="kvpage-store-") as name, ExitStack() as ends:
        folder = Path(name)
        try:
            service = Service(folder)
            ends.callback(service.end)
            StoreScenario(folder, service).run(num_kills)
        except (Failed, EngineEnded) as error:
            print(f"FAILED: {error}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else NUM_KILLS))
