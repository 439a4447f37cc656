"""`kvpage plan --compare`: every strategy on one request, and what vLLM 0.24 would do with it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import inf
from typing import TYPE_CHECKING, Any

import msgspec
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.measure import Measurement
from rich.table import Table

from kvpage.errors import InternalError, KvpageError, printable
from kvpage.plans import GroupPlan, Plan, WorkloadShare

if TYPE_CHECKING:
    from kvpage.request import PlanRequest

STRATEGIES = ("unify", "scale_then_pad", "slab", "nested", "auto")
VLLM = "vLLM 0.24"
_UNBOUNDED_CHARS = 10_000
_FEW = 4  # different values that one cell of the table names


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """Why a strategy has no plan, in the terms of `kvpage.errors`."""

    code: str
    message: str


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """What one strategy makes of the request. All but the first two are None where it refuses."""

    name: str
    """A strategy, or "vLLM 0.24"."""
    refusal: Refusal | None = None
    strategy: str | None = None
    """Of the plan: which one `auto` took, and `unify` for vLLM."""
    plan_id: str | None = None
    num_groups: int | None = None
    num_slabs: int | None = None
    slab_bytes: int | None = None
    blocks_per_slab: tuple[int, ...] | None = None
    """Group by group."""
    block_sizes: tuple[int, ...] | None = None
    """Tokens of a block, group by group; 0 for recurrent states."""
    max_block_stride_bytes: int | None = None
    block_lcm_tokens: int | None = None
    held_over_live: float | None = None
    """At `Comparison.workload`; 1 at best."""
    floor_over_live: float | None = None
    request_bytes: int | None = None
    """Of one request of `max_model_len` tokens."""
    max_concurrency: float | None = None
    one_token_bytes: int | None = None


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """All strategies on one request."""

    memory_bytes: int
    """What each strategy could use."""
    max_model_len: int | None
    workload: tuple[WorkloadShare, ...]
    results: tuple[Result, ...]

    @property
    def least_held(self) -> float:
        """`held_over_live` of the best."""
        return min((r.held_over_live for r in self.results if r.held_over_live is not None), default=inf)

    @property
    def is_refused(self) -> bool:
        """No strategy has a plan."""
        return all(result.refusal is not None for result in self.results)


def compare(request: object) -> Comparison:
    """Plan `request` with each strategy in turn, all in the same memory and judged by one workload.

    `nested` is planned for allocator slabs, which it needs; `auto` for the request's. Of a request for a number of
    blocks the memory is that of its own strategy, or of the first that has a plan. Raises `SpecInvalid` (or a child)
    for a request that no strategy can read, and as `kvpage.plan` where the memory has to be found out.
    """
    from kvpage.planner.align import is_hybrid
    from kvpage.request import PlanRequest
    from kvpage.request_faults import faults_at_model

    with faults_at_model(request):
        fields = {**request, "strategy": "unify"} if isinstance(request, Mapping) else request
        parsed = PlanRequest.parse(fields)
        is_aligned_by_vllm = is_hybrid(parsed.expand())
    assert isinstance(fields, dict)  # or it would not have been parsed
    workload, memory_bytes = _workload(parsed), parsed.memory_bytes or _own_bytes(request)
    fields["workload"] = [msgspec.structs.asdict(share) for share in workload]
    if memory_bytes:
        fields |= {"memory_bytes": memory_bytes, "num_blocks": None}
    by_strategy = [(name, fields | _for_strategy(name)) for name in STRATEGIES]
    vllm = (VLLM, fields | {"align_hybrid": is_aligned_by_vllm})
    results = tuple(_result(name, asked) for name, asked in (*by_strategy, vllm))
    return Comparison(memory_bytes=memory_bytes, max_model_len=parsed.max_model_len, workload=workload, results=results)


def _own_bytes(request: object) -> int:
    """Memory of the plan by the request's own strategy, or by the first that has one; 0 when no layer keeps a cache."""
    from kvpage.planner.planner import plan

    assert isinstance(request, Mapping)
    asked = {"strategy": "unify", **request}
    refusals = []
    for one in (asked, *(asked | {"allocator": None} | _for_strategy(name) for name in STRATEGIES)):
        try:
            return plan(one).buffer_size_bytes
        except KvpageError as error:
            refusals.append(error)
    raise refusals[0]


def _workload(request: PlanRequest) -> tuple[WorkloadShare, ...]:
    """The request's, or the one that strategies are judged by where it has none."""
    from kvpage.planner.workload import default_workload

    if request.workload is None:
        parts = [(part.min_tokens, part.max_tokens, part.weight) for part in default_workload(request.max_model_len)]
    else:
        parts = [(entry.shortest_tokens, entry.longest_tokens, entry.weight) for entry in request.workload]
    return tuple(WorkloadShare(min_tokens=low, max_tokens=high, weight=weight) for low, high, weight in parts)


def _for_strategy(strategy: str) -> dict[str, Any]:
    """Fields of the request to plan it with `strategy`."""
    return {"strategy": strategy} | ({"allocator": "slabs"} if strategy == "nested" else {})


def _result(name: str, request: Mapping[str, Any]) -> Result:
    from kvpage.planner.planner import plan

    try:
        planned = plan(request)
    except InternalError:
        raise  # a fault in kvpage is no answer
    except KvpageError as error:
        return Result(name=name, refusal=Refusal(code=error.code, message=error.message))
    judged = planned.efficiency
    return Result(
        name=name,
        strategy=planned.strategy,
        plan_id=planned.plan_id,
        num_groups=len(planned.groups),
        num_slabs=planned.num_blocks,
        slab_bytes=planned.slab_bytes,
        blocks_per_slab=tuple(group.blocks_per_slab for group in planned.groups),
        block_sizes=tuple(0 if _is_state(group) else group.block_size for group in planned.groups),
        max_block_stride_bytes=_max_block_stride_bytes(planned),
        block_lcm_tokens=None if judged is None else judged.block_lcm_tokens,
        held_over_live=None if judged is None else judged.held_over_live,
        floor_over_live=None if judged is None else judged.floor_over_live,
        request_bytes=planned.capacity.request_bytes,
        max_concurrency=planned.capacity.max_concurrency,
        one_token_bytes=None if judged is None else judged.one_token_bytes,
    )


def _is_state(group: GroupPlan) -> bool:
    return group.kind == "mamba"


def _max_block_stride_bytes(plan: Plan) -> int:
    views = (view for layer in plan.layers.values() for view in layer.tensors)
    return max((view.strides_bytes[view.block_axis] * view.kernel_blocks_per_block for view in views), default=0)


# --- for people -------------------------------------------------------------------------------------------------------


def print_comparison(comparison: Comparison) -> None:
    """A row for each strategy, the best in bold, or a paragraph each in a narrow terminal. Then who refuses and why."""
    console = Console(highlight=False)
    rows = [dict(_cells(result)) for result in comparison.results]
    best = [result.held_over_live == comparison.least_held for result in comparison.results]
    table = _table(rows, best)
    natural = Measurement.get(console, console.options.update(max_width=_UNBOUNDED_CHARS), table).maximum
    if natural <= console.width:
        console.print(table)
    else:
        for cells, is_best in zip(rows, best, strict=True):
            (_, name), *others = cells.items()
            facts = "; ".join(f"{' '.join(column.split())} {text}" for column, text in others)
            console.print(f"[bold]{name}[/]{', the best' if is_best else ''}: {facts}")
    for result in comparison.results:
        if result.refusal is not None:
            message = escape(printable(result.refusal.message))
            console.print(f"{result.name} refuses, {result.refusal.code}: {message}", soft_wrap=True)
    for line in _notes(comparison):
        console.print(line, soft_wrap=True)


def _table(rows: Sequence[Mapping[str, str]], best: Sequence[bool]) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    columns = list(dict.fromkeys(column for cells in rows for column in cells))
    for column in columns:
        table.add_column(column, justify="left" if column == "strategy" else "right", no_wrap=True)
    for cells, is_best in zip(rows, best, strict=True):
        table.add_row(*(cells.get(column, "") for column in columns), style="bold" if is_best else None)
    return table


def _cells(result: Result) -> Iterator[tuple[str, str]]:
    """By heading, of which each line is a word or two."""
    yield "strategy", f"auto ({result.strategy})" if result.name == "auto" and result.strategy else result.name
    if result.refusal is not None:
        yield "groups", "refused"
        return
    yield "groups", _number(result.num_groups)
    yield "slab\nbytes", _number(result.slab_bytes)
    yield "blocks\na slab", _few(result.blocks_per_slab or ())
    yield "block\nsizes", _few(result.block_sizes or ())
    yield "largest\nstride", _number(result.max_block_stride_bytes)
    yield "common\nmultiple", _number(result.block_lcm_tokens)
    yield "held\nover live", "-" if result.held_over_live is None else f"{result.held_over_live:.4f}"
    yield "request\nbytes", _number(result.request_bytes)
    yield "fit\nat once", "-" if result.max_concurrency is None else f"{result.max_concurrency:,.2f}"
    yield "one-token\nbytes", _number(result.one_token_bytes)


def _number(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"


def _few(values: Sequence[int]) -> str:
    """Each value once, in order, states last: "16, state"."""
    different = sorted(set(values), key=lambda value: (value == 0, value))
    named = [f"{value:,}" if value else "state" for value in different[:_FEW]]
    return ", ".join([*named, *(["…"] if len(different) > _FEW else [])]) or "-"


def _notes(comparison: Comparison) -> Iterator[str]:
    parts = ", ".join(
        f"{share.min_tokens:,}" + (f"-{share.max_tokens:,}" if share.max_tokens != share.min_tokens else "")
        + (f" (weight {share.weight:g})" if share.weight != 1 else "")
        for share in comparison.workload
    )  # fmt: skip
    yield f"each in {comparison.memory_bytes:,} bytes of memory"
    yield f"held over live: bytes held over bytes needed, mean over requests of {parts} tokens"
    floors = {result.floor_over_live for result in comparison.results if result.floor_over_live is not None}
    if floors:
        yield f"at best {min(floors):.4f}: the last block's tail and the block that a window straddles"
    if comparison.max_model_len is not None:
        yield f"request bytes: of one request of {comparison.max_model_len:,} tokens, as vLLM 0.24 counts"
    yield f"{VLLM}: unify, after its hybrid alignment where there are recurrent states"
