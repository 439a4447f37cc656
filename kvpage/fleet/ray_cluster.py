"""Allocators as Ray actors, and messages to them. The only module that imports Ray.

Ray carries messages, knows which nodes live, and starts an allocator again when its process dies. No tensor crosses it.
An allocator is in no placement group: one in a group dies with the group.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nobody's cluster is reported to anybody

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from kvpage.errors import Conflict, DeviceUnavailable, KvpageError, shorten
from kvpage.fleet import messages
from kvpage.fleet.messages import Answer, Message
from kvpage.fleet.node_actor import NodeActor
from kvpage.fleet.records import ServiceOptions

NAMESPACE = "kvpage"
NODE_LABEL = "kvpage-node"
"""Of a Ray node: the name by which the machine is known when it returns (`ray start --labels kvpage-node=a7`)."""
THREADS = 4  # of an allocator: a look while memory is committed
CONNECT_TIMEOUT_S = 5.0
END_TIMEOUT_S = 120.0
BUNDLE = {"CPU": 0.001}  # as little of a node as Ray can reserve


def connect(address: str) -> None:
    """Join the cluster, once in a process. Raises `DeviceUnavailable`."""
    if ray.is_initialized():
        return
    _check_reachable(address)
    try:
        ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, configure_logging=False)
    except (RayError, ConnectionError, RuntimeError, ValueError) as error:
        raise DeviceUnavailable(
            f"no Ray cluster at {shorten(address)}: {shorten(str(error))}; start one with `ray start --head`"
        ) from error


def _check_reachable(address: str) -> None:
    """Ray itself goes on trying for minutes. Raises `DeviceUnavailable`."""
    if address == "auto":
        address = os.environ.get("RAY_ADDRESS") or _started_here()
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdigit() or "/" in address:
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT_S).close()
    except (OSError, OverflowError) as error:
        raise DeviceUnavailable(
            f"no Ray cluster at {shorten(address)}: {error}; start one with `ray start --head`, or name another"
        ) from error


def _started_here() -> str:
    """The cluster that `ray start` noted on this machine, which may have ended since; empty without one."""
    folder = os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()
    try:
        return (Path(folder) / "ray" / "ray_current_cluster").read_text().strip()
    except OSError:
        return ""


def disconnect() -> None:
    ray.shutdown()


def new_id() -> str:
    return f"fleet-{secrets.token_hex(8)}"


class RayTransport:
    """A `Transport` over the cluster this process is connected to."""

    def nodes(self) -> tuple[str, ...]:
        return tuple(sorted(_served()))

    def bare(self) -> tuple[str, ...]:
        return tuple(sorted(living_nodes().keys() - _served().keys()))

    def start(self, nodes: Iterable[str], options: ServiceOptions) -> None:
        ray_ids = living_nodes()
        for name in nodes:
            if name in ray_ids:
                _start(name, ray_ids[name], options)

    def ask(self, questions: Mapping[str, Message], *, timeout_s: float) -> dict[str, Answer | KvpageError]:
        deadline_s = time.monotonic() + timeout_s
        ray_ids = living_nodes()
        encoded: dict[int, bytes] = {}  # the same message to many is encoded once
        calls: dict[str, Any] = {}
        for name, message in questions.items():
            actor = _allocator(ray_ids[name]) if name in ray_ids else None
            if actor is not None:
                data = encoded.get(id(message)) or encoded.setdefault(id(message), messages.encode(message))
                calls[name] = actor.handle.remote(data)
        return {name: _answer(name, calls.get(name), deadline_s) for name in questions}

    @contextlib.contextmanager
    def admitted(self, nodes: Iterable[str], *, timeout_s: float) -> Iterator[None]:
        ray_ids = living_nodes()
        missing = [name for name in nodes if name not in ray_ids]
        if missing:
            raise DeviceUnavailable(f"node {missing[0]} has left the cluster", details={"nodes": missing})
        selectors = [{"ray.io/node-id": ray_ids[name]} for name in nodes]
        group = placement_group([BUNDLE] * len(selectors), strategy="SPREAD", bundle_label_selector=selectors)
        try:
            if not group.wait(timeout_s):
                raise DeviceUnavailable(
                    f"Ray did not admit work to {len(selectors)} nodes at once within {timeout_s:g} s; is one of them "
                    f"busy with all its CPUs, or gone?"
                )
            yield
        finally:
            remove_placement_group(group)

    def end(self, nodes: Iterable[str]) -> dict[str, KvpageError]:
        ray_ids = living_nodes()
        actors = {name: actor for name in nodes if name in ray_ids and (actor := _allocator(ray_ids[name])) is not None}
        deadline_s = time.monotonic() + END_TIMEOUT_S
        calls = {name: actor.end.remote(messages.encode(messages.Stop())) for name, actor in actors.items()}
        answers = {name: _answer(name, call, deadline_s) for name, call in calls.items()}
        for actor in actors.values():
            ray.kill(actor)
        faults = {name: answer for name, answer in answers.items() if not isinstance(answer, messages.Done)}
        return {name: _error(name, answer) for name, answer in faults.items()}


def _start(name: str, ray_id: str, options: ServiceOptions) -> None:
    remote = ray.remote(NodeActor).options(
        name=_actor_name(ray_id),
        namespace=NAMESPACE,
        lifetime="detached",
        get_if_exists=True,
        num_cpus=0,
        max_restarts=-1,
        max_concurrency=THREADS,
        scheduling_strategy=NodeAffinitySchedulingStrategy(ray_id, soft=False),
    )
    remote.remote(name, options.devices, options.memory, options.run_dir, options.is_external)


def living_nodes() -> dict[str, str]:
    """Name → Ray's id of it, which is another after each return. Raises `Conflict` for two of one name."""
    found: dict[str, str] = {}
    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    for node in nodes:
        if not node["Alive"]:
            continue
        name = node.get("Labels", {}).get(NODE_LABEL) or node["NodeManagerHostname"]
        if name in found:
            raise Conflict(
                f"two nodes of the Ray cluster are called {shorten(name)}; give each a name of its own with "
                f"`ray start --labels {NODE_LABEL}=NAME`",
                details={"node": name},
            )
        found[name] = node["NodeID"]
    return found


def _served() -> dict[str, str]:
    actors = set(ray.util.list_named_actors())
    return {name: ray_id for name, ray_id in living_nodes().items() if _actor_name(ray_id) in actors}


def _actor_name(ray_id: str) -> str:
    return f"allocator-{ray_id}"


def _allocator(ray_id: str) -> Any:
    try:
        return ray.get_actor(_actor_name(ray_id), namespace=NAMESPACE)
    except ValueError:  # there is none
        return None


def _answer(name: str, call: Any, deadline_s: float) -> Answer | KvpageError:
    if call is None:
        return DeviceUnavailable(f"node {name} has no allocator; `kvpage fleet up` starts one", details={"node": name})
    try:
        return messages.decode_answer(ray.get(call, timeout=max(0.0, deadline_s - time.monotonic())))
    except GetTimeoutError:
        return DeviceUnavailable(f"node {name} did not answer in time", details={"node": name})
    except RayError as error:
        text = str(error).strip().split("\n")[0]
        return DeviceUnavailable(f"node {name} does not answer: {shorten(text)}", details={"node": name})
    except KvpageError as error:
        return error


def _error(name: str, answer: Answer | KvpageError) -> KvpageError:
    match answer:
        case KvpageError():
            return answer
        case messages.Failed():
            return answer.error
    return DeviceUnavailable(f"node {name} answered with {type(answer).__name__}")
