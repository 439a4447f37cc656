"""A plan request for all ranks of a model: the model as one request, and what each rank keeps and has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Self

from kvpage.errors import FieldError, SpecInvalid
from kvpage.models.ranks import ModelRanks, entry_ranks
from kvpage.request import PlanRequest
from kvpage.request_layers import LayerEntry
from kvpage.request_model import FIELD, check_alone, said_by
from kvpage.request_ranks import Merged, Rank, kept_layers, parse_ranks
from kvpage.request_shape import check_shape

ALL = "all"
_RANKS_AT = "/ranks"


@dataclass(frozen=True, slots=True)
class RankedRequest:
    """`merged` has the layers of all ranks, each once."""

    merged: PlanRequest
    kept: tuple[tuple[str, ...], ...]
    """Names of each rank's layers."""
    memory_bytes: tuple[int | None, ...]
    """Of each rank; None where the number of blocks is given."""
    kv_replicas: int | None
    written: Merged | None
    """The layers as the ranks have them, where each writes out its own."""

    @classmethod
    def parse(cls, request: Mapping[str, Any]) -> Self:
        """Validate `request`. Raises `SpecInvalid` (or a child) whose `errors` point into it."""
        rest = {name: value for name, value in request.items() if name not in (FIELD, "ranks")}
        if request.get(FIELD) is not None:
            check_alone(request)
            return cls._of_model(request, rest)
        check_shape(request)
        ranks = _written(request.get("ranks"))
        if request.get("layers") is not None:
            merged = PlanRequest.parse(_with_memory(rest, ranks))
            merged.expand()  # names that are there twice are refused before they are looked for
            return cls(merged, kept_layers(ranks, merged.layers), _memory(merged, ranks), None, None)
        found = Merged.of(ranks)
        with found.faults_at_ranks():
            merged = PlanRequest.parse(_with_memory(rest, ranks) | {"layers": found.layers})
            found.check_alike(lambda entry: _meaning(entry, merged))
        return cls(merged, found.kept, _memory(merged, ranks), None, found)

    @classmethod
    def _of_model(cls, request: Mapping[str, Any], rest: dict[str, Any]) -> Self:
        model = entry_ranks(request[FIELD], at=f"/{FIELD}")
        check_shape({name: value for name, value in request.items() if name != FIELD})
        ranks = _of_model_ranks(request.get("ranks"), model)
        merged = PlanRequest.parse(_with_memory(rest, ranks) | said_by(model.model, rest))
        return cls(merged, model.kept(), _memory(merged, ranks), model.kv_replicas, None)

    def whole(self) -> PlanRequest:
        """The model as one request, with about the memory that its layers have over all ranks: a search for a layout
        weighs what a slab takes of it."""
        if self.merged.num_blocks is not None:
            return self.merged
        entries = (entry for entry in self.merged.layers if _keeps_a_cache(entry))
        owners = {name for entry in entries for name in entry.names()}
        least = min(
            (
                memory * len(owners) // len(mine)
                for kept, memory in set(zip(self.kept, self.memory_bytes, strict=True))
                if memory is not None and (mine := owners.intersection(kept))
            ),
            default=self.merged.memory_bytes,
        )
        return self.merged.model_copy(update={"memory_bytes": least})

    def of_rank(self, rank: int) -> PlanRequest:
        """The request with the rank's memory. Its layers are those of all ranks."""
        return self.merged.model_copy(update={"memory_bytes": self.memory_bytes[rank]})

    def faults_at_ranks(self) -> AbstractContextManager[None]:
        """Faults of layers that a rank wrote out point there."""
        return nullcontext() if self.written is None else self.written.faults_at_ranks()


def _written(ranks: object) -> tuple[Rank, ...]:
    if ranks is None or ranks == ALL:
        detail = "say what each rank keeps: an array with an object for each; the ranks of a model alone are known"
        raise _fault(_RANKS_AT, detail)
    return parse_ranks(ranks)


def _of_model_ranks(ranks: object, model: ModelRanks) -> tuple[Rank, ...]:
    """One for each rank of the model; left out or "all", each has the request's memory."""
    num_ranks = len(model.stages) * model.tp
    if ranks is None or ranks == ALL:
        return (Rank(),) * num_ranks
    parsed = parse_ranks(ranks)
    for index, rank in enumerate(parsed):
        if rank.layers is not None:
            raise _fault(
                f"{_RANKS_AT}/{index}/layers", "the model's tp and pp say what each rank keeps; leave this out"
            )
    if len(parsed) != num_ranks:
        detail = f"tp {model.tp} × pp {len(model.stages)} are {num_ranks} ranks, not {len(parsed)}"
        raise _fault(_RANKS_AT, f'{detail}; give an object for each, or "all"')
    return parsed


def _with_memory(rest: dict[str, Any], ranks: Sequence[Rank]) -> dict[str, Any]:
    """`rest`, which need not name a memory where every rank has its own."""
    given = [(index, rank.memory_bytes) for index, rank in enumerate(ranks) if rank.memory_bytes is not None]
    if rest.get("num_blocks") is not None:
        if given:
            detail = f"num_blocks is given for all ranks, so rank {given[0][0]} needs no memory_bytes; leave one out"
            raise _fault(f"{_RANKS_AT}/{given[0][0]}/memory_bytes", detail)
        return rest
    if rest.get("memory_bytes") is not None:
        return rest
    if len(given) < len(ranks):
        without = next(index for index, rank in enumerate(ranks) if rank.memory_bytes is None)
        detail = f"rank {without} has no memory_bytes, and neither has the request; give one, or num_blocks"
        raise _fault(f"{_RANKS_AT}/{without}", detail)
    return rest | {"memory_bytes": min(memory for _, memory in given)}


def _memory(merged: PlanRequest, ranks: Sequence[Rank]) -> tuple[int | None, ...]:
    return tuple(merged.memory_bytes if rank.memory_bytes is None else rank.memory_bytes for rank in ranks)


def _keeps_a_cache(entry: LayerEntry) -> bool:
    kind: str = entry.kind  # type: ignore[attr-defined]  # each subclass has its own Literal
    return kind != "encoder_only_attention" and entry.kv_sharing_target is None


def _meaning(entry: LayerEntry, merged: PlanRequest) -> tuple[object, ...]:
    """What a layer is, whatever words say it."""
    kind: str = entry.kind  # type: ignore[attr-defined]  # each subclass has its own Literal
    return (kind, entry.draft, entry.kv_sharing_target, *entry.resolve(0, merged.kv_cache_layout))


def _fault(pointer: str, detail: str) -> SpecInvalid:
    return SpecInvalid(f"{pointer}: {detail}", errors=[FieldError(pointer, detail)])
