"""`kvpage plan`: a request from a file, or made of a model's config; the plan as a table or as JSON."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
import typer

from kvpage.cli import completion
from kvpage.cli import model_options as of
from kvpage.cli.files import write_text
from kvpage.cli.options import AsJson, examples
from kvpage.cli.output import print_plan
from kvpage.cli.ranks import has_ranks, show_ranks
from kvpage.errors import SpecInvalid
from kvpage.plans import Plan

EXAMPLES = examples(
    "kvpage plan model.yaml --svg layout.svg",
    "kvpage plan --model ./Qwen3-8B --tp 4 --memory 60GiB --compare",
    "kvpage plan --model ./Qwen3-8B --tp 2 --memory 60GiB --all-ranks --json",
)


def plan(
    context: typer.Context,
    file: Annotated[
        str | None, typer.Argument(metavar="FILE", help="Plan request, JSON or YAML; - for standard input.")
    ] = None,
    strategy: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="In place of the request's. Left out: auto.",
            autocompletion=completion.among(of.strategies),
        ),
    ] = None,
    allocator: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="In place of the request's: flat, or slabs for nested.",
            autocompletion=completion.among(lambda: of.ALLOCATORS),
        ),
    ] = None,
    comparing: Annotated[bool, typer.Option("--compare", help="All strategies side by side, and vLLM 0.24.")] = False,
    svg: Annotated[str | None, typer.Option(metavar="FILE", help="Draw the plan; - for standard output.")] = None,
    all_layers: Annotated[bool, typer.Option("--all", help="One row a layer; else like layers share a row.")] = False,
    as_json: AsJson = False,
    model: of.ModelPath = None,
    draft: of.DraftPath = None,
    memory: of.Memory = None,
    max_model_len: of.MaxModelLen = None,
    max_num_batched_tokens: of.MaxNumBatchedTokens = None,
    tp: of.Tp = 1,
    attention_dp: of.AttentionDp = 1,
    pp: of.Pp = 1,
    pp_stage: of.PpStage = 0,
    all_ranks: of.AllRanks = False,
    kv_dtype: of.KvDtype = "auto",
    ssm_dtype: of.SsmDtype = "auto",
    backend: of.BackendName = None,
    draft_backend: of.DraftBackendName = None,
    kv_dtype_skip_layers: of.KvDtypeSkipLayers = None,
    mtp: of.Mtp = False,
    block_size: of.BlockSize = None,
    num_speculative_tokens: of.NumSpeculativeTokens = 0,
) -> None:  # fmt: skip
    """Compute one page layout for all layers. Needs no server."""
    request = of.asked(context.params)
    if isinstance(request, dict):
        said = {"strategy": strategy, "allocator": allocator, "ranks": "all" if all_ranks else None}
        request |= {name: value for name, value in said.items() if value is not None}
    answer(request, as_json=as_json, svg=svg, comparing=comparing, all_layers=all_layers)
    if isinstance(request, dict) and request.get("model") is not None:
        of.print_notes(request)


def answer(request: Any, *, as_json: bool, svg: str | None, comparing: bool, all_layers: bool) -> None:
    """Plans `request` and prints what was asked for."""
    from kvpage.drawing.picture import layout_svg
    from kvpage.planner.planner import plan as compute

    if comparing and svg is not None:
        raise SpecInvalid("--svg draws one plan, --compare has several; give one of the two")
    if has_ranks(request):
        if comparing or svg is not None:
            raise SpecInvalid("--svg and --compare are of one rank, and these are several; leave them out")
        show_ranks(request, as_json=as_json)
    elif comparing:
        compare_strategies(request, as_json=as_json)
    else:
        computed = compute(request)
        if svg is not None:
            write_text(svg, layout_svg(computed))
        if svg != "-":
            show(computed, as_json=as_json, all_layers=all_layers)


def show(computed: Plan, *, as_json: bool, all_layers: bool) -> None:
    if as_json:
        typer.echo(computed.to_json())
    else:
        print_plan(computed, all_layers=all_layers)


def compare_strategies(request: Any, *, as_json: bool) -> None:
    """Exit status 1 when no strategy has a plan."""
    from kvpage.cli.compare import compare, print_comparison

    comparison = compare(request)
    if as_json:
        typer.echo(msgspec.json.encode(comparison))
    else:
        print_comparison(comparison)
    if comparison.is_refused:
        raise typer.Exit(1)
