"""From vLLM's `KVCacheSpec` objects to the layers of a plan request, each checked against vLLM's own page size."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from kvpage.errors import SpecInvalid, shorten
from kvpage.integrations.vllm.backends import Backends
from kvpage.integrations.vllm.objects import (
    KINDS,
    LATENT_KINDS,
    WRAPPER,
    Spec,
    check_fields,
    dtype_name,
    fault_of,
    kind_of,
)
from kvpage.layers import Layer, check_layouts
from kvpage.request import PlanRequest

Fields = dict[str, Any]

_PLAIN_MODES = ("NONE", "FP8_PER_TENSOR")
_KV_QUANTS = {
    "INT8_PER_TOKEN_HEAD": "int8_per_token_head",
    "FP8_PER_TOKEN_HEAD": "fp8_per_token_head",
    "NVFP4": "nvfp4",
}
_DS_MLA = "fp8_ds_mla"
_SCALE_BYTES = 4


def layers_from_specs(
    specs: Mapping[str, Any],
    *,
    backends: Any = None,
    kernel_block_sizes: Any = None,
    kv_cache_layout: str | None = None,
) -> list[Fields]:
    """`layers` of a plan request for vLLM's specs by layer name, in their order.

    `backends`: a name, a backend class of vLLM, or one of them by layer name. `kernel_block_sizes`: what the kernels
    take, a list or a list by layer name; left out, what the backend says. `kv_cache_layout`: the named layout that a
    vLLM of 0.30 or later has settled on. Raises `NotSupported` for a class or a field that is not known, and
    `SpecInvalid` where the page differs from the one vLLM computed.
    """
    given = Backends(backends, kernel_block_sizes, kv_cache_layout)
    flat = dict(_flattened(specs))
    given.check_names(flat)
    layers = [_layer(spec, given) for spec in flat.values()]
    for spec, layer in zip(flat.values(), _planned(layers), strict=True):
        _check_page(spec, layer)
    return layers


def _flattened(specs: Mapping[str, Any]) -> Iterator[tuple[str, Spec]]:
    """The layers' own specs; a `UniformTypeKVCacheSpecs` stands for those it holds by name."""
    if not isinstance(specs, Mapping):
        raise fault_of("specs", f"this must be a mapping of layer names to vLLM's specs, not a {type(specs).__name__}")
    seen: set[str] = set()
    for name, value in specs.items():
        is_wrapper = any(owner.__name__ == WRAPPER for owner in type(value).__mro__)
        for layer, inner in _held(Spec(str(name), value)).items() if is_wrapper else [(name, value)]:
            if not isinstance(layer, str):
                raise fault_of("specs", f"a layer name must be text, not {shorten(repr(layer))}")
            if layer in seen:
                raise Spec(layer, inner).fault("the name stands twice among the specs; names must differ")
            seen.add(layer)
            yield layer, Spec(layer, inner)


def _held(spec: Spec) -> Mapping[Any, Any]:
    held = spec.require("kv_cache_specs")
    if not isinstance(held, Mapping):
        raise spec.fault(f"kv_cache_specs must be a mapping, not {shorten(repr(held))}", "kv_cache_specs")
    return held


def _layer(spec: Spec, backends: Backends) -> Fields:
    kind = kind_of(spec)
    check_fields(spec)
    if kind == "encoder_only_attention":
        return {"name": spec.layer, "kind": kind}
    common = {"name": spec.layer, "kind": kind, "block_size": spec.size("block_size")}
    if spec.get("is_draft"):
        common["draft"] = True
    if kind == "mamba":
        return common | _state(spec)
    fields = _attention(spec, kind, backends)
    return common | {name: value for name, value in fields.items() if value is not None}


def _state(spec: Spec) -> Fields:
    mode = spec.get("mamba_cache_mode", "none")
    if mode not in ("none", "align"):
        raise spec.unsupported(
            f"mamba_cache_mode {mode!r} keeps a state for every block of tokens; only 'none' and 'align' are planned",
            "mamba_cache_mode",
        )
    more = spec.size("num_speculative_blocks", 0)
    if mode == "align":  # one state more, that of the last whole block, and those at checkpoints
        more += 1 + spec.size("num_prefill_checkpoint_blocks", 0)
    fields = {
        "shapes": [list(shape) if isinstance(shape, tuple) else shape for shape in spec.items("shapes")],
        "dtypes": [dtype_name(spec, dtype, "dtypes") for dtype in spec.items("dtypes")],
        "num_speculative_blocks": more or None,
        "page_size_padded": spec.get("page_size_padded"),
    }
    return {name: value for name, value in fields.items() if value is not None}


def _attention(spec: Spec, kind: str, backends: Backends) -> Fields:
    rows = _packed_rows(spec, kind) or _plain_rows(spec, kind)
    fields = {"kind": kind, "block_size": spec.size("block_size")} | _lifetime(spec, kind) | rows
    return fields | backends.fields(spec, fields)


def _lifetime(spec: Spec, kind: str) -> Fields:
    """Windows and chunks, and what makes the page longer than its rows."""
    window, chunk = spec.get("sliding_window"), spec.get("attention_chunk_size")
    if kind in ("sliding_window", "sliding_window_mla"):
        # Tokens that leave the window and are still kept: the window of the cache is so much wider.
        window = spec.size("sliding_window") + spec.size("extra_retained_tokens", 0)
    fields: Fields = {"sliding_window": window, "attention_chunk_size": chunk}
    if kind == "mla_attention" and window is not None:
        raise spec.unsupported("latent rows with a window that is only masked are not planned", "sliding_window")
    return fields | {"page_size_padded": _padding(spec)}


def _padding(spec: Spec) -> int | None:
    """The padded page, unless that is only what the alignment makes of it, which follows from the alignment."""
    if spec.get("page_size_padded") is None:
        return None
    padded, alignment = spec.size("page_size_padded"), spec.size("alignment", 0)
    data = spec.size("real_page_size_bytes", 0)
    return None if alignment and padded == data + -data % alignment else padded


def _plain_rows(spec: Spec, kind: str) -> Fields:
    mode, width = spec.quant_mode, spec.size("head_size")
    fields: Fields = {
        "num_kv_heads": spec.size("num_kv_heads"),
        "head_size": width,
        "dtype": dtype_name(spec, spec.require("dtype"), "dtype"),
    }
    if kind in LATENT_KINDS:
        fields |= _latent(spec)
    else:
        if spec.get("tokens_per_state", 1) != 1:
            ratio = spec.get("tokens_per_state")
            raise spec.unsupported(f"tokens_per_state {ratio} is planned for latent rows only", "tokens_per_state")
        width_v = spec.size("head_size_v", width)
        fields["head_size_v"] = width_v if width_v != width else None
    if "kv_quant" not in fields and mode not in _PLAIN_MODES:
        if mode not in _KV_QUANTS or kind in LATENT_KINDS:
            raise spec.unsupported(f"rows in kv_quant_mode {mode} are not planned for {kind} layers", "kv_quant_mode")
        fields["kv_quant"] = _KV_QUANTS[mode]
    return fields


def _latent(spec: Spec) -> Fields:
    ratio = spec.get("tokens_per_state") or spec.get("compress_ratio") or 1
    if isinstance(ratio, bool) or not isinstance(ratio, int):
        raise spec.unsupported(
            f"tokens_per_state is {ratio}: several rows for a token are not planned", "tokens_per_state"
        )
    fields: Fields = {
        "compress_ratio": ratio if ratio > 1 else None,
        "page_alignment_bytes": spec.get("alignment"),
    }
    if spec.get("cache_dtype_str") == _DS_MLA and _has_ds_mla_rows(spec):
        fields |= {"kv_quant": _DS_MLA, "dtype": "uint8"}
    return fields


def _has_ds_mla_rows(spec: Spec) -> bool:
    """The cache may be called so and the rows of this layer be plain all the same."""
    if spec.counts_bytes:
        return spec.get("state_content_bytes") is not None
    return spec.get("model_version") == "deepseek_v4" or KINDS.get(spec.class_name) != "sliding_window_mla"


def _packed_rows(spec: Spec, kind: str) -> Fields | None:
    """Rows of bytes in a format of the backend's own: one for each token and head, or slot of heads.

    They are latent rows for the planner: what is in them is known to the kernels only. None: the rows are plain.
    """
    slot, slots = spec.size("tq_slot_size", 0), spec.size("num_kv_heads")
    formats = _PLAIN_MODES if kind in LATENT_KINDS else (*_PLAIN_MODES, *_KV_QUANTS)
    if not slot and spec.get("state_content_bytes") is not None and spec.quant_mode not in formats:
        slot, slots = spec.size("state_content_bytes"), spec.size("num_head_slots", slots)
    if not slot:
        return None
    if kind not in ("full_attention", *LATENT_KINDS):
        raise spec.unsupported(f"rows packed by the backend are not planned for {kind} layers", "kv_quant_mode")
    if kind == "full_attention" and (spec.get("sliding_window") or spec.get("attention_chunk_size")):
        raise spec.unsupported("rows packed by the backend are not planned with a mask", "sliding_window")
    more = {name: value for name, value in _latent(spec).items() if name not in ("kv_quant", "dtype")}
    packed_kind = kind if kind in LATENT_KINDS else "mla_attention"
    return more | {"kind": packed_kind, "num_kv_heads": slots, "head_size": slot, "dtype": "uint8"}


def _planned(layers: list[Fields]) -> tuple[Layer, ...]:
    """The layers as the planner takes them. Raises as it does, with the layer's name."""
    request = {"layers": layers, "strategy": "unify", "num_blocks": 1, "max_num_encoder_input_tokens": 1}
    try:
        planned = PlanRequest.parse(request).expand()
        check_layouts(planned)
    except SpecInvalid as error:
        steps = error.errors[0].pointer.split("/")[1:] if error.errors else []
        if len(steps) < 2 or steps[0] != "layers":
            raise
        name = layers[int(steps[1])]["name"]
        detail = f"layer {shorten(name)!r}: {error.message}"
        raise type(error)(detail, details=error.details, errors=error.errors) from None
    return planned


def _check_page(spec: Spec, layer: Layer) -> None:
    """Raises `SpecInvalid` unless page and data are as long as vLLM says."""
    ours = layer.spec
    if ours is None:
        return
    theirs = spec.size("page_size_bytes")
    if ours.page_size_bytes != theirs:
        raise spec.fault(
            f"the page would have {ours.page_size_bytes} bytes here, but {spec.class_name} has {theirs} "
            f"(page_size_bytes): it depends on more than is read",
            "page_size_bytes",
        )
    if not spec.has("real_page_size_bytes"):
        return
    data = spec.size("real_page_size_bytes")
    if not spec.counts_bytes and spec.quant_mode in ("INT8_PER_TOKEN_HEAD", "FP8_PER_TOKEN_HEAD"):
        data += 2 * _SCALE_BYTES * spec.size("block_size") * spec.size("num_kv_heads")  # 0.24 counts the scales apart
    if ours.real_page_size_bytes != data:
        raise spec.fault(
            f"the data of a page would have {ours.real_page_size_bytes} bytes here, but "
            f"{spec.class_name} has {data} (real_page_size_bytes)",
            "real_page_size_bytes",
        )
