"""Plans of a fleet: reserved on all nodes, then committed or undone on all; mended when nodes return.

It keeps nothing that it could not find again. What is decided lies with the nodes: the first mark `committed` on any
of them decides that the plan stays, the first `released` that it goes. So a coordinator may die at any moment, and
several may be at work: each does what the marks say.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from kvpage.client.fleet_resources import FleetPlan, Place
from kvpage.errors import Conflict, DeviceUnavailable, KvpageError, NotFound, ProtocolError, shorten
from kvpage.fleet import messages
from kvpage.fleet.messages import Answer, Message
from kvpage.fleet.planning import plan_fleet
from kvpage.fleet.records import FleetRecord, NodeReport, check_name, digest
from kvpage.fleet.standing import Judgement, held_plan, ids_in, judge, standing_of
from kvpage.fleet.transport import Transport

LOOK_TIMEOUT_S = 10.0
CHANGE_TIMEOUT_S = 600.0
"""Committing memory takes about 0.3 s for a GiB."""
ADMISSION_TIMEOUT_S = 30.0
RESERVATION_TTL_S = 2 * CHANGE_TIMEOUT_S
"""A reservation that is older belongs to a coordinator that died."""


class FleetView:
    """What all nodes said at one moment."""

    def __init__(self, reports: Mapping[str, NodeReport], silent: Mapping[str, str]) -> None:
        self.reports = dict(reports)
        self.silent = dict(silent)
        """Nodes that are believed to live and did not answer, and why."""


class Coordinator:
    """Used by one thread at a time."""

    def __init__(
        self,
        transport: Transport,
        *,
        new_id: Callable[[], str],
        reservation_ttl_s: float = RESERVATION_TTL_S,
        change_timeout_s: float = CHANGE_TIMEOUT_S,
        given_up: set[str] | None = None,
    ) -> None:
        """`new_id`: of plans, never the same. `given_up`: reservations that failed, shared by coordinators of one
        process, so that none waits until they are old.
        """
        self._transport = transport
        self._new_id = new_id
        self._ttl_s = reservation_ttl_s
        self._change_timeout_s = change_timeout_s
        self._records: dict[str, FleetRecord] = {}  # read once: of a record only the phase changes
        self._given_up: set[str] = set() if given_up is None else given_up

    # --- looking -----------------------------------------------------------------------------------------------------

    def look(self, only: Collection[str] | None = None) -> FleetView:
        """`only`: these of the nodes; else all."""
        nodes = [name for name in self._transport.nodes() if only is None or name in only]
        answers = self._transport.ask(dict.fromkeys(nodes, messages.Look()), timeout_s=LOOK_TIMEOUT_S)
        reports, silent = {}, {}
        for name, answer in answers.items():
            match answer:
                case messages.Report():
                    reports[name] = answer.report
                case _:
                    silent[name] = _error_of(name, answer).message
        return FleetView(reports, silent)

    def standings(self, view: FleetView) -> list[FleetPlan]:
        return [standing_of(record, self._judge(record, view), view.reports) for record in self._known(view)]

    def standing(self, plan_id: str, view: FleetView | None = None) -> FleetPlan:
        """Of the plan with that id, or of that name. Raises `NotFound`."""
        return self._find(plan_id, self.standings(view or self.look()))

    def _find(self, wanted: str, standings: Sequence[FleetPlan]) -> FleetPlan:
        by_id = [one for one in standings if one.id == wanted]
        live = [one for one in standings if one.name == wanted and one.state != "releasing"]
        for one in (*by_id, *live, *(one for one in standings if one.name == wanted)):
            return one
        raise NotFound(f"the fleet has no plan {shorten(repr(wanted))}", details={"id": shorten(wanted)})

    def _judge(self, record: FleetRecord, view: FleetView) -> Judgement:
        return judge(record, view.reports, ttl_s=self._ttl_s, given_up=record.id in self._given_up)

    def _known(self, view: FleetView) -> list[FleetRecord]:
        """The records of all plans that some node has. One that went away since is left out."""
        ids = ids_in(view.reports)
        for plan_id in [one for one in self._records if one not in ids]:
            del self._records[plan_id]
        wanted = [plan_id for plan_id in ids if plan_id not in self._records]
        for plan_id in wanted:
            self._read(plan_id, view)
        return [self._records[plan_id] for plan_id in ids if plan_id in self._records]

    def _read(self, plan_id: str, view: FleetView) -> None:
        for name, report in view.reports.items():
            if held_plan(plan_id, report) is not None:
                answers = self._transport.ask({name: messages.Read(id=plan_id)}, timeout_s=LOOK_TIMEOUT_S)
                if isinstance(answer := answers[name], messages.Record):
                    self._records[plan_id] = answer.record
                    return

    # --- making ------------------------------------------------------------------------------------------------------

    def create(self, request: Mapping[str, Any], name: str, places: Sequence[Place] | None = None) -> FleetPlan:
        """Plan `request` for all ranks, and make it real on all nodes or on none. The same name and request again find
        the same plan.

        Raises what planning and reserving raise, with the node in `details`; nothing is reserved then, or will not be
        once nodes that did not answer do. `DeviceUnavailable` with `details["state"]` `in-doubt`: a node went away at
        the moment at which the plan was committed; once it answers, `mend` knows whether it was.
        """
        check_name(name)
        view = self.look()
        found = self._same(request, name, view)
        if found is not None:
            return found
        reports = _able(view)
        if not reports:
            raise DeviceUnavailable(f"no node of the fleet can take a rank: {_why_none(view)}")
        record = plan_fleet(request, plan_id=self._new_id(), name=name, reports=reports, places=places)
        with self._transport.admitted(record.nodes, timeout_s=ADMISSION_TIMEOUT_S):
            self._reserve(record)
            self._commit(record)
        self._records[record.id] = record
        view = self.look(record.nodes)
        return standing_of(record, self._judge(record, view), view.reports)

    def _same(self, request: Mapping[str, Any], name: str, view: FleetView) -> FleetPlan | None:
        for record in self._known(view):
            judgement = self._judge(record, view)
            if record.name != name or judgement.decision in ("released", "abandoned"):
                continue
            if judgement.decision == "committed" and record.asked == digest(request):
                return standing_of(record, judgement, view.reports)
            what = "of another request" if judgement.decision == "committed" else f"that is {judgement.decision}"
            raise Conflict(
                f"the fleet has a plan {name!r} {what} ({record.id}); choose another name, or give that one back",
                details={"id": record.id, "state": judgement.decision},
            )
        return None

    def _reserve(self, record: FleetRecord) -> None:
        """On all nodes at once. Raises what the first that failed raised, when all others are asked to undo it."""
        try:
            faults = self._change(record.nodes, messages.Reserve(record=record))
        except KeyboardInterrupt:  # nobody wants it any more, and it would stay until it is old
            self._give_up(record)
            raise
        if faults:
            left = self._give_up(record)
            name, error = next(iter(faults.items()))
            raise _at_node(name, error, len(faults), record, left)

    def _give_up(self, record: FleetRecord) -> dict[str, KvpageError]:
        """What is not committed anywhere. The errors of the nodes that did not undo it."""
        self._given_up.add(record.id)
        return self._change(record.nodes, messages.Abort(id=record.id))

    def _commit(self, record: FleetRecord) -> None:
        """One node first, so that there is a moment at which the plan is committed; then all others."""
        first, *others = record.nodes
        commit = messages.Commit(id=record.id)
        fault = self._change([first], commit).get(first)
        if fault is not None and _was_refused(fault):  # it says itself that it is not committed, so nobody is
            raise _at_node(first, fault, 1, record, self._give_up(record))
        if fault is not None:
            raise DeviceUnavailable(
                f"node {first} went away when plan {record.name!r} was committed there, so nobody knows whether it is: "
                f"{fault.message}; the other nodes keep what is reserved until it answers",
                details={"id": record.id, "node": first, "state": "in-doubt"},
            )
        self._change(others, commit)  # who does not hear of it is told by `mend`

    # --- giving back -------------------------------------------------------------------------------------------------

    def delete(self, wanted: str, *, force: bool = False) -> FleetPlan | None:
        """Give a plan back, by id or name. None when all of it is gone; else what is still to be done, which `mend`
        does when holders let go and nodes return.

        Raises `Conflict` naming the holders unless `force`, and for a plan that is in doubt: `force` undoes that one
        on the nodes that answer. `NotFound`.
        """
        view = self.look()
        standing = self._find(wanted, self.standings(view))
        record = self._records[standing.id]
        holders = [f"{holder} on {rank.node}" for rank in standing.ranks for holder in rank.holders]
        if holders and not force:
            raise Conflict(
                f"plan {standing.name!r} is held by {shorten(', '.join(holders))}; end them, or force it",
                details={"id": standing.id, "holders": holders},
            )
        if standing.state == "in-doubt" and not force:
            raise Conflict(
                f"plan {standing.name!r} is in doubt until {', '.join(standing.unreachable)} answers; force it if that "
                f"node is gone for good",
                details={"id": standing.id, "unreachable": list(standing.unreachable)},
            )
        reachable = [name for name in record.nodes if name in view.reports]
        faults = self._change(reachable, messages.Release(record=record, force=force))
        left = self._finish_release(record, drop_all=force)
        return None if left is None else msgspec.structs.replace(left, detail=_listed(faults))

    def _finish_release(self, record: FleetRecord, *, drop_all: bool = False) -> FleetPlan | None:
        """The records go when every node of the plan has given its pools back. With `drop_all` nodes that are away are
        not waited for: one that comes back with its pools brings the plan back.
        """
        view = self.look(record.nodes)
        judgement = self._judge(record, view)
        if judgement.incomplete or (judgement.unreachable and not drop_all):
            return standing_of(record, judgement, view.reports)
        there = [name for name in record.nodes if name in view.reports]
        faults = self._change(there, messages.Drop(id=record.id))
        return standing_of(record, judgement, view.reports) if faults else None

    # --- mending -----------------------------------------------------------------------------------------------------

    def mend(self, view: FleetView | None = None) -> dict[str, list[str]]:
        """Do what the marks say and has not been done; nodes that have all they should are not asked. Returns, by plan,
        what could not be done now.
        """
        view = view or self.look()
        undone: dict[str, list[str]] = {}
        for record in self._known(view):
            faults = self._settle(record, self._judge(record, view))
            if faults:
                undone[record.id] = [f"node {name}: {error.message}" for name, error in faults.items()]
        return undone

    def _settle(self, record: FleetRecord, judgement: Judgement) -> dict[str, KvpageError]:
        nodes = judgement.incomplete
        match judgement.decision:
            case "committed":
                return self._change(nodes, messages.Restore(record=record))
            case "abandoned":
                return self._change(nodes, messages.Abort(id=record.id))
            case "released":
                faults = self._change(nodes, messages.Release(record=record))
                if not judgement.unreachable and not faults:
                    self._finish_release(record)
                return faults
        return {}

    # --- asking ------------------------------------------------------------------------------------------------------

    def _change(self, nodes: Iterable[str], message: Message) -> dict[str, KvpageError]:
        """Ask these nodes; the errors of those that did not do it."""
        questions = dict.fromkeys(nodes, message)
        answers = self._transport.ask(questions, timeout_s=self._change_timeout_s) if questions else {}
        return {
            name: _error_of(name, answers[name]) for name in questions if not isinstance(answers[name], messages.Done)
        }


def _listed(faults: Mapping[str, KvpageError]) -> str:
    return "; ".join(f"node {name}: {error.message}" for name, error in faults.items())


def _able(view: FleetView) -> dict[str, NodeReport]:
    """Nodes that can take new ranks."""
    return {name: report for name, report in view.reports.items() if not report.fault}


def _why_none(view: FleetView) -> str:
    faults = view.silent | {name: report.fault for name, report in view.reports.items()}
    return "; ".join(f"node {name}: {fault}" for name, fault in faults.items()) or "`kvpage fleet up` starts allocators"


def _was_refused(error: KvpageError) -> bool:
    """Whether the node itself answered, so that it is known what it has done."""
    return bool(error.details.get("answered_by"))


def _error_of(name: str, answer: Answer | KvpageError) -> KvpageError:
    match answer:
        case KvpageError():
            return answer
        case messages.Failed():
            error = answer.error
            error.details = {**error.details, "answered_by": name}
            return error
    return ProtocolError(f"node {name} answered with {type(answer).__name__}")


def _at_node(
    name: str, error: KvpageError, num_faults: int, record: FleetRecord, left: Mapping[str, KvpageError]
) -> KvpageError:
    """The node's own error, for who asked for the plan. `left`: nodes that could not be asked to undo it."""
    more = "" if num_faults == 1 else f" (and {num_faults - 1} other nodes)"
    rest = "; what nodes that did not answer keep is given back when they do" if left else ""
    details = {key: value for key, value in error.details.items() if key != "answered_by"}
    return type(error)(
        f"node {name}: {error.message}{more}; nothing of plan {record.name!r} is kept{rest}",
        details={**details, "node": name, "num_nodes": num_faults},
    )
