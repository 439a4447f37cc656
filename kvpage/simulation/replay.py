"""One request stream against one layout, step by step: who runs, what is held, who is preempted.

The rules. A step gives every running request one token. Requests are served in the order of their arrival, and there
is always one waiting. In a step, first the requests that have their last token leave; then the running ones, oldest
first, give back blocks that left their window and take those that the new token needs; when there is no room the
youngest is preempted: it gives everything back and waits, before all others, to begin again with the tokens it has.
Unless somebody was preempted, waiting requests are then let in while the first of them fits. A prompt is computed in
the step that lets it in, and takes no more blocks than its tokens keep afterwards.

A request's blocks of one step are taken all or none. Every number is exact: between the steps in which its blocks
change, a request's live tokens grow by the same number each step, and are summed in closed form.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

from kvpage.simulation.demand import Demand, Wanted
from kvpage.simulation.layout import SimulatedLayout
from kvpage.simulation.slabs import Run, Slabs
from kvpage.simulation.streams import RequestLengths

MAX_STEPS = 1_000_000
MAX_RUNNING = 100_000  # so that a mistaken memory size ends in a result, not in minutes of letting requests in


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayResult:
    """Means over the measured steps."""

    mean_running: float
    """Requests running."""
    live_share: float
    """Bytes of tokens and states that are still needed, over the memory."""
    held_share: float
    """Bytes of slabs that belong to a group, over the memory."""
    preemptions: int
    finished: int
    refused: int
    """Requests that do not fit even alone."""
    measured_steps: int


@dataclass(slots=True)
class _Waiting:
    """A request that does not run."""

    lengths: RequestLengths
    done_tokens: int = 0
    """Output tokens computed before it was preempted."""


@dataclass(slots=True, eq=False)
class _Running:
    order: int
    """Of admission: the least is the oldest."""
    lengths: RequestLengths
    done_before: int
    """Output tokens it had when it was let in."""
    admitted_step: int
    segment_step: int
    """Since when its live tokens grow evenly."""
    runs: tuple[deque[Run], ...]
    """Blocks held, group by group, oldest first."""
    is_running: bool = True

    def tokens(self, step: int) -> int:
        """Tokens in `step`, the one in flight included."""
        return self.lengths.prompt_tokens + self.done_before + 1 + step - self.admitted_step

    def done_tokens(self, step: int) -> int:
        """Output tokens computed before `step`."""
        return self.done_before + step - self.admitted_step


class Replay:
    """A pool and its queue. `run` it once."""

    def __init__(
        self, layout: SimulatedLayout, requests: Iterator[RequestLengths], *, max_running: int = MAX_RUNNING
    ) -> None:
        self._layout = layout
        self._requests = requests
        self._max_running = max_running
        self._demand = Demand(layout)
        self._slabs = [Slabs(group.blocks_per_slab) for group in layout.groups]
        self._free_slabs = [pool.slabs for pool in layout.pools]
        self._waiting: deque[_Waiting] = deque()
        self._running: dict[int, _Running] = {}  # by order
        self._orders = 0
        self._changes: dict[int, list[_Running]] = {}  # by the step in which blocks or growth change
        self._finishes: dict[int, list[_Running]] = {}  # by the first step in which they no longer run
        self._step = 0
        self._measured = range(0)
        self._live = [0] * len(layout.groups)
        self._preemptions = self._finished = self._refused = 0
        self._lets_in = True

    def run(self, steps: int, *, warm_up_steps: int) -> ReplayResult:
        """Replay `warm_up_steps` and then `steps` steps (at least 1); measure the latter."""
        self._measured = range(warm_up_steps, warm_up_steps + steps)
        running = held_bytes = 0
        for self._step in range(warm_up_steps + steps):
            self._one_step()
            if self._step in self._measured:
                running += len(self._running)
                held_bytes += self.held_bytes()
        self._step += 1
        for request in self._running.values():
            self._end_segment(request)
        pairs = zip(self._layout.groups, self._live, strict=True)
        live_bytes = sum((group.bytes_per_token * live for group, live in pairs), Fraction(0))
        return ReplayResult(
            mean_running=running / steps,
            live_share=float(live_bytes / (steps * self._layout.memory_bytes)),
            held_share=held_bytes / (steps * self._layout.memory_bytes),
            preemptions=self._preemptions,
            finished=self._finished,
            refused=self._refused,
            measured_steps=steps,
        )

    def held_bytes(self) -> int:
        """Bytes of slabs that belong to a group now."""
        pools = zip(self._layout.pools, self._free_slabs, strict=True)
        return sum((pool.slabs - free) * pool.slab_bytes for pool, free in pools)

    def _one_step(self) -> None:
        is_measured = self._step in self._measured
        for request in self._finishes.pop(self._step, ()):
            if request.is_running:
                self._leave(request)
                self._finished += is_measured
        self._lets_in = True
        for request in sorted(self._changes.pop(self._step, ()), key=_order):
            if request.is_running:
                self._grow(request)
        while self._lets_in and len(self._running) < self._max_running:
            self._let_in()

    def _grow(self, request: _Running) -> None:
        """Give `request` the blocks of this step's token; preempt the youngest, at last itself, until they fit."""
        tokens = request.tokens(self._step)
        change = self._demand.change(tokens)
        for index, blocks in change.gone:
            self._give_back(index, blocks, request)
        while not self._take(change.new, request):
            self._preempt_youngest()
            if not request.is_running:
                return
        self._end_segment(request)
        self._await_change(request, tokens)

    def _take(self, wanted: Wanted, request: _Running) -> bool:
        """Take all that is `wanted` or nothing; False when there are too few free slabs."""
        groups = self._layout.groups
        needed = [0] * len(self._free_slabs)
        for index, blocks in wanted:
            needed[groups[index].pool] += groups[index].count * self._slabs[index].slabs_needed(blocks)
        if any(need > free for need, free in zip(needed, self._free_slabs, strict=True)):
            return False
        for index, blocks in wanted:
            self._slabs[index].take(blocks, request.runs[index])
        for pool, need in enumerate(needed):
            self._free_slabs[pool] -= need
        return True

    def _give_back(self, index: int, blocks: int, request: _Running) -> None:
        group = self._layout.groups[index]
        self._free_slabs[group.pool] += group.count * self._slabs[index].give_back(blocks, request.runs[index])

    def _leave(self, request: _Running) -> None:
        for index, runs in enumerate(request.runs):
            self._give_back(index, sum(run.blocks for run in runs), request)
        self._end_segment(request)
        request.is_running = False
        del self._running[request.order]

    def _preempt_youngest(self) -> None:
        victim = self._running[next(reversed(self._running))]
        self._leave(victim)
        self._lets_in = False
        if not self._running:
            self._refuse()  # it had the whole pool
            return
        self._waiting.appendleft(_Waiting(victim.lengths, victim.done_tokens(self._step)))
        self._preemptions += self._step in self._measured

    def _refuse(self) -> None:
        self._lets_in = False
        self._refused += self._step in self._measured

    def _let_in(self) -> None:
        """Let the first waiting request in, or stop letting in for this step."""
        if not self._waiting:
            self._waiting.append(_Waiting(next(self._requests)))
        first = self._waiting[0]
        request = _Running(
            order=self._orders,
            lengths=first.lengths,
            done_before=first.done_tokens,
            admitted_step=self._step,
            segment_step=self._step,
            runs=tuple(deque() for _ in self._slabs),
        )
        tokens = request.tokens(self._step)
        if not self._take(self._demand.blocks(tokens), request):
            self._lets_in = False
            if not self._running:
                self._waiting.popleft()
                self._refuse()
            return
        self._waiting.popleft()
        self._orders += 1
        self._running[request.order] = request
        left = first.lengths.output_tokens - first.done_tokens
        self._finishes.setdefault(self._step + left, []).append(request)
        self._await_change(request, tokens)

    def _await_change(self, request: _Running, tokens: int) -> None:
        change = self._demand.next_change(tokens)
        if change is not None:
            self._changes.setdefault(self._step + change - tokens, []).append(request)

    def _end_segment(self, request: _Running) -> None:
        """Count the live tokens of the measured steps since the segment began, up to but without this step."""
        first = max(request.segment_step, self._measured.start)
        steps = min(self._step, self._measured.stop) - first
        if steps > 0:
            tokens = request.tokens(first)
            for index, group in enumerate(self._layout.groups):
                growth = group.growth.live_growth(tokens)
                self._live[index] += group.growth.live(tokens) * steps + growth * (steps * (steps - 1) // 2)
        request.segment_step = self._step


def _order(request: _Running) -> int:
    return request.order
