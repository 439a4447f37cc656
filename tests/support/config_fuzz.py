"""Model configs that went wrong, by the thousand: each is planned or refused in words, in little time and memory.

Everything follows from a seed: `config_file(seed, number)` is always the same file.
"""

from __future__ import annotations

import json
import random
import re
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, TypeAlias

import kvpage
from kvpage.client.http import Client
from kvpage.errors import KvpageError, SpecInvalid
from kvpage.models import read_config
from models.public_configs import CONFIGS, config
from support.tally import Tally

MAX_MESSAGE_CHARS = 2000
MAX_CPU_S = 10.0
"""Of one config: the processor's time, which a busy machine does not stretch."""
MAX_GROWTH_BYTES = 512 << 20
"""Of this process over all configs."""
MEMORY_BYTES = 40 << 30

_Path: TypeAlias = tuple[str | int, ...]
_LONG, _MANY = 500, 5000
"""What is longer is made no longer; of more places the first are changed."""
_TEXTS = (
    "", "8", "full", "true", "\x00", "\ud800", "\U0001f600", "a" * 100_000, "../../etc/passwd", "%s{}", "bfloat16",
    "full_attention", "sliding_attention", "linear_attention", "fp8", "NaN", "-", "EM*", "M" * 5000, "\n\x1b[31m",
)  # fmt: skip
_NUMBERS = (
    0, 1, -1, 2, 3, 7, 127, 4096, 100_000, 2**31, 2**32 + 1, 2**53, 2**63 - 1, 2**64, 10**99, -(2**63), 0.0, -0.0, 0.5,
    1.0, 8.0, 1e308, -1e308, 5e-324, float("nan"), float("inf"), float("-inf"), True, False,
)  # fmt: skip
_MODEL_TYPES = (*sorted({str(written.get("model_type")) for written in CONFIGS.values()}), "", "no-such-model", "llamA")
_QUANTIZATIONS: tuple[Any, ...] = (
    {}, {"quant_method": "fp8"}, {"quant_method": 8}, {"quant_method": "compressed-tensors", "kv_cache_scheme": 1},
    {"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 8, "type": "float"}},
    {"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 2**40, "type": []}},
    {"quant_algo": "FP8", "kv_cache_quant_algo": "NVFP4"}, {"quantization": {"kv_cache_quant_algo": ["FP8"]}},
    {"quant_method": "modelopt", "kv_cache_quant_algo": None}, [], "fp8", {"quant_method": "x" * 5000},
)  # fmt: skip
_OPTIONS: dict[str, tuple[Any, ...]] = {
    "tp": (1, 1, 1, 2, 3, 8, 64),
    "pp": (1, 1, 1, 2, 5),
    "kv_dtype": ("auto", "auto", "fp8", "nvfp4", "int8_per_token_head"),
    "mtp": (False, False, True),
    "num_speculative_tokens": (0, 0, 1, 7),
    "attention_dp": (1, 1, 2),
}


# --- what is written --------------------------------------------------------------------------------------------------


def config_file(seed: int, number: int) -> bytes:
    """What is in the file: seldom a config that anybody published."""
    rng = random.Random(f"{seed} {number}")
    written = config(rng.choice(list(CONFIGS)))
    for _ in range(rng.choice((1, 1, 1, 2, 3, 8))):
        written = rng.choice(_CHANGES)(rng, written)
    data = json.dumps(written).encode()
    return rng.choice(_SPOILED)(rng, data) if rng.random() < 0.1 else data


def typed_options(seed: int, number: int) -> dict[str, Any]:
    rng = random.Random(f"options {seed} {number}")
    return {name: rng.choice(values) for name, values in _OPTIONS.items()}


def _paths(value: Any, here: _Path = ()) -> Iterator[_Path]:
    steps = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for step, inner in steps:
        yield (*here, step)
        yield from _paths(inner, (*here, step))


def _odd_value(rng: random.Random) -> Any:
    kind = rng.randrange(8)
    if kind < 3:
        return rng.choice(_NUMBERS)
    if kind < 5:
        return rng.choice(_TEXTS)
    return rng.choice((None, [], {}, [None], [1] * 5000, {"a": 1}, [[]], {"text_config": {}}, rng.choice(_NUMBERS)))


def _at_a_place(rng: random.Random, written: Any, change: Callable[[Any, str | int], None]) -> Any:
    places = list(islice(_paths(written), _MANY))  # of lists in lists in lists there are more than memory holds
    if places:
        # The fields of the config itself decide most; those inside lists are many.
        shallow = [path for path in places if len(path) == 1]
        path = rng.choice(shallow if rng.random() < 0.6 else places)
        inner = written
        for step in path[:-1]:
            inner = inner[step]
        change(inner, path[-1])
    return written


def _replaced(rng: random.Random, written: Any) -> Any:
    def replace(inner: Any, step: str | int) -> None:
        inner[step] = _odd_value(rng)

    return _at_a_place(rng, written, replace)


def _taken_away(rng: random.Random, written: Any) -> Any:
    def take(inner: Any, step: str | int) -> None:
        del inner[step]

    return _at_a_place(rng, written, take)


def _scaled(rng: random.Random, written: Any) -> Any:
    """A number that might be right; a list of another length; a text of another spelling."""

    def scale(inner: Any, step: str | int) -> None:
        value = inner[step]
        if type(value) is int:
            inner[step] = rng.choice((value + 1, value - 1, value * 3, value * 1000, -value, value // 2, float(value)))
        elif isinstance(value, list) and len(value) <= _LONG:
            inner[step] = rng.choice((value[:-1], value * 2, value + value[:1], value[::-1], value * 200, value[:1]))
        elif isinstance(value, str) and len(value) <= _LONG:
            inner[step] = rng.choice((value.upper(), value + " ", value[:-1], value * 2, [value]))
        else:
            inner[step] = [value]

    return _at_a_place(rng, written, scale)


def _of_another(rng: random.Random, written: Any) -> Any:
    """With fields of another model: they contradict each other."""
    other = config(rng.choice(list(CONFIGS)))
    names = rng.sample(sorted(other), min(len(other), rng.choice((1, 2, 5))))
    return written | {name: other[name] for name in names} if isinstance(written, dict) else other


def _of_another_type(rng: random.Random, written: Any) -> Any:
    return written | {"model_type": rng.choice(_MODEL_TYPES)} if isinstance(written, dict) else written


def _nested(rng: random.Random, written: Any) -> Any:
    """The language model inside another, or in the field where another keeps it."""
    name = rng.choice(("text_config", "llm_config", "thinker_config", "language_config", "text_config"))
    outer = {"model_type": rng.choice(_MODEL_TYPES), name: written}
    if rng.random() < 0.3:
        outer |= {"architectures": rng.choice(([], ["X"], [8], "LlamaForCausalLM", None))}
    if rng.random() < 0.2:
        outer["text_config"] = outer
        outer = {"model_type": "llama", "text_config": dict(outer, text_config=written)}
    return outer


def _quantized(rng: random.Random, written: Any) -> Any:
    name = rng.choice(("quantization_config", "quantization", "compression_config"))
    return written | {name: rng.choice(_QUANTIZATIONS)} if isinstance(written, dict) else written


def _deep(rng: random.Random, written: Any) -> Any:
    deep: Any = _odd_value(rng)
    for _ in range(rng.choice((5, 28, 40, 300))):
        deep = [deep] if rng.random() < 0.5 else {"text_config": deep}
    return written | {rng.choice(sorted(written) or ["x"]): deep} if isinstance(written, dict) else written


def _no_object(rng: random.Random, written: Any) -> Any:
    return _odd_value(rng) if rng.random() < 0.2 else written


_CHANGES: tuple[Callable[[random.Random, Any], Any], ...] = (
    _replaced, _replaced, _replaced, _taken_away, _scaled, _scaled, _of_another, _of_another_type, _nested, _quantized,
    _deep, _no_object,
)  # fmt: skip


def _cut(rng: random.Random, data: bytes) -> bytes:
    return data[: rng.randrange(len(data) + 1)]


def _flipped(rng: random.Random, data: bytes) -> bytes:
    flipped = bytearray(data or b" ")
    for _ in range(rng.choice((1, 3, 30))):
        flipped[rng.randrange(len(flipped))] = rng.randrange(256)
    return bytes(flipped)


def _repeated_key(rng: random.Random, data: bytes) -> bytes:
    keys: list[bytes] = re.findall(rb'"[a-z_]+"(?=:)', data) or [b'"a"']
    return b"{" + rng.choice(keys) + b": 1, " + rng.choice(keys) + b": 2, " + data[1:]


def _other_numbers(rng: random.Random, data: bytes) -> bytes:
    literal = rng.choice(
        (b"1e999", b"-1e999", b"NaN", b"Infinity", b"9" * 5000, b"1" + b"0" * 99, b"0x10", b"01", b"1.")
    )
    return re.sub(rb"(?<=: )\d+", literal, data, count=rng.choice((1, 2, 100)))


def _surrogate(rng: random.Random, data: bytes) -> bytes:
    return data.replace(b'"model_type": "', b'"model_type": "\\ud800').replace(b'{"', b'{"\\udfff": 1, "', 1)


def _bracketed(rng: random.Random, data: bytes) -> bytes:
    opening = rng.choice((b"[", b'{"a":', b'{"text_config":'))
    return opening * rng.choice((33, 3000, 100_000)) + data


_SPOILED: tuple[Callable[[random.Random, bytes], bytes], ...] = (
    _cut, _flipped, _repeated_key, _other_numbers, _surrogate, _bracketed, lambda rng, data: b"\xef\xbb\xbf" + data,
    lambda rng, data: data.decode().encode("utf-16"), lambda rng, data: b"", lambda rng, data: b"\x00" * 1000,
)  # fmt: skip


# --- how it is taken --------------------------------------------------------------------------------------------------

Plan: TypeAlias = Callable[[dict[str, Any]], kvpage.Plan]


def fuzzed(folder: Path, seed: int, numbers: range, plan: Plan = kvpage.plan) -> Tally:
    """Plans each config as `kvpage plan --model FILE --memory 40GiB` does, in this process."""
    tally, before_bytes = Tally(), _peak_bytes()
    file = folder / "config.json"
    for number in numbers:
        file.write_bytes(config_file(seed, number))
        began_s = time.process_time()
        try:
            outcome = outcome_of(file, typed_options(seed, number), plan)
            took_s = time.process_time() - began_s
            assert took_s < MAX_CPU_S, f"it took {took_s:.1f} s of the processor"
        except Exception as fault:  # noqa: BLE001 - whatever it is, the table must say so
            tally.lose(f"seed {seed}, config {number}: {type(fault).__name__}: {str(fault)[:300]}")
        else:
            tally.survive(outcome)
    grown_bytes = _peak_bytes() - before_bytes
    if grown_bytes > MAX_GROWTH_BYTES:
        tally.lose(f"seed {seed}: the process has grown by {grown_bytes >> 20} MiB")
    return tally


def outcome_of(file: Path, options: dict[str, Any], plan: Plan = kvpage.plan) -> str:
    """`planned`, with a plan that proves itself, or the code of an error that is told as errors are.

    Raises AssertionError for an error that does not say what and where, and whatever else may come.
    """
    try:
        request = {"strategy": "auto", "model": {"config": read_config(file), **options}, "memory_bytes": MEMORY_BYTES}
        plan(request).check()
    except KvpageError as error:
        check_told(error)
        return error.code
    return "planned"


def check_told(error: KvpageError) -> None:
    """Raises AssertionError unless the error could be shown to a person, and one of a field names the field."""
    texts = [error.message, *(fault.pointer for fault in error.errors), *(fault.detail for fault in error.errors)]
    for text in texts:
        assert text.isprintable(), f"not printable: {text[:200]!r}"
        assert len(text) <= MAX_MESSAGE_CHARS, f"{len(text)} characters: {text[:200]}"
    assert error.message, "it says nothing"
    assert error.code != "internal", error.message
    if isinstance(error, SpecInvalid):
        assert error.errors, f"without a pointer: {error.message}"


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def check_answer(client: Client, data: bytes) -> str:
    """The same of the server, which is sent the config in a request, as text: what of it is no JSON is refused too."""
    try:
        config = json.loads(data)
        client.plan({"strategy": "auto", "model": {"config": config}, "memory_bytes": MEMORY_BYTES}).check()
    except ValueError as error:
        if not isinstance(error, KvpageError):
            return "no JSON"
        check_told(error)
        return error.code
    except KvpageError as error:
        check_told(error)
        return error.code
    return "planned"


def main(seed: int, start: int, end: int) -> None:
    """Of a process of its own: says as JSON what these configs came to."""
    with tempfile.TemporaryDirectory() as folder:
        tally = fuzzed(Path(folder), seed, range(start, end))
    sys.stdout.write(json.dumps({"tried": tally.tried, "losses": tally.losses, "outcomes": tally.outcomes}))
