"""Plans that this process has proven: who attaches again need not be sent one, and need not prove it, again."""

from __future__ import annotations

from kvpage.client.views import PlannedViews

MAX_KNOWN_PLANS = 16


class KnownPlans:
    """Of all connections of the process. A plan is named by its content, so one that was proven stays proven.

    Threads, signal handlers and forked children may come at any moment, so there is no lock: each step on a dict is
    one call, and what two threads make of it together is at worst a plan forgotten, which is sent and proven again.
    """

    def __init__(self, max_plans: int = MAX_KNOWN_PLANS) -> None:
        self._max_plans = max_plans
        self._by_id: dict[str, PlannedViews] = {}  # the one used last is last
        self._ids: dict[tuple[str, str], str] = {}  # by socket and pool name, as last seen

    def __len__(self) -> int:
        return len(self._by_id)

    def of_pool(self, socket_path: str, name: str) -> PlannedViews | None:
        """The plan that the pool of this name had when it was last seen there."""
        return self._by_id.get(self._ids.get((socket_path, name), ""))

    def remember(self, socket_path: str, name: str, views: PlannedViews) -> None:
        """`views` of a plan that was proven, and fits the pool."""
        plan_id = views.plan.plan_id
        self._by_id.pop(plan_id, None)
        self._by_id[plan_id] = views
        for old in list(self._by_id)[: -self._max_plans]:
            self._by_id.pop(old, None)
        self._ids.pop((socket_path, name), None)
        self._ids[socket_path, name] = plan_id
        if len(self._ids) > 2 * self._max_plans:
            self._ids = {place: known for place, known in list(self._ids.items()) if known in self._by_id}
            for place in list(self._ids)[: -2 * self._max_plans]:
                self._ids.pop(place, None)

    def forget(self) -> None:
        """All of them: the next attachment is as the first of a process."""
        self._by_id.clear()
        self._ids.clear()


KNOWN_PLANS = KnownPlans()
