"""`ranks` in a plan request: what each tensor- or pipeline-parallel rank keeps, and the memory it has.

Every rank is told in one of three ways: by the layers of the request that it keeps; by layers written out, rank for
rank, as workers report them; or by a `model`, whose tp and pp say what each of its ranks keeps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self, TypeAlias

from pydantic import Discriminator, Field, StrictInt, StrictStr, Tag, ValidationError

from kvpage.errors import FieldError, SpecInvalid, nearest, shorten
from kvpage.models.options import MAX_RANKS
from kvpage.pointers import located
from kvpage.request_backends import RequestModel, Size
from kvpage.request_kinds import AnyLayer
from kvpage.request_layers import LayerEntry
from kvpage.request_shape import MAX_LAYERS

MAX_RANK_LAYERS = 128 * MAX_RANKS  # of all ranks together: a plan is made for each


class LayerRange(RequestModel):
    """Layers of the request by their places in its order, `count` expanded: `start` to just before `end`."""

    start: Annotated[StrictInt, Field(ge=0, le=MAX_LAYERS)]
    end: Annotated[StrictInt, Field(ge=0, le=MAX_LAYERS)]


def _form(layers: object) -> str | None:
    """How a rank's layers are told: which member of the union judges them."""
    if isinstance(layers, Mapping | LayerRange):
        return "range"
    if isinstance(layers, Sequence) and layers and not isinstance(layers[0], str):
        return "entries"
    return "names"


class Rank(RequestModel):
    """One rank."""

    layers: (
        Annotated[
            Annotated[tuple[StrictStr, ...], Tag("names")]
            | Annotated[tuple[AnyLayer, ...], Tag("entries")]
            | Annotated[LayerRange, Tag("range")],
            Discriminator(_form),
        ]
        | None
    ) = None
    """Names of the request's layers (`{i}` as there: all of that entry), a range of them, or layers written out where
    the request has none itself. Left out: all layers of the request, as with tensor parallelism."""
    memory_bytes: Size | None = None
    """Left out: the request's."""


RankList: TypeAlias = Annotated[
    tuple[Rank, ...], Field(max_length=MAX_RANKS, fail_fast=True, json_schema_extra={"minItems": 1})
]
Ranks: TypeAlias = RankList | Literal["all"]
"""`all`: every rank of the model, each with the request's memory."""


class _WithRanks(RequestModel):
    ranks: RankList


def parse_ranks(ranks: object) -> tuple[Rank, ...]:
    """`ranks` of a request, checked. Raises `SpecInvalid` with pointers into the request."""
    try:
        parsed = _WithRanks.model_validate({"ranks": ranks}).ranks
    except ValidationError as error:
        raise located(error, {"ranks": ranks}) from None
    if not parsed:
        raise _fault("/ranks", "there is no rank in it; give an object for each")
    return parsed


def refuse_ranks(ranks: object) -> None:
    """Raises `SpecInvalid` where the plan of one rank is asked for with `ranks`."""
    if ranks is not None:
        raise SpecInvalid("this request is of several ranks: kvpage.plan_ranks plans them, kvpage.plan one alone")


@dataclass(frozen=True, slots=True)
class Difference:
    """A layer that two ranks write out in different words; they may mean the same."""

    name: str
    first: LayerEntry
    first_rank: int
    other: LayerEntry
    other_rank: int
    pointer: str


@dataclass(frozen=True, slots=True)
class Merged:
    """The layers of all ranks as one model, and which of them each rank keeps."""

    layers: tuple[LayerEntry, ...]
    pointers: tuple[str, ...]
    """Where each of them stands in the request."""
    kept: tuple[tuple[str, ...], ...]
    differences: tuple[Difference, ...]

    @classmethod
    def of(cls, ranks: Sequence[Rank]) -> Self:
        """Layers in order of their first rank. Raises `SpecInvalid` for a rank that has none written out, or has a
        layer twice."""
        _check_total(sum(sum(entry.count for entry in _entries(rank, index)) for index, rank in enumerate(ranks)))
        first: dict[str, tuple[int, LayerEntry, tuple[object, ...]]] = {}
        pointers: list[str] = []
        differences: list[Difference] = []
        kept: list[tuple[str, ...]] = []
        for index, rank in enumerate(ranks):
            mine: dict[str, None] = {}
            for place, entry in enumerate(_entries(rank, index)):
                where = f"/ranks/{index}/layers/{place}"
                look = entry.but_for_name()
                for name in _names(entry, where):
                    if name in mine:
                        raise _fault(f"{where}/name", f"layer {shorten(name)!r} is on rank {index} twice")
                    mine[name] = None
                    if name not in first:
                        first[name] = (index, entry.model_copy(update={"name": name, "count": 1}), look)
                        pointers.append(where)
                    elif first[name][2] != look:
                        differences.append(Difference(name, first[name][1], first[name][0], entry, index, where))
            kept.append(tuple(mine))
        return cls(tuple(entry for _, entry, _ in first.values()), tuple(pointers), tuple(kept), tuple(differences))

    def check_alike(self, resolve: Any) -> None:
        """Raises `SpecInvalid` naming a layer that is not the same on two ranks, those ranks, and what differs.

        `resolve`: what an entry means, equal for entries that mean the same.
        """
        alike: set[tuple[object, ...]] = set()
        for found in self.differences:
            looks = (found.first.but_for_name(), found.other.but_for_name())
            if looks in alike:
                continue
            if resolve(found.first) != resolve(found.other):
                raise _fault(found.pointer, _mismatch(found))
            alike.add(looks)

    @contextmanager
    def faults_at_ranks(self) -> Iterator[None]:
        """Faults of a merged layer point at the rank that it was written for first."""
        try:
            yield
        except SpecInvalid as error:
            moved = [FieldError(self._moved(fault.pointer), fault.detail) for fault in error.errors]
            if not moved or moved == list(error.errors):
                raise
            detail = error.message.removeprefix(f"{error.errors[0].pointer}: ")
            raise type(error)(f"{moved[0].pointer}: {detail}", details=error.details, errors=moved) from None

    def _moved(self, pointer: str) -> str:
        _, field, *rest = [*pointer.split("/"), ""]
        if field != "layers" or not rest[0].isdigit():
            return pointer
        return "/".join((self.pointers[int(rest[0])], *rest[1:-1]))


def _entries(rank: Rank, index: int) -> tuple[LayerEntry, ...]:
    written = rank.layers
    if isinstance(written, tuple) and all(isinstance(entry, LayerEntry) for entry in written):
        return written  # type: ignore[return-value]  # just proven
    why = "say which it keeps" if written is None else "write them out here"
    raise _fault(f"/ranks/{index}/layers", f"the request has no layers that rank {index} could keep: {why}")


def _mismatch(found: Difference) -> str:
    mine, other = found.first.model_dump(), found.other.model_dump()
    differing = [key for key in {**mine, **other} if key not in ("name", "count") and mine.get(key) != other.get(key)]
    what = ", ".join(f"{key} {shorten(mine.get(key))} and {shorten(other.get(key))}" for key in differing)
    return (
        f"layer {shorten(found.name)!r} is not the same on rank {found.first_rank} and rank {found.other_rank}: "
        f"{what}; ranks that keep a layer must keep it alike"
    )


def kept_layers(ranks: Sequence[Rank], layers: Sequence[LayerEntry]) -> tuple[tuple[str, ...], ...]:
    """Names of the layers of each rank, in the order of the request's `layers`.

    Raises `SpecInvalid` for a name or place that is no layer's, and for a layer that is on no rank.
    """
    by_entry = {entry.name: list(entry.names()) for entry in layers}
    places = {name: place for place, name in enumerate(name for names in by_entry.values() for name in names)}
    order = list(places)
    kept: list[tuple[str, ...]] = []
    total = 0
    for index, rank in enumerate(ranks):
        kept.append(_of_rank(rank, index, by_entry, places, order))
        total += len(kept[-1])
        _check_total(total)
    unowned = set(order).difference(*kept)
    if unowned:
        name = min(unowned, key=places.__getitem__)
        raise _fault("/ranks", f"{len(unowned)} layers are on no rank, {shorten(name)!r} the first; put them on one")
    return tuple(kept)


def _of_rank(
    rank: Rank, index: int, by_entry: Mapping[str, Sequence[str]], places: Mapping[str, int], order: Sequence[str]
) -> tuple[str, ...]:
    where = f"/ranks/{index}/layers"
    if rank.layers is None:
        return tuple(order)
    if isinstance(rank.layers, LayerRange):
        start, end = rank.layers.start, rank.layers.end
        if not start <= end <= len(order):
            raise _fault(where, f"start {start} and end {end} are no range of the request's {len(order)} layers")
        return tuple(order[start:end])
    mine: set[int] = set()
    for place, name in enumerate(rank.layers):
        if not isinstance(name, str):
            raise _fault(where, "the request has layers of its own; name those that this rank keeps")
        found = by_entry.get(name) or ([name] if name in places else None)
        if found is None:
            detail = f"{shorten(name)!r} is no layer of the request{nearest(name, places)}"
            raise _fault(f"{where}/{place}", detail)
        mine.update(places[one] for one in found)
    return tuple(order[place] for place in sorted(mine))


def _names(entry: LayerEntry, where: str) -> Iterator[str]:
    try:
        yield from entry.names()
    except SpecInvalid as error:  # a name that is too long once the number is in it
        raise _fault(f"{where}/name", error.message) from None


def _check_total(num_layers: int) -> None:
    if num_layers > MAX_RANK_LAYERS:
        raise _fault("/ranks", f"the layers of all ranks add up to more than {MAX_RANK_LAYERS}; plan fewer ranks")


def _fault(pointer: str, detail: str) -> SpecInvalid:
    return SpecInvalid(f"{pointer}: {detail}", errors=[FieldError(pointer, detail)])
