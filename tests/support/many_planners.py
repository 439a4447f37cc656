"""Very many who plan at once, each something else: all get their plan, and others are answered meanwhile."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import kvpage
from support import planner_program
from support.api_service import ApiService
from support.attacked_service import Bystander, Remains, attacked_service, conclude, losing
from support.plan_requests import small_request
from support.tally import Tally
from support.worker_process import readable

NUM_PROCESSES = 4
_USUAL: Mapping[str, float] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class Planning:
    tally: Tally
    at_once_s: float
    """From the moment all may begin to the last plan."""
    in_turn_s: float
    """For as many other plans, asked for by one client, one after the other."""


def many_planners(num: int, limits: Mapping[str, float] = _USUAL) -> Planning:
    """Half of them over TCP, half over the Unix socket, from several processes."""
    tally = Tally()
    with attacked_service(limits) as service, tempfile.TemporaryDirectory() as folder:
        in_turn_s = _plan_in_turn(service, num)
        remains, bystander = Remains(service), Bystander(service)
        asked = [_asked(number) for number in range(num)]
        with contextlib.ExitStack() as stack:
            shares = [asked[start::NUM_PROCESSES] for start in range(NUM_PROCESSES)]
            children = [
                stack.enter_context(_child(service, Path(folder) / f"{number}.json", share, is_tcp=bool(number % 2)))
                for number, share in enumerate(shares)
            ]
            began_s = time.monotonic()
            for child in children:
                _begin(child)
            while any(child.poll() is None for child in children) and not tally.losses:
                with losing(tally, "somebody else"):
                    bystander.ask()
            at_once_s = time.monotonic() - began_s
            for child, share in zip(children, shares, strict=True):
                _count(child, len(share), tally)
        conclude(tally, remains, bystander)
    tally.outcomes["requests of others answered meanwhile"] = bystander.num_answers
    return Planning(tally=tally, at_once_s=at_once_s, in_turn_s=in_turn_s)


def _request(number: int) -> dict[str, Any]:
    return small_request(memory_bytes=None, num_blocks=1000 + number)


def _asked(number: int) -> tuple[str, str]:
    return json.dumps(_request(number)), kvpage.plan(_request(number)).plan_id


def _plan_in_turn(service: ApiService, num: int) -> float:
    bodies = [_request(number + num) for number in range(num)]
    with service.client() as client:
        began_s = time.monotonic()
        for body in bodies:
            client.plan(body)
        return time.monotonic() - began_s


@contextlib.contextmanager
def _child(
    service: ApiService, file: Path, asked: list[tuple[str, str]], *, is_tcp: bool
) -> Iterator[subprocess.Popen[str]]:
    host = service.url.removeprefix("http://")
    name, port = host.split(":")
    place = {"address": [name, int(port)]} if is_tcp else {"socket": str(service.run_directory.api_socket)}
    file.write_text(json.dumps({"host": host, "asked": asked, **place}))
    child = subprocess.Popen(
        [sys.executable, planner_program.__file__, str(file)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert child.stdout is not None
        assert readable(child.stdout.fileno())
        assert child.stdout.readline() == "ready\n"
        yield child
    finally:
        child.kill()
        child.communicate()


def _begin(child: subprocess.Popen[str]) -> None:
    assert child.stdin is not None
    child.stdin.write("\n")
    child.stdin.flush()


def _count(child: subprocess.Popen[str], num: int, tally: Tally) -> None:
    assert child.stdout is not None
    child.wait(60)
    said = json.loads(child.stdout.read())
    for loss in said["losses"]:
        tally.lose(loss)
    tally.survive("planned", num - len(said["losses"]))
    tally.outcomes.update({f"refused meanwhile ({code})": count for code, count in said["outcomes"].items()})
