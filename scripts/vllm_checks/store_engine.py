"""A vLLM engine that answers prompts until it is killed, in a child of a process that has loaded vLLM before.

Loading vLLM takes most of an engine's start, so a child is forked from a process that has: in a hundred engines that is
most of the time. That process must compute nothing itself.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import IO, Any, Self

Fields = dict[str, Any]

MAX_MODEL_LEN = 4608
OPTIONS: Fields = {
    "skip_tokenizer_init": True,
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": MAX_MODEL_LEN,
    "max_num_batched_tokens": 1024,
    "max_num_seqs": 4,
    "block_size": 32,
    "disable_log_stats": False,
    "kv_cache_memory_bytes": 1 << 26,
}
ENVIRONMENT = {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING"}


class EngineEnded(Exception):
    """With the end of its log."""


class StoreEngine:
    """`with` kills it, with all of its processes."""

    def __init__(self, model: Path, options: Fields, log: Path, *, is_one_process: bool = True) -> None:
        self._log = log
        ask_out, ask_in = os.pipe()
        say_out, say_in = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            os.close(ask_in)
            os.close(say_out)
            _be_engine(model, options, log, ask_out, say_in, is_one_process=is_one_process)
        os.close(ask_out)
        os.close(say_in)
        self._asks, self._says = os.fdopen(ask_in, "w"), os.fdopen(say_out)
        self._is_gone = False

    def ready(self) -> Self:
        """Waits until it is. Raises `EngineEnded`."""
        self.read()
        return self

    def ask(self, prompt: list[int], num_new: int) -> None:
        print(json.dumps([prompt, num_new]), file=self._asks, flush=True)

    def answer(self, prompt: list[int], num_new: int) -> Fields:
        self.ask(prompt, num_new)
        return self.read()

    def read(self) -> Fields:
        """What it says next. Raises `EngineEnded`."""
        line = self._says.readline()
        if not line:
            os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)  # it says why in its log
            raise EngineEnded(self._log.read_text(errors="replace")[-3000:])
        said: Fields = json.loads(line)
        return said

    def kill(self) -> None:
        """kill -9 of all of its processes. May be called twice."""
        if not self._is_gone:
            self._is_gone = True
            os.killpg(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            self._asks.close()
            self._says.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


def _be_engine(model: Path, options: Fields, log: Path, asks: int, says: int, *, is_one_process: bool) -> None:
    try:
        os.setpgid(0, 0)
        with log.open("wb") as output:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0" if is_one_process else "1"
        with os.fdopen(asks) as questions, os.fdopen(says, "w") as answers:
            _serve(model, options, questions, answers)
    except BaseException:  # noqa: BLE001 - it is the end of the process
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(1)  # never back into the process that forked it


def _serve(model: Path, options: Fields, questions: IO[str], answers: IO[str]) -> None:
    from vllm import LLM, SamplingParams

    engine: Any = LLM(str(model), **OPTIONS | options)
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in questions:
        prompt, num_new = json.loads(line)
        sampling = SamplingParams(temperature=0, max_tokens=num_new, detokenize=False, ignore_eos=True)
        before, began = _found(engine), time.monotonic()
        [done] = engine.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
        took_s, after = time.monotonic() - began, _found(engine)
        said = {"tokens": list(done.outputs[0].token_ids), "took_s": took_s, "cached": done.num_cached_tokens}
        said |= {name: after[name] - before[name] for name in after}
        print(json.dumps(said), file=answers, flush=True)


def _found(engine: Any) -> dict[str, int]:
    """vLLM's own counters: tokens that it found in its cache, and that the connector found for it."""
    names = {"vllm:prefix_cache_hits": "local", "vllm:external_prefix_cache_hits": "external"}
    found = dict.fromkeys(names.values(), 0)
    for metric in engine.get_metrics():
        if metric.name in names:
            found[names[metric.name]] += int(metric.value)
    return found
