"""`kvpage plan --model`: the options of a model, and the plan request they make."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from kvpage.cli.files import DEFAULT_STRATEGY
from kvpage.cli.sizes import parse_bytes
from kvpage.errors import SpecInvalid

_PANEL = "From a model's config"


def _option(help_text: str, *names: str) -> Any:
    return typer.Option(*names, help=help_text, rich_help_panel=_PANEL)


ModelPath = Annotated[Path | None, _option("config.json of a model, or its folder, in place of FILE. No download.")]
DraftPath = Annotated[Path | None, _option("config.json of a speculative draft model, planned beside it.")]
Memory = Annotated[str | None, _option("Memory of one rank for the cache, such as 40GiB.")]
MaxModelLen = Annotated[int | None, _option("Longest request, in tokens. Left out: the config's.")]
MaxNumBatchedTokens = Annotated[int | None, _option("Tokens in flight at once.")]
Tp = Annotated[int, _option("Tensor-parallel ranks; the plan is for one of them.", "--tp")]
Pp = Annotated[int, _option("Pipeline stages.", "--pp")]
AttentionDp = Annotated[int, _option("Groups of them that attend to requests of their own.", "--attention-dp")]
AllRanks = Annotated[bool, _option("Plan all tp × pp ranks, each with --memory.", "--all-ranks")]
PpStage = Annotated[int, _option("The stage that the plan is for, from 0.")]
KvDtype = Annotated[str, _option("Of the cache: auto, bfloat16, fp8, int8_per_token_head, nvfp4, …")]
SsmDtype = Annotated[str, _option("Of recurrent states: auto, float32, bfloat16, float16.")]
BackendName = Annotated[str | None, _option("Attention backend. Left out: by kind of layer.", "--backend")]
DraftBackendName = Annotated[str | None, _option("The same for layers of a draft. Left out: by kind of layer.")]
KvDtypeSkipLayers = Annotated[
    list[str] | None, _option("Layer that keeps the model's dtype: a number, or sliding_window. Several times.")
]
Mtp = Annotated[bool, _option("Plan the model's own layers for predicting further tokens.", "--mtp")]
BlockSize = Annotated[int | None, _option("Tokens of a block. Left out: by backend.")]
NumSpeculativeTokens = Annotated[int, _option("Tokens drafted at once.")]


def model_request(
    model: Path,
    *,
    draft: Path | None,
    memory: str | None,
    lengths: dict[str, int | None],
    options: dict[str, Any],
) -> dict[str, Any]:
    """A plan request for the model at path `model`. Raises `SpecInvalid` without `memory`, and as `read_config` does.

    `lengths` are fields of the request, `options` those of the model; what is None is left out.
    """
    from kvpage.models import read_config

    if memory is None:
        raise SpecInvalid("--memory is missing: say how much the cache of one rank may take, such as --memory 40GiB")
    entry = {name: value for name, value in options.items() if value not in (None, [])}
    entry["config"] = read_config(model)
    if draft is not None:
        entry["draft"] = read_config(draft)
    said = {name: value for name, value in lengths.items() if value is not None}
    return {"strategy": DEFAULT_STRATEGY, "model": entry, "memory_bytes": parse_bytes(memory)} | said


def print_notes(request: dict[str, Any]) -> None:
    """What was assumed of the model, on standard error: it is no part of the plan."""
    from kvpage.models.entry import entry_layers

    for note in entry_layers(request["model"], at="/model").notes:
        typer.echo(f"note: {note}", err=True)
