"""`kvpage simulate`: a request stream replayed against the layouts of several strategies in equal memory."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Literal

import typer

from kvpage.cli import completion
from kvpage.cli import model_options as of
from kvpage.cli.options import AsJson, examples

EXAMPLES = examples(
    "kvpage simulate model.yaml --stream long --memory 64MiB",
    "kvpage simulate --model ./Qwen3-8B --memory 20GiB --runs 1 --json",
)


def _streams() -> Iterable[str]:
    from kvpage.simulation.streams import BUILT_IN

    return BUILT_IN


def _strategies() -> Iterable[str]:
    from kvpage.cli.simulate_layouts import POSSIBLE

    return POSSIBLE


StreamName = Annotated[
    str | None,
    typer.Option(
        "--stream", metavar="NAME", help="short, chat (the default), long, or a file: `prompt,output` a line.",
        autocompletion=completion.among(_streams),
    ),
]  # fmt: skip
Strategies = Annotated[
    str,
    typer.Option(
        metavar="NAMES", help="What to compare, with commas between; auto is possible too.",
        autocompletion=completion.listed(_strategies),
    ),
]  # fmt: skip
Allocator = Annotated[
    Literal["flat", "slabs"] | None, typer.Option(metavar="NAME", help="flat or slabs. Left out: slabs for nested.")
]
Steps = Annotated[int | None, typer.Option(metavar="N", help="Steps to measure. Left out: by stream.")]
WarmUp = Annotated[
    int | None, typer.Option("--warm-up-steps", metavar="N", help="Steps before; 0 begins with an empty pool.")
]
Caching = Annotated[bool, typer.Option("--prefix-caching", help="Replay conversations, in place of a stream.")]
People = Annotated[int, typer.Option("--conversations", metavar="N", help="With --prefix-caching: at once.")]
Runs = Annotated[int, typer.Option(metavar="N", help="Runs to take the mean of: seeds SEED, SEED + 1, …")]
Seed = Annotated[int, typer.Option(metavar="SEED", help="Of the first run.")]


def simulate(
    context: typer.Context,
    file: Annotated[
        str | None, typer.Argument(metavar="FILE", help="Plan request, JSON or YAML; - for standard input.")
    ] = None,
    stream: StreamName = None,
    strategies: Strategies = "unify,scale_then_pad,slab,nested,pools",
    allocator: Allocator = None,
    seed: Seed = 1,
    runs: Runs = 3,
    steps: Steps = None,
    warm_up_steps: WarmUp = None,
    prefix_caching: Caching = False,
    conversations: People = 100,
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
    kv_dtype: of.KvDtype = "auto",
    ssm_dtype: of.SsmDtype = "auto",
    backend: of.BackendName = None,
    draft_backend: of.DraftBackendName = None,
    kv_dtype_skip_layers: of.KvDtypeSkipLayers = None,
    mtp: of.Mtp = False,
    block_size: of.BlockSize = None,
    num_speculative_tokens: of.NumSpeculativeTokens = 0,
) -> None:
    """Replay a stream of requests against several layouts in the same memory: how many run at once. Needs no server."""
    from kvpage.cli.simulate_layouts import in_memory, parse_strategies
    from kvpage.cli.simulate_runs import Wanted, replay

    names = parse_strategies(strategies)
    request = of.asked(context.params)
    if model is not None:
        of.print_notes(request)
    wanted = Wanted(in_memory(request, memory), names, allocator, seed, runs, steps, warm_up_steps, as_json)
    replay(wanted, stream, conversations if prefix_caching else None)
