"""vLLM's attention backends as a plan request writes them: by name, or the layout written out from the class.

A class of vLLM before 0.30 says its layout by `get_kv_cache_shape` and `get_kv_cache_stride_order`: it is called with
sizes that cannot be mistaken for each other, and its axes are found by them. Later classes say which named layouts
they take; the engine settles on one for all layers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from math import gcd, lcm
from typing import Any

from kvpage.backends import BACKENDS, NAMED_LAYOUTS, named_layout
from kvpage.dtypes import item_size_bytes
from kvpage.errors import shorten
from kvpage.integrations.vllm.objects import LATENT_KINDS, NO_ANSWER, Spec, fault_of

Fields = dict[str, Any]

MAX_KERNEL_BLOCK = 4096  # tokens; the largest of a backend is 256
DEFAULT_LAYOUT = "LBNHC"  # vLLM 0.33.0, where no backend asks for another
# Far above every real size, multiples of what kernels ask for, and with a prime factor of their own each.
_BLOCKS, _TOKENS, _HEADS, _WIDTH = 1_000_003, 1024 * 1009, 1013, 512 * 1019
PACKED_ROWS: Fields = {"shape": ["num_blocks", "block_size", "num_kv_heads", "head_size"]}
"""Rows that a backend packs itself: tokens outside heads, as TurboQuant has it (vLLM 0.24.0)."""
_CACHE_NAMES = ("int8_per_token_head", "fp8_per_token_head", "nvfp4", "fp8_ds_mla")


@dataclass(frozen=True, slots=True)
class Backends:
    """What the caller says of backends; see `layers_from_specs`."""

    backends: Any
    kernel_block_sizes: Any
    kv_cache_layout: str | None

    def check_names(self, layers: Collection[str]) -> None:
        """Raises `SpecInvalid` for a name of no layer, and for a layout that there is not."""
        for what, given in (("backends", self.backends), ("kernel_block_sizes", self.kernel_block_sizes)):
            for name in given if isinstance(given, Mapping) else ():
                if name not in layers:
                    raise fault_of(what, f"there is no spec of a layer {shorten(str(name))!r}")
        if self.kv_cache_layout not in (None, *NAMED_LAYOUTS):
            named = shorten(str(self.kv_cache_layout))
            raise fault_of("kv_cache_layout", f"{named!r} is not known; use one of {', '.join(NAMED_LAYOUTS)}")

    def fields(self, spec: Spec, layer: Fields) -> Fields:
        """`backend` and `kernel_block_sizes` of a layer, as far as anything is known of them."""
        backend = _of(self.backends, spec)
        sizes = _of(self.kernel_block_sizes, spec)
        if sizes is None and not isinstance(backend, str | None):
            sizes = _called(spec, backend, "get_supported_kernel_block_sizes", **_spec_taken(spec, backend))
        taken = _kernel_blocks(spec, [] if sizes is None else sizes) or _aligned(spec, layer)
        _check_alignment(spec, layer)
        return {"backend": self._layout(spec, backend, layer), "kernel_block_sizes": _in_rows(spec, layer, taken)}

    def _layout(self, spec: Spec, backend: Any, layer: Fields) -> Any:
        if isinstance(backend, str):
            return _in_slots(spec, layer, _registered(spec, backend))
        if spec.has_named_layouts and not hasattr(backend, "get_kv_cache_shape"):
            return _in_slots(spec, layer, self._settled(spec, backend))
        if spec.size("tq_slot_size", 0):
            return PACKED_ROWS  # of a class only the name of the cache's format would get an answer
        return _rows(spec, layer) if backend is None else _written_out(spec, backend, layer)

    def _settled(self, spec: Spec, backend: Any) -> str:
        """The named layout, of those that the class takes; of any where there is no class."""
        taken = [
            getattr(layout, "name", layout) for layout in _called(spec, backend, "supported_kv_cache_layouts") or ()
        ]
        chosen = self.kv_cache_layout or (taken[0] if taken else DEFAULT_LAYOUT)
        if chosen not in (taken or NAMED_LAYOUTS):
            raise spec.fault(f"backend {_title(backend)} takes layouts {', '.join(taken)}, not {chosen}", "backend")
        return chosen


def _of(given: Any, spec: Spec) -> Any:
    return given.get(spec.layer) if isinstance(given, Mapping) else given


def _title(backend: Any) -> str:
    return shorten(getattr(backend, "__name__", type(backend).__name__))


def _registered(spec: Spec, name: str) -> str:
    if name in NAMED_LAYOUTS:
        return name
    if name.lower() not in BACKENDS:
        raise spec.unsupported(
            f"backend {shorten(name)!r} is not registered; give its class, or a named layout", "backend"
        )
    return name.lower()


def _called(spec: Spec, backend: Any, method: str, **named: Any) -> Any:
    """What the class answers. None where it has no such method, or leaves it to others."""
    call: Callable[..., Any] | None = getattr(backend, method, None)
    if call is None:
        return None
    try:
        return call(**named)
    except NotImplementedError:
        return None
    except NO_ANSWER as error:
        detail = f"{_title(backend)}.{method} raised {type(error).__name__}: {shorten(str(error))}"
        raise spec.fault(detail, "backend") from error


def _spec_taken(spec: Spec, backend: Any) -> Fields:
    """Since 0.33 the kernel blocks of a class may depend on the spec."""
    method = getattr(backend, "get_supported_kernel_block_sizes", None)
    code = getattr(method, "__code__", None)
    is_asked_for = code is not None and "kv_cache_spec" in code.co_varnames[: code.co_argcount]
    return {"kv_cache_spec": spec.value} if is_asked_for else {}


def _rows(spec: Spec, layer: Fields) -> Any:
    """Where nothing is said: None (the default) for what the default's kernels take, else rows as they lie.

    The backends of compressed rows, of windows over them and of several heads of them are none of the registered ones;
    of whether they read pages by block stride the spec tells.
    """
    kind, heads = layer["kind"], layer["num_kv_heads"]
    if kind not in LATENT_KINDS or (kind == "mla_attention" and heads == 1 and not layer.get("compress_ratio")):
        return None
    shape = ["num_blocks", "block_size", *(["num_kv_heads"] if heads > 1 else []), "row_size"]
    if not spec.get("indexes_kv_by_block_stride"):
        return {"shape": shape}
    axes = list(range(len(shape)))
    return {"shape": shape, "stride_order": axes, "layered_stride_order": [1, 0, *(axis + 1 for axis in axes[1:])]}


def _in_slots(spec: Spec, layer: Fields, name: str) -> Any:
    """The named layout `name`, written out where more is known of the layer's tensor than the name says.

    Slots that are not the KV heads are an axis of their own: K and V apart, say. Pages of latent rows that vLLM aligns
    are no whole number of rows, so kernels must take the block stride from the tensor; of a named layout that is not
    taken for granted.
    """
    slots, heads = spec.get("num_head_slots"), layer["num_kv_heads"]
    is_latent = layer["kind"] in LATENT_KINDS
    if name not in NAMED_LAYOUTS or (slots in (None, heads) and not layer.get("page_alignment_bytes")):
        return name
    layout = named_layout(name, has_v=not is_latent)
    shape: list[Any] = [axis.text for axis in layout.shape]
    if slots not in (None, heads):
        if not name.startswith("L"):
            raise spec.unsupported(f"{slots} head slots for {heads} KV heads are not planned in {name}", "backend")
        content = spec.size("state_content_size_bytes") // item_size_bytes(layer["dtype"])
        shape = ["num_blocks", slots, "block_size", content]
    orders = {"stride_order": layout.stride_order, "layered_stride_order": layout.layered_stride_order}
    return {"shape": shape} | {order: list(axes) for order, axes in orders.items() if axes is not None}


def _written_out(spec: Spec, backend: Any, layer: Fields) -> Any:
    """The registered name where that is the very layout the class answers with, else the layout by axis names."""
    written: Fields = {"shape": _shape(spec, backend, layer)}
    orders = {
        "stride_order": _called(spec, backend, "get_kv_cache_stride_order"),
        "layered_stride_order": _called(spec, backend, "get_kv_cache_stride_order", include_num_layers_dimension=True),
    }
    for name, extra in (("stride_order", 0), ("layered_stride_order", 1)):
        order = orders[name]
        if order is None:
            continue
        if not isinstance(order, list | tuple):
            raise spec.fault(f"{_title(backend)}.get_kv_cache_stride_order answered {shorten(repr(order))}", "backend")
        if len(order) == len(written["shape"]) + extra:
            written[name] = list(order)
    name = str(_called(spec, backend, "get_name") or "").lower()
    return name if _is_registered(name, written, layer.get("kv_quant")) else written


def _is_registered(name: str, written: Fields, quant: str | None) -> bool:
    """True when `name` means just what is written, in the order of data that a request has if it says nothing."""
    if name not in BACKENDS or quant is not None:
        return False
    registered = BACKENDS[name].layouts["NHD"]
    orders = (registered.stride_order, registered.layered_stride_order)
    mine = tuple(written.get(order) and tuple(written[order]) for order in ("stride_order", "layered_stride_order"))
    return [axis.text for axis in registered.shape] == list(map(str, written["shape"])) and orders == mine


def _shape(spec: Spec, backend: Any, layer: Fields) -> list[str | int]:
    """Axes by name. Raises `SpecInvalid` where the class does not answer, or with an axis of several sizes at once."""
    failed: Exception | None = None
    for tokens, heads, width in _probes(layer):
        sizes = {"num_blocks": _BLOCKS, "block_size": tokens, "num_kv_heads": heads, "head_size": width}
        quant = layer.get("kv_quant")
        named = {"cache_dtype_str": quant} if quant in _CACHE_NAMES else {}
        try:
            answer = backend.get_kv_cache_shape(*sizes.values(), **named)
        except NO_ANSWER as error:  # sizes that this class does not take: others are tried
            failed = error
            continue
        if not isinstance(answer, list | tuple) or not all(isinstance(extent, int) for extent in answer):
            raise spec.fault(f"{_title(backend)}.get_kv_cache_shape answered {shorten(repr(answer))}", "backend")
        return [_axis(spec, backend, extent, sizes, layer) for extent in answer]
    detail = f"{_title(backend)}.get_kv_cache_shape raised {type(failed).__name__}: {shorten(str(failed))}"
    raise spec.fault(detail, "backend") from failed


def _probes(layer: Fields) -> Iterator[tuple[int, int, int]]:
    """Tokens, heads and width to call with: no real ones where the class takes that, the layer's where it must be."""
    rows = layer.get("compress_ratio") or 1
    own = (layer["block_size"] // rows, layer["num_kv_heads"], layer["head_size"])
    yield from product((_TOKENS, own[0]), (_HEADS, own[1]), (_WIDTH, own[2]))


def _axis(spec: Spec, backend: Any, extent: int, sizes: Mapping[str, int], layer: Fields) -> str | int:
    names = [name for name, size in sizes.items() if size == extent and size > 1]
    if len(names) == 1:
        return names[0]
    if len(names) > 1:
        raise spec.fault(f"axes {' and '.join(names)} of {_title(backend)} have one size, {extent}", "backend")
    width_v = layer.get("head_size_v") or layer["head_size"]
    beyond = extent - sizes["head_size"]
    if sizes["head_size"] == _WIDTH and 0 < beyond <= max(width_v, 64):
        return "head_size + head_size_v" if beyond == width_v else f"head_size + {beyond}"
    if extent * 16 == sizes["head_size"] * 9 and layer.get("kv_quant") == "nvfp4":
        return "head_size/2 + head_size/16"
    if extent >= min(_TOKENS, _WIDTH, _BLOCKS) or extent % _HEADS == 0:
        raise spec.fault(f"an axis of {_title(backend)} is {extent} for {dict(sizes)}: no size by itself", "backend")
    return extent


def _kernel_blocks(spec: Spec, sizes: Any) -> list[Any]:
    """Numbers, and `{"multiple_of": n}` for vLLM's `MultipleOf(n)`."""
    if not isinstance(sizes, list | tuple):
        raise spec.fault(f"kernel_block_sizes must be a list, not {shorten(repr(sizes))}", "kernel_block_sizes")
    taken = [{"multiple_of": size.base} if hasattr(size, "base") else size for size in sizes]
    for size in taken:
        number = size.get("multiple_of") if isinstance(size, dict) else size
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise spec.fault(f"kernel_block_sizes: {shorten(repr(size))} is no number of tokens", "kernel_block_sizes")
    return taken


def _in_rows(spec: Spec, layer: Fields, taken: list[Any]) -> list[Any] | None:
    """vLLM counts tokens, a request rows, of which each stands for `compress_ratio` tokens. None: nothing is known."""
    ratio = layer.get("compress_ratio") or 1
    rows: list[Any] = [size // ratio for size in taken if isinstance(size, int) and size % ratio == 0]
    rows += [{"multiple_of": lcm(size["multiple_of"], ratio) // ratio} for size in taken if isinstance(size, dict)]
    if taken and not rows:
        detail = f"no kernel block of {taken} tokens is of whole rows, which stand for {ratio} tokens each"
        raise spec.fault(detail, "kernel_block_sizes")
    return rows or None


def _aligned(spec: Spec, layer: Fields) -> list[Any]:
    """Kernel blocks by `block_stride_alignment` (0.33): `MultipleOf(n)` asks for whole ones of up to n tokens."""
    largest = getattr(spec.get("block_stride_alignment"), "base", None)
    if largest is None:
        return []
    if isinstance(largest, bool) or not isinstance(largest, int) or not 1 <= largest <= MAX_KERNEL_BLOCK:
        raise spec.fault(f"block_stride_alignment is a multiple of {largest!r} tokens", "block_stride_alignment")
    smallest = gcd(largest, layer["block_size"])
    return [size for size in range(smallest, largest + 1, smallest) if largest % size == 0]


def _check_alignment(spec: Spec, layer: Fields) -> None:
    """Raises `NotSupported` where blocks must be bytes apart that are no row of the layer: no request asks for that."""
    alignment = spec.get("block_stride_alignment")
    if alignment in (None, 1) or hasattr(alignment, "base"):
        return
    row = spec.get("state_content_size_bytes")
    if layer["kind"] not in LATENT_KINDS or alignment != row:
        detail = f"block_stride_alignment of {alignment} bytes is not planned, only whole rows of latent layers ({row})"
        raise spec.unsupported(detail, "block_stride_alignment")
