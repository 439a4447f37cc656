"""What is asked of a model besides its config: ranks, data types, block size."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

from kvpage.errors import FieldError, SpecInvalid
from kvpage.models.config import MAX_MODEL_LAYERS, MAX_SIZE, shown
from kvpage.strict_json import pointer

MAX_RANKS = 1024
MAX_SPECULATIVE_TOKENS = 1024
WINDOWS = "sliding_window"
_LAYER_NUMBERS = frozenset(map(str, range(MAX_MODEL_LAYERS)))
STATE_DTYPES = ("auto", "float32", "float16", "bfloat16")  # vLLM 0.24.0, MambaDType


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """Checked when made: raises `SpecInvalid` with the option's name as pointer."""

    tp: int = 1
    """Tensor-parallel ranks; the layers are those of one rank."""
    attention_dp: int = 1
    """Groups that the tensor-parallel ranks form for attention, each with requests of its own: heads and states are
    divided among the tp / attention_dp ranks of a group only."""
    pp: int = 1
    """Pipeline stages; the layers are those of `pp_stage`."""
    pp_stage: int = 0
    kv_dtype: str = "auto"
    """vLLM's --kv-cache-dtype. auto: what the config says."""
    ssm_dtype: str = "auto"
    """vLLM's --mamba-ssm-cache-dtype: dtype of recurrent (not convolution) states."""
    backend: Any = None
    """Backend of the attention layers, as in a plan request; None: by kind."""
    draft_backend: Any = None
    """The same for layers of a draft; vLLM never takes that of the model (0.24.0)."""
    kv_dtype_skip_layers: tuple[str, ...] = ()
    """vLLM's --kv-cache-dtype-skip-layers: indices, or `sliding_window`, of layers that keep the model's dtype."""
    mtp: bool = False
    """The layers that the model itself has for predicting further tokens, as a draft (vLLM's method mtp)."""
    block_size: int | None = None
    """Tokens of a block; None: by backend."""
    num_speculative_tokens: int = 0
    """Tokens drafted at once: recurrent states keep room for them."""
    at: str = ""
    """JSON pointer of the options in what the caller sent."""

    def __post_init__(self) -> None:
        self._check("tp", 1, MAX_RANKS)
        self._check("attention_dp", 1, self.tp)
        if self.tp % self.attention_dp:
            raise self.fault("attention_dp", f"this must divide tp {self.tp}, which {self.attention_dp} does not")
        self._check("pp", 1, MAX_MODEL_LAYERS)
        self._check("pp_stage", 0, self.pp - 1)
        self._check("num_speculative_tokens", 0, MAX_SPECULATIVE_TOKENS)
        self._check_switches()
        if self.block_size is not None:
            self._check("block_size", 1, MAX_SIZE)
        if self.ssm_dtype not in STATE_DTYPES:
            known = ", ".join(STATE_DTYPES)
            raise self.fault("ssm_dtype", f"this must be one of {known}, not {shown(self.ssm_dtype)}")
        if not isinstance(self.kv_dtype, str):
            raise self.fault("kv_dtype", f"this must be a string, not {shown(self.kv_dtype)}")

    def _check_switches(self) -> None:
        if not isinstance(self.mtp, bool):
            raise self.fault("mtp", f"this must be true or false, not {shown(self.mtp)}")
        skipped: Any = self.kv_dtype_skip_layers
        if not isinstance(skipped, list | tuple) or not all(map(_is_skipped, skipped)):
            detail = f"this must be an array of layer numbers in quotes and {WINDOWS!r}, not {shown(skipped)}"
            raise self.fault("kv_dtype_skip_layers", detail)

    @property
    def attention_tp(self) -> int:
        """Ranks that share the heads of one attention layer."""
        return self.tp // self.attention_dp

    @property
    def is_last_stage(self) -> bool:
        return self.pp_stage == self.pp - 1

    def of_draft(self) -> Self:
        """The same for a draft model, which lies whole on the last stage and has a backend of its own (vLLM 0.24.0).

        Raises `SpecInvalid` where the model is to draft for itself.
        """
        if self.mtp:
            raise self.fault("mtp", "a draft model is given too; tokens are drafted by one of the two")
        return replace(self, pp=1, pp_stage=0, backend=self.draft_backend)

    def _check(self, name: str, least: int, most: int) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise self.fault(name, f"this must be a whole number from {least} to {most}, not {shown(value)}")

    def fault(self, name: str, detail: str) -> SpecInvalid:
        """The error to raise for option `name`."""
        where = self.at + pointer(name)
        return SpecInvalid(f"{where}: {detail}", errors=[FieldError(where, detail)])


def _is_skipped(name: object) -> bool:
    """A layer's number, or the word for all layers with a window."""
    return isinstance(name, str) and (name == WINDOWS or name in _LAYER_NUMBERS)


OPTION_NAMES = tuple(name for name in ModelOptions.__dataclass_fields__ if name != "at")


def as_options(values: Mapping[str, object], *, at: str = "") -> ModelOptions:
    """`ModelOptions` of loose values. Raises `SpecInvalid` for names it has not, and for values of a wrong type."""
    for name in values:
        if name not in OPTION_NAMES:
            known = ", ".join(OPTION_NAMES)
            raise ModelOptions(at=at).fault(str(name), f"this is not known; the options of a model are {known}")
    return ModelOptions(**values, at=at)  # type: ignore[arg-type]  # __post_init__ checks what they are
