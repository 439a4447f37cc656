"""Reads every kind of spec of the vLLM in the folder given; prints layers, vLLM's page sizes, and what was refused.

What the interface module imports of vLLM is not loaded but for leaves: the packages above them are empty stand-ins.
"""

from __future__ import annotations

import dataclasses
import enum
import importlib
import json
import sys
import types
from pathlib import Path
from typing import Any

import torch

from kvpage.errors import SpecInvalid
from kvpage.integrations.vllm import layers_from_specs
from kvpage.models import read_model

sys.path.insert(0, str(Path(__file__).parents[1]))
from integrations.spec_of import spec_of
from models.public_configs import CONFIGS

PACKAGES = ("vllm", "vllm.utils", "vllm.v1", "vllm.v1.attention", "vllm.v1.attention.backends")


class StateBackend(enum.Enum):
    MAMBA1 = 1
    MAMBA2 = 2


@dataclasses.dataclass(frozen=True)
class MultipleOf:
    base: int


class Registry:
    """Takes whatever is registered."""

    @classmethod
    def __class_getitem__(cls, _item: object) -> type:
        return cls

    @classmethod
    def register(cls, *_args: object, **_more: object) -> Any:
        return lambda owner: owner


def load(source: Path) -> Any:
    for name in PACKAGES:
        package = types.ModuleType(name)
        package.__path__ = [str(source.joinpath(*name.split(".")))]
        sys.modules[name] = package
    leaves: dict[str, dict[str, Any]] = {
        "vllm.logger": {"init_logger": lambda _name: None},
        "vllm.utils.torch_utils": {
            "get_dtype_size": lambda dtype: dtype.itemsize,
            "nvfp4_kv_cache_full_dim": lambda width: width // 2 + width // 16,
        },
        "vllm.v1.attention.backend": {"MultipleOf": MultipleOf},
        "vllm.v1.attention.backends.registry": {"MambaAttentionBackendEnum": StateBackend},
        "vllm.v1.kv_cache_spec_registry": {"KVCacheSpecRegistry": Registry},
    }
    for name, contents in leaves.items():
        module = types.ModuleType(name)
        vars(module).update(contents)
        sys.modules[name] = module
    return importlib.import_module("vllm.v1.kv_cache_interface")


def specs(real: Any) -> dict[str, Any]:
    modes = real.KVQuantMode
    plain = {"block_size": 16, "num_kv_heads": 8, "head_size": 128, "dtype": torch.bfloat16}
    fp8 = plain | {"dtype": torch.float8_e4m3fn, "kv_quant_mode": modes.FP8_PER_TENSOR}
    rows = {"block_size": 64, "num_kv_heads": 1, "head_size": 576, "dtype": torch.bfloat16}
    bytes_ = rows | {"dtype": torch.uint8, "cache_dtype_str": "fp8_ds_mla"}
    v4 = bytes_ | {"head_size": 512, "model_version": "deepseek_v4", "alignment": 576}
    ratio: dict[str, Any] = {"compress_ratio": 4}
    fields = {field.name for field in dataclasses.fields(real.AttentionSpec)}
    if "state_content_bytes" in fields:
        bytes_ |= {"state_content_bytes": 656}
        v4 |= {"state_content_bytes": 584}
    if "tokens_per_state" in fields:
        ratio = {"tokens_per_state": 4}
    states = {"shapes": ((3, 8192), (32, 128, 128)), "dtypes": (torch.bfloat16, torch.float32)}
    inner = {"in.0": real.FullAttentionSpec(**plain), "in.1": real.FullAttentionSpec(**plain | {"num_kv_heads": 4})}
    return {
        "full": real.FullAttentionSpec(**plain),
        "masked": real.FullAttentionSpec(**plain, sliding_window=1024),
        "joined": real.FullAttentionSpec(**plain | {"head_size": 192}, head_size_v=128),
        "padded": real.FullAttentionSpec(**plain, page_size_padded=98_304),
        "fp8": real.FullAttentionSpec(**fp8),
        "sink": real.SinkFullAttentionSpec(**plain, sink_len=16),
        "sliding": real.SlidingWindowSpec(**plain, sliding_window=128),
        "chunked": real.ChunkedLocalAttentionSpec(**plain, attention_chunk_size=8192),
        "cross": real.CrossAttentionSpec(**plain),
        "encoder": real.EncoderOnlyAttentionSpec(**plain),
        "latent": real.MLAAttentionSpec(**rows),
        "hidden": real.HiddenStateCacheSpec(**rows | {"num_kv_heads": 3}),
        "packed": real.MLAAttentionSpec(**bytes_),
        "indexer": real.MLAAttentionSpec(**rows | {"head_size": 132, "dtype": torch.uint8}),
        "v4": real.MLAAttentionSpec(**v4 | {"block_size": 256}, **ratio),
        "v4.window": real.SlidingWindowMLASpec(**v4, sliding_window=128),
        "state": real.MambaSpec(block_size=16, **states, num_speculative_blocks=1, mamba_cache_mode="align"),
        "wrapped": real.UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs=inner),
        **quantised(real, plain),
    }


def of_public_models(real: Any) -> dict[str, Any]:
    """Specs of every distinct layer of the public configs; of vLLM 0.24, whose spec knows a latent row by its name."""
    if "state_content_bytes" in {field.name for field in dataclasses.fields(real.AttentionSpec)}:
        return {}
    found: dict[str, Any] = {}
    for model, config in CONFIGS.items():
        for kv_dtype in ("auto", "fp8"):
            for layer in read_model(config, kv_dtype=kv_dtype).layers:
                spec = spec_of(dict(layer), real, lambda name: getattr(torch, name))
                if spec not in found.values():
                    found[f"{model}.{kv_dtype}.{layer['name']}"] = spec
    return found


def quantised(real: Any, plain: dict[str, Any]) -> dict[str, Any]:
    """Formats with scales in the rows, as the backends of each version make them."""
    modes = real.KVQuantMode
    int8 = plain | {"dtype": torch.int8, "kv_quant_mode": modes.INT8_PER_TOKEN_HEAD}
    nvfp4 = plain | {"dtype": torch.uint8, "kv_quant_mode": modes.NVFP4}
    if hasattr(real, "TQFullAttentionSpec"):
        turbo = real.TQFullAttentionSpec(**plain | {"dtype": torch.uint8}, tq_slot_size=136)
    else:
        int8 |= {"state_content_bytes": 2 * 128 + 8}
        nvfp4 |= {"state_content_bytes": 72, "num_head_slots": 16}
        mode = {"kv_quant_mode": modes.TURBOQUANT_4BIT_NC, "state_content_bytes": 136}
        turbo = real.FullAttentionSpec(**plain | {"dtype": torch.uint8} | mode)
    return {"int8": real.FullAttentionSpec(**int8), "nvfp4": real.FullAttentionSpec(**nvfp4), "turbo": turbo}


def main() -> None:
    real = load(Path(sys.argv[1]))
    layers, refused, pages = [], {}, {}
    for name, spec in (specs(real) | of_public_models(real)).items():
        try:
            layers += layers_from_specs({name: spec})
        except SpecInvalid as error:
            refused[name] = error.message
        if name not in ("encoder", "wrapped"):
            pages[name] = spec.page_size_bytes
    sys.stdout.write(json.dumps({"layers": layers, "refused": refused, "pages": pages}))


if __name__ == "__main__":
    main()
