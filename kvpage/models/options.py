"""What is asked of a model besides its config: ranks, data types, block size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvpage.errors import FieldError, SpecInvalid, shorten
from kvpage.models.config import MAX_MODEL_LAYERS, MAX_SIZE, shown

MAX_RANKS = 1024
STATE_DTYPES = ("auto", "float32", "float16", "bfloat16")  # vLLM 0.24.0, MambaDType


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """Checked when made: raises `SpecInvalid` with the option's name as pointer."""

    tp: int = 1
    """Tensor-parallel ranks; the layers are those of one rank."""
    pp: int = 1
    """Pipeline stages; the layers are those of `pp_stage`."""
    pp_stage: int = 0
    kv_dtype: str = "auto"
    """vLLM's --kv-cache-dtype. auto: what the config says."""
    ssm_dtype: str = "auto"
    """vLLM's --mamba-ssm-cache-dtype: dtype of recurrent (not convolution) states."""
    backend: Any = None
    """Backend of the attention layers, as in a plan request; None: by kind."""
    block_size: int | None = None
    num_speculative_tokens: int = 0
    """Tokens drafted at once: recurrent states keep room for them."""

    def __post_init__(self) -> None:
        _check("tp", self.tp, 1, MAX_RANKS)
        _check("pp", self.pp, 1, MAX_MODEL_LAYERS)
        _check("pp_stage", self.pp_stage, 0, self.pp - 1)
        _check("num_speculative_tokens", self.num_speculative_tokens, 0, MAX_RANKS)
        if self.block_size is not None:
            _check("block_size", self.block_size, 1, MAX_SIZE)
        if self.ssm_dtype not in STATE_DTYPES:
            known = ", ".join(STATE_DTYPES)
            raise option_fault("ssm_dtype", f"this must be one of {known}, not {shown(self.ssm_dtype)}")
        if not isinstance(self.kv_dtype, str):
            raise option_fault("kv_dtype", f"this must be a string, not {shown(self.kv_dtype)}")


def _check(name: str, value: object, least: int, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise option_fault(name, f"this must be a whole number from {least} to {most}, not {shown(value)}")


def option_fault(name: str, detail: str) -> SpecInvalid:
    return SpecInvalid(f"{shorten(name)}: {detail}", errors=[FieldError(f"/{name}", detail)])
