"""`kvpage plan --model`: the options of a model, and the plan request they make."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from kvpage.cli import completion
from kvpage.cli.files import DEFAULT_STRATEGY, read_request
from kvpage.cli.sizes import parse_bytes
from kvpage.errors import NotFound, SpecInvalid

_PANEL = "From a model's config"


ALLOCATORS = ("flat", "slabs")


def strategies() -> Sequence[str]:
    """Those of a plan request."""
    from kvpage.cli.compare import STRATEGIES

    return STRATEGIES


def _backends() -> Iterable[str]:
    from kvpage.backends import BACKENDS

    return BACKENDS


def _kv_dtypes() -> Iterable[str]:
    from kvpage.models.formats import KV_FORMATS

    return ("auto", *KV_FORMATS)


def _state_dtypes() -> Iterable[str]:
    from kvpage.models.options import STATE_DTYPES

    return STATE_DTYPES


def _option(help_text: str, *names: str, metavar: str, values: Callable[[], Iterable[str]] | None = None) -> Any:
    return typer.Option(
        *names, help=help_text, metavar=metavar, rich_help_panel=_PANEL,
        autocompletion=None if values is None else completion.among(values),
    )  # fmt: skip


def _flag(help_text: str, *names: str) -> Any:
    return typer.Option(*names, help=help_text, rich_help_panel=_PANEL)


_LEFT_TO_KIND = "Left out: by kind of layer."
ModelPath = Annotated[
    Path | None, _option("config.json of a model, or its folder, in place of FILE. No download.", metavar="PATH")
]
DraftPath = Annotated[
    Path | None, _option("config.json of a speculative draft model, planned beside it.", metavar="PATH")
]
Memory = Annotated[str | None, _option("Memory of one rank for the cache, such as 40GiB.", metavar="BYTES")]
MaxModelLen = Annotated[int | None, _option("Longest request. Left out: the config's.", metavar="TOKENS")]
MaxNumBatchedTokens = Annotated[int | None, _option("In flight at once.", metavar="TOKENS")]
Tp = Annotated[int, _option("Tensor-parallel ranks; the plan is for one of them.", "--tp", metavar="N")]
Pp = Annotated[int, _option("Pipeline stages.", "--pp", metavar="N")]
AttentionDp = Annotated[
    int, _option("Groups of them that attend to requests of their own.", "--attention-dp", metavar="N")
]
AllRanks = Annotated[bool, _flag("Plan all tp × pp ranks, each with --memory.", "--all-ranks")]
PpStage = Annotated[int, _option("The stage that the plan is for, from 0.", metavar="N")]
KvDtype = Annotated[
    str, _option("Of the cache: auto, bfloat16, fp8, int8_per_token_head, nvfp4, …", metavar="DTYPE", values=_kv_dtypes)
]
SsmDtype = Annotated[
    str, _option("Of recurrent states: auto, float32, bfloat16, float16.", metavar="DTYPE", values=_state_dtypes)
]
BackendName = Annotated[
    str | None, _option(f"Attention backend. {_LEFT_TO_KIND}", "--backend", metavar="NAME", values=_backends)
]
DraftBackendName = Annotated[
    str | None, _option(f"The same for layers of a draft. {_LEFT_TO_KIND}", metavar="NAME", values=_backends)
]
KvDtypeSkipLayers = Annotated[
    list[str] | None,
    _option("Keeps the model's dtype: a number, or sliding_window. Several times.", metavar="LAYER"),
]
Mtp = Annotated[bool, _flag("Plan the model's own layers for predicting further tokens.", "--mtp")]
BlockSize = Annotated[int | None, _option("Of a block. Left out: by backend.", metavar="TOKENS")]
NumSpeculativeTokens = Annotated[int, _option("Drafted at once.", metavar="TOKENS")]


_LENGTHS = ("max_model_len", "max_num_batched_tokens")  # fields of the request; the others are the model's
_OF_MODEL = (
    "tp", "attention_dp", "pp", "pp_stage", "kv_dtype", "ssm_dtype", "backend", "draft_backend",
    "kv_dtype_skip_layers", "mtp", "block_size", "num_speculative_tokens",
)  # fmt: skip


def asked(typed: Mapping[str, Any]) -> Any:
    """The plan request in the file that was named, or one for the model, with what else was `typed`.

    Raises `SpecInvalid` unless there is one of the two, and for a model without memory or that is not there, and as
    `read_request` and `read_config` do.
    """
    if (typed["file"] is None) == (typed["model"] is None):
        raise SpecInvalid("give a plan request (FILE) or a model (--model PATH), one of the two")
    return read_request(typed["file"]) if typed["model"] is None else _of_model(typed)


def _of_model(typed: Mapping[str, Any]) -> dict[str, Any]:
    """What was left out is left to the config and its reader."""
    if typed["memory"] is None:
        raise SpecInvalid("--memory is missing: say how much the cache of one rank may take, such as --memory 40GiB")
    entry = {name: typed[name] for name in _OF_MODEL if typed[name] not in (None, [])}
    if not typed["pp_stage"]:
        del entry["pp_stage"]  # all stages may be asked for, and then there is none
    entry["config"] = _config(typed["model"])
    if typed["draft"] is not None:
        entry["draft"] = _config(typed["draft"])
    said = {name: typed[name] for name in _LENGTHS if typed[name] is not None}
    return {"strategy": DEFAULT_STRATEGY, "model": entry, "memory_bytes": parse_bytes(typed["memory"])} | said


def _config(path: Path) -> Any:
    from kvpage.models import read_config

    try:
        return read_config(path)
    except NotFound as error:  # who typed a wrong path can mend it: no other exit status than for a wrong FILE
        raise SpecInvalid(error.message, details=error.details) from error


def print_notes(request: dict[str, Any]) -> None:
    """What was assumed of the model, on standard error: it is no part of the layout."""
    from kvpage.request_model import written_out

    for note in written_out(request)[1]:
        typer.echo(f"note: {note}", err=True)
