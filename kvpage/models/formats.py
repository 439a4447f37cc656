"""The data types of a model: of its activations, which states follow, and of its KV cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvpage.models.config import Config, shown
from kvpage.models.options import ModelOptions

DEFAULT_DTYPE = "bfloat16"  # vLLM 0.24.0: dtype auto of float32 weights on a GPU that has bfloat16
_MODEL_DTYPES = {name: name for name in ("bfloat16", "float16", "float32")}
_MODEL_DTYPES |= {f"torch.{name}": name for name in _MODEL_DTYPES}
_MODEL_DTYPES |= {"half": "float16", "float": "float32"}


@dataclass(frozen=True, slots=True)
class KvFormat:
    """Element type of a cache, and how it is quantised."""

    dtype: str
    kv_quant: str | None = None


KV_FORMATS = {
    "bfloat16": KvFormat("bfloat16"),
    "float16": KvFormat("float16"),
    "float32": KvFormat("float32"),
    "fp8": KvFormat("float8_e4m3fn"),
    "fp8_e4m3": KvFormat("float8_e4m3fn"),
    "fp8_e5m2": KvFormat("float8_e5m2"),
    "fp8_ds_mla": KvFormat("uint8", "fp8_ds_mla"),
    "int8_per_token_head": KvFormat("int8", "int8_per_token_head"),
    "fp8_per_token_head": KvFormat("float8_e4m3fn", "fp8_per_token_head"),
    "nvfp4": KvFormat("uint8", "nvfp4"),
}
"""vLLM's names (0.24.0, CacheDType), and torch's of plain types."""
_FP8 = "fp8"
_MODELOPT = {"fp8": _FP8, "nvfp4": "nvfp4"}  # vLLM 0.24.0, kv_cache_quant_algo


def model_dtype(parts: Sequence[Config]) -> str:
    """`dtype` or `torch_dtype` of the first of `parts`, from the whole config to that of the language model, that
    says it. Noted: float32 and none are run as bfloat16, as in vLLM."""
    for config in parts:
        for name in ("dtype", "torch_dtype"):
            if config.has(name):
                return _known_dtype(config, name)
    parts[0].note(
        f"the config names no dtype: {DEFAULT_DTYPE}, as vLLM runs such a model unless its weights say otherwise"
    )
    return DEFAULT_DTYPE


def _known_dtype(config: Config, name: str) -> str:
    written = config.text(name)
    dtype = _MODEL_DTYPES.get(written or "")
    if dtype is None:
        raise config.fault(name, f"dtype {shown(written)} is not known; use one of {', '.join(_MODEL_DTYPES)}")
    if dtype == "float32":
        config.note(f"{config.at}/{name} is float32: run as {DEFAULT_DTYPE}, as vLLM does")
        return DEFAULT_DTYPE
    return dtype


def kv_format(options: ModelOptions, parts: Sequence[Config], dtype: str) -> KvFormat:
    """The cache's format: the one asked for, else the one the checkpoint was quantised for, else the model's dtype."""
    kv_dtype = options.kv_dtype
    if kv_dtype == "auto":
        quantised = next(filter(None, map(_checkpoint_format, parts)), None)
        return KV_FORMATS[quantised or dtype]
    if kv_dtype not in KV_FORMATS:
        raise options.fault("kv_dtype", f"this must be auto or one of {', '.join(KV_FORMATS)}, not {shown(kv_dtype)}")
    return KV_FORMATS[kv_dtype]


def _checkpoint_format(config: Config) -> str | None:
    """What `quantization_config` says of the KV cache: modelopt's algorithm, or compressed-tensors' scheme (FP8)."""
    quantization = config.child("quantization_config") or config.child("compression_config")
    if quantization is None:
        return None
    method = (quantization.text("quant_method") or "").replace("_", "-")
    inner = quantization.child("quantization") or quantization
    if method.startswith("modelopt"):
        found = _modelopt_format(inner) or _modelopt_format(quantization)
    else:
        found = _FP8 if method == "compressed-tensors" and inner.child("kv_cache_scheme") else None
    if found is not None:
        config.note(f"the checkpoint asks for a KV cache of {found} (quantization_config)")
    return found


def _modelopt_format(quantization: Config) -> str | None:
    if isinstance(quantization.values.get("kv_cache_scheme"), Mapping):
        scheme = quantization.required_child("kv_cache_scheme")
        is_float, bits = scheme.text("type") == "float", scheme.optional_size("num_bits")
        return {8: _FP8, 4: "nvfp4"}.get(bits or 0) if is_float else None
    algorithm = quantization.text("kv_cache_scheme") or quantization.text("kv_cache_quant_algo")
    return _MODELOPT.get(algorithm.lower()) if algorithm else None
