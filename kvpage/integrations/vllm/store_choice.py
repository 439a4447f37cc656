"""Which pool an engine keeps its finished blocks in, and whether it can keep them at all."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from kvpage.errors import SpecInvalid, shorten

STORE_KEYS = ("store", "store_blocks", "store_salt")
STORE_DEVICE = "host"
STORE_KINDS = ("FullAttentionSpec", "MLAAttentionSpec")
"""vLLM's classes of layers whose blocks hold the same whoever computed them, and are all needed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreChoice:
    """From `kv_connector_extra_config`."""

    name: str
    num_blocks: int
    """Of the store, the null block included."""
    run_dir: str | None
    salt: str = ""
    """What the configuration does not tell of the weights."""

    @classmethod
    def of(cls, vllm_config: Any) -> Self | None:
        """None where no store is asked for. Raises `SpecInvalid` for what is no name or no number."""
        extra: Mapping[str, Any] = vllm_config.kv_transfer_config.kv_connector_extra_config
        if "store" not in extra:
            if given := [key for key in STORE_KEYS if key in extra]:
                raise SpecInvalid(f"kv_connector_extra_config has {given[0]} without store, the name of its pool")
            return None
        name, num_blocks, salt = extra["store"], extra.get("store_blocks"), extra.get("store_salt", "")
        for key, value in (("store", name), ("store_salt", salt)):
            if not isinstance(value, str) or (key == "store" and not value):
                raise SpecInvalid(f"kv_connector_extra_config: {key} is a text, not {shorten(repr(value))}")
        if isinstance(num_blocks, bool) or not isinstance(num_blocks, int) or num_blocks < 2:
            raise SpecInvalid(
                f"kv_connector_extra_config: store_blocks is the number of blocks of the store, 2 or more, not "
                f"{shorten(repr(num_blocks))}"
            )
        return cls(name=name, num_blocks=num_blocks, run_dir=extra.get("run_dir"), salt=salt)


def why_not_stored(vllm_config: Any, kv_cache_config: Any) -> str | None:
    """Why the blocks of this engine are not kept; None: they are. The same in the scheduler and in its workers."""
    parallel = vllm_config.parallel_config
    if parallel.world_size > 1 or parallel.data_parallel_size > 1:
        return "the engine has several ranks, and a store has the blocks of one"
    if getattr(vllm_config, "speculative_config", None) is not None:
        return "tokens are speculated, and a block may hold some that were not taken"
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        return f"the model has {len(groups)} groups of layers, and a store keeps models of one"
    spec = groups[0].kv_cache_spec
    held = getattr(spec, "kv_cache_specs", None)
    for one in [spec] if held is None else held.values():
        if type(one).__name__ not in STORE_KINDS:
            return f"a store keeps layers that attend to all tokens, and this model has some of {type(one).__name__}"
        if getattr(one, "sliding_window", None) or getattr(one, "attention_chunk_size", None):
            return "a store keeps layers that attend to all tokens, and some of this model attend to a part"
    return None


def weights_salt(vllm_config: Any, version: str, choice: StoreChoice) -> bytes:
    """16 bytes that hashes begin with. Other weights, another configuration of the model or another vLLM have others.

    Of a model in a folder, the files are told apart by name, size and time of change; of any other its name and
    revision must do, and `store_salt`.
    """
    model = vllm_config.model_config
    state = hashlib.blake2b(digest_size=16)
    load = getattr(vllm_config, "load_config", None)
    parts = ("kvpage store 1", version, model.compute_hash(), str(getattr(load, "load_format", "")), choice.salt)
    for part in (*parts, *_files(str(model.model))):
        data = part.encode()
        state.update(len(data).to_bytes(8, "little") + data)
    return state.digest()


def _files(model: str) -> Iterator[str]:
    folder = Path(model)
    if folder.is_dir():
        for path in sorted(folder.iterdir()):
            found = path.stat()
            yield f"{path.name} {found.st_size} {found.st_mtime_ns}"
