"""What a family is given to read a model with, and the layers it makes of it.

A layer is an entry of a plan request. Sizes are those of one tensor-parallel rank: KV heads are divided among the
ranks, or, where there are fewer heads than ranks, each is held by several of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from kvpage.errors import SpecInvalid
from kvpage.models.config import MAX_MODEL_LAYERS, Config
from kvpage.models.formats import KvFormat
from kvpage.models.options import WINDOWS, ModelOptions

Fields = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ModelLayer:
    """One cache: the index of the model's layer it belongs to, and its fields in a plan request."""

    index: int
    fields: Fields


@dataclass(frozen=True, slots=True, kw_only=True)
class Mtp:
    """Layers of a model that predict further tokens (mtp.py)."""

    read: Callable[[Reading, int], Iterator[ModelLayer]]
    """The layers of so many predictors."""
    field: str = "num_nextn_predict_layers"
    """Where the config says how many there are."""
    left_out: int | None = None
    """How many vLLM takes where the config does not say."""
    fixed: int | None = None
    """How many vLLM takes whatever the config says."""
    inside: bool = False
    """vLLM loads them of larger models around this one too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """How the layers of one model type are read."""

    read: Reader
    defaults: Mapping[str, object] = field(default_factory=dict)
    """Values of the published config class for fields that a config may leave out."""
    defaults_of: str = ""
    """That class and its release."""
    mtp: Mtp | None = None
    per_layer: bool = False
    """Whether it reads what single layers have of their own (per_layer.py)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """A language model's config and what is asked of it."""

    config: Config
    options: ModelOptions
    dtype: str
    """Of the model's activations."""
    kv: KvFormat
    prefix: str = ""
    """What vLLM puts before the names of a language model inside a larger one: `language_model.`"""
    layers_at: str = "model.layers"
    """Where the layers are in the language model, in vLLM's names."""

    @property
    def tp(self) -> int:
        """Ranks that share the heads of a layer."""
        return self.options.attention_tp

    def num_layers(self) -> int:
        older = self.config.has("num_layers") and not self.config.has("num_hidden_layers")
        return self.config.size("num_layers" if older else "num_hidden_layers", limit=MAX_MODEL_LAYERS)

    def name(self, index: int, module: str) -> str:
        return f"{self.prefix}{self.layers_at}.{index}.{module}"

    def check_query_heads(self, name: str = "num_attention_heads") -> int:
        """Query heads of all ranks. Raises `SpecInvalid` unless the ranks divide them."""
        heads = self.config.size(name)
        self.split(self.config, name, heads)
        return heads

    def split(self, config: Config, name: str, amount: int) -> int:
        """`amount`, of field `name`, divided among the ranks. Raises `SpecInvalid` unless that is even."""
        if amount % self.tp:
            raise self.ranks_fault(config, name, f"is {amount}, no multiple of them; use ranks that divide it")
        return amount // self.tp

    def ranks_fault(self, config: Config, name: str, detail: str) -> SpecInvalid:
        """The error to raise where field `name` does not go with the number of ranks: the field is the model's, the
        ranks are what can be asked for differently."""
        return self.options.fault("tp", f"{self.tp} ranks share the heads, but {config.where(name)} {detail}")

    def kv_heads(self, config: Config, name: str, heads: int) -> int:
        """KV heads of one rank. Raises `SpecInvalid` where neither of heads and ranks divides the other."""
        if heads % self.tp and self.tp % heads:
            raise self.ranks_fault(config, name, f"is {heads}, and neither divides the other; use ranks that do")
        if heads < self.tp:
            config.note(f"{self.tp} ranks share {heads} KV heads: each head is kept by {self.tp // heads} ranks")
        return max(1, heads // self.tp)

    def attention(
        self,
        index: int,
        module: str,
        *,
        num_kv_heads: int,
        head_size: int,
        head_size_v: int | None = None,
        window: int | None = None,
        chunk: int | None = None,
        shares: str | None = None,
    ) -> ModelLayer:
        """A layer of keys and values; `num_kv_heads` of one rank, `shares` names the layer whose cache it reads."""
        kind = "sliding_window" if window else "chunked_local_attention" if chunk else "full_attention"
        fields: Fields = {
            "name": self.name(index, module),
            "kind": kind,
            "num_kv_heads": num_kv_heads,
            "head_size": head_size,
            "head_size_v": None if head_size_v == head_size else head_size_v,
            "sliding_window": window,
            "attention_chunk_size": chunk,
            "kv_sharing_target": shares,
        }
        return self._attended(index, fields, KvFormat(self.dtype) if self._skips(index, window) else self.kv)

    def _skips(self, index: int, window: int | None) -> bool:
        skipped = self.options.kv_dtype_skip_layers
        return str(index) in skipped or (window is not None and WINDOWS in skipped)

    def latent(self, index: int, module: str, *, head_size: int, kv: KvFormat, **more: Any) -> ModelLayer:
        """A layer of latent rows: the same on every rank. vLLM 0.24.0 skips none of them."""
        if str(index) in self.options.kv_dtype_skip_layers:
            raise self.options.fault("kv_dtype_skip_layers", f"layer {index} keeps latent rows, all in one format")
        fields: Fields = {"name": self.name(index, module), "kind": "mla_attention", "head_size": head_size}
        return self._attended(index, fields | more, kv)

    def _attended(self, index: int, fields: Fields, kv: KvFormat) -> ModelLayer:
        common = {"dtype": kv.dtype, "kv_quant": kv.kv_quant}
        chosen = {"backend": self.options.backend, "block_size": self.options.block_size}
        return ModelLayer(index, without_none(common | chosen | fields))

    def state(self, index: int, module: str, shapes: Sequence[Sequence[int]], dtypes: Sequence[str]) -> ModelLayer:
        """A recurrent state of several tensors."""
        fields: Fields = {
            "name": self.name(index, module),
            "kind": "mamba",
            "shapes": [list(shape) for shape in shapes],
            "dtypes": list(dtypes),
            "num_speculative_blocks": self.options.num_speculative_tokens or None,
        }
        return ModelLayer(index, without_none(fields))

    def ssm_dtype(self, published: str | None) -> str:
        """Of a recurrent state: what is asked for, else what the model publishes, else the model's dtype."""
        return self.options.ssm_dtype if self.options.ssm_dtype != "auto" else published or self.dtype


Reader: TypeAlias = Callable[[Reading], Iterator[ModelLayer]]


def without_none(fields: Fields) -> Fields:
    return {"name": fields["name"]} | {name: value for name, value in fields.items() if value is not None}


def head_width(reading: Reading, heads: int) -> int:
    """`head_dim`, or the hidden size divided by the query heads."""
    config = reading.config
    width = config.optional_size("head_dim")
    if width is not None:
        return width
    hidden = config.size("hidden_size")
    if hidden % heads:
        raise config.fault("head_dim", f"this field is required: hidden_size {hidden} is no multiple of {heads} heads")
    return hidden // heads


def published_dtype(config: Config, name: str) -> str | None:
    """A dtype of states in the config. Raises `SpecInvalid` for one that no state is kept in."""
    dtype = config.text(name)
    if dtype not in (None, "float32", "float16", "bfloat16"):
        raise config.fault(name, f"this must be float32, float16 or bfloat16, not {dtype!r}")
    return dtype


def refuse(config: Config, name: str, detail: str) -> SpecInvalid:
    """For what is known to exist but is not read: says what to do instead."""
    return config.fault(name, f"{detail}; write the layers out in the request")
