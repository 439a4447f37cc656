"""Plans for HTTP: computed in threads, encoded once, remembered by request and by plan id."""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from kvpage import strict_json
from kvpage.errors import PlanNotFound, SpecInvalid, shorten
from kvpage.planner.ranks import plan_ranks
from kvpage.plans import Plan
from kvpage_server.encoded_plans import EncodedPlan as EncodedPlan
from kvpage_server.encoded_plans import EncodedRanks, encoded, encoded_ranks
from kvpage_server.plan_cache import Encoding, Form, PlanCache, Representation, RequestDigest
from kvpage_server.plan_queue import NOBODY, Asker, PlanQueue

MIN_GZIP_BYTES = 4096
_GZIP_LEVEL = 5
_PIECE_BYTES = 2047  # hashlib lets go of the interpreter for more
_SAID_CHARS = 16  # of a digest

Planner = Callable[[Mapping[str, Any]], Plan]
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One representation of a plan, ready to send."""

    representation: Representation
    body: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    plan_id: str
    said: str
    known: bool
    """Whether this server already had the plan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRanks:
    body: bytes
    encoding: Encoding
    known: bool
    """Whether this server already had the plans of all ranks."""


class PlanService:
    """Used from the event loop only. `close()` waits for what is being planned, no more.

    `asker` in what follows: in whose turn it is computed, where something is.
    """

    def __init__(self, planner: Planner, cache: PlanCache, queue: PlanQueue | None = None) -> None:
        """Owns `queue`; without one makes its own."""
        self._planner = planner
        self._cache = cache
        self._queue = queue or PlanQueue()

    def __repr__(self) -> str:
        return f"<PlanService {self._queue!r}, {self._cache!r}>"

    def close(self) -> None:
        self._queue.close()

    async def plan_body(
        self, body: bytes, *, max_bytes: int, encoding: Encoding = "identity", asker: Asker = NOBODY
    ) -> Planned | PlannedRanks:
        """The plan for a request body, or those of its ranks. The same bytes are looked up, not read again.

        `encoding`: of the answer with several plans, where it is large enough for that to pay.
        """
        asked = self.led_to(body)
        if asked is not None and self._cache.get(asked) is not None:
            return Planned(plan_id=asked.plan_id, said=asked.said, known=True)
        made = await self.in_thread(lambda: self._made(strict_json.loads(body, max_bytes=max_bytes)), asker)
        if isinstance(made, EncodedRanks):
            return await self._planned_ranks(made, encoding, asker)
        said = "" if made.answer is made.json else hashlib.sha256(made.answer).hexdigest()[:_SAID_CHARS]
        self._cache.put(_digest(body), f"{made.plan_id} {said}".encode())
        known = self._remembered(made)
        if said:
            self._cache.put(Representation(made.plan_id, said=said), made.answer)
        return Planned(plan_id=made.plan_id, said=said, known=known)

    async def plan_request(self, request: Any, asker: Asker = NOBODY) -> EncodedPlan | EncodedRanks:
        """The plan for a request that is already parsed, or those of its ranks, always computed anew."""
        made = await self.in_thread(lambda: self._made(request), asker)
        for plan in _distinct(made):
            self._remembered(plan)
        return made

    async def _planned_ranks(self, made: EncodedRanks, encoding: Encoding, asker: Asker) -> PlannedRanks:
        were_known = [self._remembered(plan) for plan in _distinct(made)]
        known = all(were_known)
        if encoding == "identity" or len(made.json) < MIN_GZIP_BYTES:
            return PlannedRanks(body=made.json, encoding="identity", known=known)
        body = await self.in_thread(lambda: _compressed(made.json), asker)
        return PlannedRanks(body=body, encoding=encoding, known=known)

    def _remembered(self, plan: EncodedPlan) -> bool:
        """Whether the plan was known; it is now."""
        known = self.knows(plan.plan_id)
        if not known:
            self.remember(plan.plan_id, plan.json)
        return known

    def led_to(self, body: bytes) -> Representation | None:
        """What these very bytes have led to, unless it is forgotten."""
        found = self._cache.get(_digest(body))
        if found is None:
            return None
        plan_id, said = found.decode().split(" ")
        return Representation(plan_id, said=said)

    def knows(self, plan_id: str) -> bool:
        return self.full(plan_id) is not None

    def full(self, plan_id: str) -> bytes | None:
        """The whole plan, unless it is forgotten."""
        return self._cache.get(Representation(plan_id))

    async def recall(self, plan_id: str, plan_json: bytes, asker: Asker = NOBODY) -> None:
        """Remember what a worker keeps as a plan, if it is one: who makes a pool there names its plan freely.

        Raises `PlanNotFound`.
        """
        try:
            proven = await self.in_thread(lambda: encoded(Plan.from_json(plan_json)), asker)
        except SpecInvalid as error:
            raise PlanNotFound(f"a pool names plan {shorten(plan_id)}, but what it keeps is none") from error
        if proven.plan_id != plan_id:
            raise PlanNotFound(f"a pool names plan {shorten(plan_id)}, but keeps another")
        self.remember(plan_id, proven.json)

    def remember(self, plan_id: str, plan_json: bytes) -> None:
        self._cache.put(Representation(plan_id), plan_json)

    async def answer(self, wanted: Representation, asker: Asker = NOBODY) -> Answer:
        """`wanted`, or its uncompressed twin when compression does not pay. Raises `PlanNotFound`."""
        return self.ready_answer(wanted) or await self._new_answer(wanted, asker)

    def ready_answer(self, wanted: Representation) -> Answer | None:
        """The same, if it is in the cache as it is to be sent."""
        plain = wanted if wanted.encoding == "identity" else wanted._replace(encoding="identity")
        body = self._cache.get(plain)
        if body is None or wanted is plain or len(body) < MIN_GZIP_BYTES:
            return None if body is None else Answer(representation=plain, body=body)
        compressed = self._cache.get(wanted)
        return None if compressed is None else Answer(representation=wanted, body=compressed)

    async def _new_answer(self, wanted: Representation, asker: Asker) -> Answer:
        full = self._cache.get(Representation(wanted.plan_id, said=wanted.said))
        if full is None:
            raise PlanNotFound(
                f"plan {shorten(wanted.plan_id)} is not known here; POST its request to /v1/plans again",
                details={"plan_id": wanted.plan_id},
            )
        plain = wanted._replace(encoding="identity")
        body = full if wanted.form == "full" else await self._derived(plain, full, _DERIVED[wanted.form], asker)
        if wanted.encoding == "gzip" and len(body) >= MIN_GZIP_BYTES:
            return Answer(representation=wanted, body=await self._derived(wanted, body, _compressed, asker))
        return Answer(representation=plain, body=body)

    async def in_thread(self, work: Callable[[], _Result], asker: Asker = NOBODY) -> _Result:
        """Run pure work beside the event loop. Raises as `PlanQueue.run`."""
        return await self._queue.run(work, asker)

    async def _derived(
        self, key: Representation, source: bytes, derive: Callable[[bytes], bytes], asker: Asker
    ) -> bytes:
        found = self._cache.get(key)
        if found is None:
            found = await self.in_thread(lambda: derive(source), asker)
            self._cache.put(key, found)
        return found

    def _made(self, request: Any) -> EncodedPlan | EncodedRanks:
        if not isinstance(request, Mapping):
            raise SpecInvalid(f"a plan request is a JSON object, not {type(request).__name__}")
        if request.get("ranks") is not None:
            return encoded_ranks(plan_ranks(request))
        return encoded(self._planner(request))


def _distinct(made: EncodedPlan | EncodedRanks) -> tuple[EncodedPlan, ...]:
    if isinstance(made, EncodedPlan):
        return (made,)
    return tuple({plan.plan_id: plan for plan in made.plans}.values())


def _digest(body: bytes) -> RequestDigest:
    """In pieces so small that hashlib keeps the interpreter: getting it back from the planning threads takes longer."""
    digest = hashlib.sha256()
    for start in range(0, len(body), _PIECE_BYTES):
        digest.update(body[start : start + _PIECE_BYTES])
    return RequestDigest(digest.digest())


def _without_layers(plan: bytes) -> bytes:
    content = msgspec.json.decode(plan)
    del content["layers"]
    return msgspec.json.encode(content)


def _drawn(plan: bytes) -> bytes:
    from kvpage.drawing.picture import layout_svg  # for those who look at plans

    return layout_svg(msgspec.json.decode(plan, type=Plan)).encode()


_DERIVED: Mapping[Form, Callable[[bytes], bytes]] = {"groups": _without_layers, "picture": _drawn}


def _compressed(plain: bytes) -> bytes:
    return gzip.compress(plain, _GZIP_LEVEL, mtime=0)
