"""Kills processes at every step of every operation, uses up everything there is, attacks the service, and writes what
came of it into docs/reliability.md. Takes about forty minutes: `make reliability`; `make reliability PARTS=attack` runs
one part of it, or several with spaces between.
"""

from __future__ import annotations

import datetime
import os
import platform
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random, SystemRandom
from typing import TypeVar

_Scene = TypeVar("_Scene")
ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "reliability.md"
NUM_UPGRADES = 10
NUM_CYCLES = 1000
BOTH_STEPS = (1, 5, 9)
NUM_RANDOM_CALLS = 60
MOST_CALLS = 600
NUM_SOAKS, SOAK_S = 2, 60.0

sys.path.insert(0, str(ROOT / "tests"))

from support import attacks, exhaustion, kill_matrix, lease_kill_matrix, upgrade  # noqa: E402 - found by the line above
from support.lease_soak import Outcome, soak  # noqa: E402
from support.many_planners import Planning  # noqa: E402
from support.tally import Tally  # noqa: E402

_SOAK_BLOWS = {
    "client": "a client killed",
    "two clients": "two at once",
    "client stopped": "one killed while another was stopped",
    "worker": "the worker killed",
    "worker and a client": "with a client",
    "API": "the API process killed",
    "replaced": "the worker replaced",
    "proved": "the pool proved while the worker was stopped",
}


@dataclass(slots=True)
class Row:
    """Of a kill matrix."""

    who: str
    during: str
    tried: int = 0
    survived: int = 0
    lost: int = 0
    leaked: int = 0

    def count(self, kill: Callable[[], kill_matrix.Trial]) -> bool:
        """Whether another step is to be tried."""
        self.tried += 1
        try:
            trial = kill()
        except kill_matrix.Leaked as fault:
            print(f"  LEAKED at step {self.tried}: {fault}", flush=True)
            self.leaked += 1
            return True
        except Exception as fault:  # noqa: BLE001 - whatever it is, the table must say that something was lost
            print(f"  LOST at step {self.tried}: {type(fault).__name__}: {fault}", flush=True)
            self.lost += 1
            return False  # the scene is not fit for another trial
        self.survived += 1
        return not trial.survived_the_operation


def main(names: Sequence[str]) -> int:
    """Runs the parts that are named, or all. Returns 1 when something was lost, 2 for an unknown name."""
    parts = {"upgrade": upgrades, "exhaustion": exhausting, "kills": kills, "leases": leases, "attack": attack}
    unknown = set(names) - parts.keys()
    if unknown:
        print(f"no part {', '.join(sorted(unknown))}; there are {', '.join(parts)}", file=sys.stderr)
        return 2
    is_sound = [part() for name, part in parts.items() if not names or name in names]
    return 0 if all(is_sound) else 1


def upgrades() -> bool:
    with _folder() as folder:
        _write("upgrade", _upgrade(upgrade.upgrade_under_load(folder, NUM_UPGRADES)))
    return True


def exhausting() -> bool:
    exhausted = list(_exhausted())
    _write("exhaustion", _table(exhausted))
    return all(outcome == "unharmed" for _, outcome, _ in exhausted)


def kills() -> bool:
    with ThreadPoolExecutor() as threads:  # each row has processes and a folder of its own
        parts = list(threads.map(lambda part: list(part()), (_worker_rows, _api_rows, _rows_of_both)))
    rows = [row for part in parts for row in part]
    _write("kill matrix", _matrix(rows))
    return not any(row.lost or row.leaked for row in rows)


def attack() -> bool:
    """Each name with what was tried, survived and lost; and what a thousand planners cost."""
    seed = SystemRandom().getrandbits(32)
    tallies = []
    for name, tally in attacks.all_attacks(seed):
        print(name, tally.tried, tally.lost, *tally.losses[:20], sep="\n  ", flush=True)
        tallies.append((name, tally))
    planning = attacks.planners()
    tallies.append((f"{attacks.NUM_PLANNERS:,} planners at once", planning.tally))
    _write("attack", f"Seed {seed}.\n\n{_attacked(tallies)}\n\n{_planning(planning)}")
    return not any(tally.lost for _, tally in tallies)


def leases() -> bool:
    """Whether no lease was lost: not at any step, and not under random work, of which a fault ends everything."""
    with ThreadPoolExecutor() as threads:
        parts = list(threads.map(lambda part: list(part()), (_lease_rows, _other_lease_rows)))
    rows = [row for part in parts for row in part]
    _write("lease kill matrix", _matrix(rows))
    outcomes = []
    for _ in range(NUM_SOAKS):
        with _folder() as folder:
            outcomes.append(soak(folder, seed=SystemRandom().getrandbits(32), duration_s=SOAK_S))
    _write("lease soak", _soaks(outcomes))
    return not any(row.lost or row.leaked for row in rows)


def _write(name: str, table: str) -> None:
    print(table, flush=True)
    PAGE.write_text(_replaced(PAGE.read_text(), name, f"{_stamp()}\n\n{table}"))


def _worker_rows() -> Iterator[Row]:
    kills: dict[str, Callable[[kill_matrix.Scene, int], kill_matrix.Trial]] = {
        operation: partial(_during, kill_matrix.kill_worker_during, operation) for operation in kill_matrix.OPERATIONS
    }
    kills["adopt"] = kill_matrix.kill_worker_during_adoption
    kills["being replaced"] = kill_matrix.kill_worker_during_replacement
    for operation, kill in kills.items():
        yield _every_step(Row("worker", operation), kill, kill_matrix.scene)


def _api_rows() -> Iterator[Row]:
    for operation in ("create", "delete"):
        kill = partial(_during, kill_matrix.kill_api_during, operation)
        yield _every_step(Row("API", operation), kill, kill_matrix.scene)
    yield _every_step(Row("API", "export, at its start"), kill_matrix.kill_api_while_it_learns, kill_matrix.scene)


def _rows_of_both() -> Iterator[Row]:
    for operation in kill_matrix.OPERATIONS:
        row = Row("worker, API, worker", operation)
        with _folder() as folder, kill_matrix.scene(folder) as scene:
            for step in BOTH_STEPS:
                row.count(partial(kill_matrix.kill_both_in_turn, scene, operation, step))
        yield _told(row)


def _lease_rows() -> Iterator[Row]:
    for operation in lease_kill_matrix.OPERATIONS:
        kill = partial(_during, lease_kill_matrix.kill_worker_during, operation)
        yield _every_step(Row("worker", operation), kill, lease_kill_matrix.scene)


def _other_lease_rows() -> Iterator[Row]:
    for name, kill in lease_kill_matrix.OTHER_BLOWS.items():
        who, _, during = name.partition(", ")
        yield _every_step(Row(who, during), kill, lease_kill_matrix.scene)
    chance = Random(SystemRandom().getrandbits(32))
    row = Row("worker", "any of these, at a random call of any function")
    with _folder() as folder, lease_kill_matrix.scene(folder) as scene:
        for _ in range(NUM_RANDOM_CALLS):
            operation, call = chance.choice([*lease_kill_matrix.OPERATIONS]), chance.randint(1, MOST_CALLS)
            row.count(partial(lease_kill_matrix.kill_worker_during, scene, operation, f"any{call}"))
    yield _told(row)


def _during(
    kill: Callable[[_Scene, str, int], kill_matrix.Trial], operation: str, scene: _Scene, step: int
) -> kill_matrix.Trial:
    return kill(scene, operation, step)


def _every_step(
    row: Row,
    kill: Callable[[_Scene, int], kill_matrix.Trial],
    made: Callable[[Path], AbstractContextManager[_Scene]],
) -> Row:
    with _folder() as folder, made(folder) as scene:
        while row.count(partial(kill, scene, row.tried + 1)):
            pass
    return _told(row)


def _told(row: Row) -> Row:
    print(row, flush=True)
    return row


def _exhausted() -> Iterator[tuple[str, str, str]]:
    """What was used up, how the service was after it, and the details."""
    functions: dict[str, Callable[[Path], str]] = {
        "files, by clients that take nothing": exhaustion.slow_clients,
        "files, by clients": exhaustion.more_clients_than_files,
        "1,000 clients": exhaustion.many_clients,
        "replies nobody reads": exhaustion.a_client_that_never_reads,
        "memory": exhaustion.more_memory_than_allowed,
        "memory, asked for twice at once": exhaustion.races_for_memory,
        "layers": exhaustion.most_layers,
        f"{NUM_CYCLES:,} × create, attach, delete": lambda folder: exhaustion.cycles(folder, NUM_CYCLES),
    }
    for name, exhaust in functions.items():
        with _folder() as folder:
            try:
                outcome, details = "unharmed", exhaust(folder)
            except Exception as fault:  # noqa: BLE001 - whatever it is, the table must say so
                outcome, details = "HARMED", f"{type(fault).__name__}: {fault}"
        print(name, outcome, details, flush=True)
        yield name, outcome, details


@contextmanager
def _folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kvp-") as folder:
        yield Path(folder)


def _stamp() -> str:
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    kernel, python = platform.release().split("-")[0], platform.python_version()
    return f"{today}, Linux {kernel}, Python {python}, {os.cpu_count()} cores."


def _matrix(rows: list[Row]) -> str:
    lines = ["| killed | during | steps tried | survived | lost | leaked |", "| --- | --- | --- | --- | --- | --- |"]
    lines += [f"| {r.who} | {r.during} | {r.tried} | {r.survived} | {r.lost} | {r.leaked} |" for r in rows]
    counts = [(row.tried, row.survived, row.lost, row.leaked) for row in rows]
    tried, survived, lost, leaked = (sum(column) for column in zip(*counts, strict=True))
    return "\n".join([*lines, f"| | together | {tried} | {survived} | {lost} | {leaked} |"])


def _table(exhausted: list[tuple[str, str, str]]) -> str:
    lines = ["| what was used up | the service | how it ended |", "| --- | --- | --- |"]
    return "\n".join([*lines, *(f"| {name} | {outcome} | {details} |" for name, outcome, details in exhausted)])


def _attacked(tallies: list[tuple[str, Tally]]) -> str:
    lines = ["| attack | tried | survived | lost | how it went |", "| --- | --- | --- | --- | --- |"]
    lines += [f"| {name} | {one.tried:,} | {one.survived:,} | {one.lost:,} | {one.told()} |" for name, one in tallies]
    together = [sum(column) for column in zip(*((t.tried, t.survived, t.lost) for _, t in tallies), strict=True)]
    return "\n".join([*lines, f"| together | {' | '.join(f'{count:,}' for count in together)} | |"])


def _planning(planning: Planning) -> str:
    return (
        f"The plans of {attacks.NUM_PLANNERS:,} at once took {planning.at_once_s / planning.in_turn_s:.2f} times as "
        "long as those of one client that asks as often, one after the other."
    )


def _upgrade(measured: upgrade.Upgrades) -> str:
    pauses_s = sorted(measured.pauses_s)
    rows = {
        "workers replaced": f"{measured.num_replaced}",
        "attaches meanwhile, each comparing every byte": f"{measured.num_attaches:,}; none failed, no byte differed",
        "pause of a replacement, median and longest": _both_ms(pauses_s[len(pauses_s) // 2], pauses_s[-1]),
        "an attach, median and longest": _both_ms(measured.median_attach_s, measured.longest_attach_s),
    }
    return "\n".join(
        ["| what | measured |", "| --- | --- |", *(f"| {what} | {value} |" for what, value in rows.items())]
    )


def _soaks(outcomes: list[Outcome]) -> str:
    rows = {
        "operations of clients": [f"{one.counts['operations']:,}" for one in outcomes],
        "blocks committed, prefixes taken, blocks shared by number": [
            f"{one.counts['committed']:,}, {one.counts['prefixes taken']:,}, {one.counts['blocks shared']:,}"
            for one in outcomes
        ],
        "requests that might wait, answers that there were too few blocks": [
            f"{one.counts['with deadlines']:,}, {one.counts['out of blocks']:,}" for one in outcomes
        ],
        "leases opened, adopted; reservations lost with their worker": [
            f"{one.counts['opened']}, {one.counts['adopted']}; {one.counts['reservations lost']}" for one in outcomes
        ],
        **{what: [f"{one.blows[blow]}" for one in outcomes] for blow, what in _SOAK_BLOWS.items()},
        "blocks lost, owned twice, or left": ["none" for _ in outcomes],  # else there would be no outcome
    }
    head = ["| what |", *(f" seed {one.seed} |" for one in outcomes)]
    lines = ["".join(head), "| --- |" + " --- |" * len(outcomes)]
    return "\n".join([*lines, *(f"| {what} | {' | '.join(values)} |" for what, values in rows.items())])


def _both_ms(median_s: float, longest_s: float) -> str:
    return f"{median_s * 1000:.0f} ms, {longest_s * 1000:.0f} ms"


def _replaced(text: str, name: str, table: str) -> str:
    """`text` with `table` between the marks of `name`."""
    pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end -->)", re.DOTALL)
    text, count = pattern.subn(lambda found: f"{found[1]}{table}\n{found[2]}", text)
    assert count == 1, f"{PAGE.name} has {count} places for the table {name!r}"
    return text


if __name__ == "__main__":
    started_s = time.monotonic()
    status = main(sys.argv[1:])
    print(f"{time.monotonic() - started_s:.0f} s, {'nothing lost' if status == 0 else 'SOMETHING WAS LOST'}")
    sys.exit(status)
