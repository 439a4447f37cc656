"""A fleet on a real Ray cluster of three nodes, all on this machine, in a network namespace of its own.

    python -m support.fleet_scenario FOLDER

Prints one JSON object: what was seen at each step. Tests read it. A program of its own, because Ray believes that its
machine has one address, and in a namespace that is the loopback.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"

import ray
from ray.cluster_utils import Cluster

from kvpage.client.fleet_resources import Fleet, Place
from kvpage.client.http import Client
from kvpage.errors import DeviceUnavailable, KvpageError
from kvpage.fleet import messages, ray_cluster
from kvpage.fleet.attach import attach
from kvpage.fleet.coordinator import Coordinator
from kvpage.fleet.manager import FleetManager
from kvpage.fleet.messages import Answer, Message
from kvpage.fleet.ray_cluster import RayTransport
from support.api_service import ApiService
from support.eventually import until

NODES = ("a", "b", "c")
MEMORY = "96MiB"
LAYER = {"kind": "full_attention", "num_kv_heads": 2, "head_size": 64, "dtype": "bfloat16", "block_size": 16}
REQUEST = {
    "strategy": "unify",
    "layers": [LAYER | {"name": "layer.{i}", "count": 12}],
    "ranks": [
        {"layers": {"start": 0, "end": 2}},
        {"layers": {"start": 2, "end": 8}},
        {"layers": {"start": 8, "end": 12}},
    ],
}
SMALL = REQUEST | {"num_blocks": 4}
LARGE = REQUEST | {"num_blocks": 400}  # what is left has room for it on a and c, not on b
PLACES = [Place(node=name, device="host") for name in NODES]
# Of who is killed, at once; of who is slow on a busy machine, not at all.
QUICK_DEATHS = {
    "health_check_initial_delay_ms": 1000, "health_check_period_ms": 1000,
    "health_check_timeout_ms": 30_000, "health_check_failure_threshold": 4,
}  # fmt: skip


class Machines:
    """Three Ray nodes, each with a run directory."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        # Ray also notes there which cluster runs, and does not make the folder it would note it in.
        os.environ["RAY_TMPDIR"] = str(folder)
        self._cluster = Cluster(
            initialize_head=True,
            head_node_args={
                "include_dashboard": False,
                "temp_dir": str(folder / "ray"),
                "_system_config": QUICK_DEATHS,
                **self._node("a"),
            },
        )
        self._nodes: dict[str, Any] = {"a": self._cluster.head_node}
        for name in NODES[1:]:
            self.add(name)

    def _node(self, name: str) -> dict[str, Any]:
        own = {"KVPAGE_RUN_DIR": str(self.run_dir(name))}
        return {"num_cpus": 1, "object_store_memory": 80 << 20, "labels": {"kvpage-node": name}, "env_vars": own}

    @property
    def address(self) -> str:
        return str(self._cluster.address)

    def run_dir(self, name: str) -> Path:
        return self.folder / name

    def add(self, name: str) -> None:
        self._nodes[name] = self._cluster.add_node(wait=False, **self._node(name))

    def kill(self, name: str) -> None:
        """The raylet, its workers with the allocator, the service and its device worker, all by SIGKILL."""
        pids = processes_with(f"KVPAGE_RUN_DIR={self.run_dir(name)}")
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        self._cluster.remove_node(self._nodes.pop(name), allow_graceful=False)
        until(lambda: not processes_with(f"KVPAGE_RUN_DIR={self.run_dir(name)}"))

    def close(self) -> None:
        for name in reversed(NODES):
            self._cluster.remove_node(self._nodes[name], allow_graceful=False)


def processes_with(variable: str) -> list[int]:
    """Processes that were started with this variable."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if (
                variable.encode() in (process / "environ").read_bytes().split(b"\0")
                and int(process.name) != os.getpid()
            ):
                found.append(int(process.name))
        except OSError:  # it has ended, or is another user's
            continue
    return found


class Interposed:
    """The transport, with something that happens before a message is sent."""

    def __init__(self, transport: RayTransport, before: Any) -> None:
        self._transport = transport
        self._before = before

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def ask(self, questions: Mapping[str, Message], *, timeout_s: float) -> dict[str, Answer | KvpageError]:
        self._before(self._transport, questions)
        return self._transport.ask(questions, timeout_s=timeout_s)


class CoordinatorDiedError(Exception):
    pass


class Scenario:
    def __init__(self, folder: Path) -> None:
        self.facts: dict[str, Any] = {}
        self.machines = Machines(folder)
        ray_cluster.connect(self.machines.address)
        self.transport = RayTransport()
        self.manager = FleetManager(self.transport, new_id=ray_cluster.new_id)

    def command(self, *arguments: str) -> Any:
        """`kvpage fleet …` as a person types it; its status and its JSON."""
        command = [sys.executable, "-c", "from kvpage.cli import main; main()", "fleet", *arguments]
        done = subprocess.run(
            [*command, "--address", self.machines.address, "--json"], capture_output=True, text=True, check=False
        )
        lines = (done.stdout.strip() or done.stderr.strip()).splitlines()
        return {"status": done.returncode, "said": json.loads(lines[-1]) if lines else None}

    def pools(self) -> dict[str, dict[str, str]]:
        """By node: id and epoch of each pool in its run directory."""
        found = {}
        for name in NODES:
            with self.client(name) as client:
                found[name] = {pool.name: f"{pool.id} {pool.epoch}" for pool in client.pools()}
        return found

    def client(self, node: str) -> Client:
        return Client(run_dir=str(self.machines.run_dir(node)))

    def kept(self) -> dict[str, Any]:
        """What is reserved on each node, and the records there."""
        found: dict[str, Any] = {}
        for name in NODES:
            with self.client(name) as client:
                [device] = client.devices()
            records = sorted(path.name for path in self.machines.run_dir(name).glob("fleet-*"))
            found[name] = [device.reserved_bytes, device.num_pools, records]
        return found

    @contextmanager
    def step(self, name: str) -> Iterator[dict[str, Any]]:
        began_s = time.monotonic()
        facts: dict[str, Any] = {}
        yield facts
        self.facts[name] = facts
        print(f"{name}: {time.monotonic() - began_s:.1f} s", file=sys.stderr, flush=True)

    # --- the steps ---------------------------------------------------------------------------------------------------

    def run(self) -> None:
        self.start()
        self.plan()
        self.refuse_attaching()
        self.abort()
        self.serve()
        engine = self.engine("a", 0)
        engine.buffer.fill_(7)
        self.replace_allocator()
        self.lose_and_mend()
        with self.step("bytes") as facts:
            facts["still 7"] = bool((engine.buffer == 7).all())
            facts["detached"] = engine.detached
            again = self.engine("c", 2)
            facts["on the node that returned"] = [again.plan.num_blocks, int(again.buffer.max())]
            again.close()
        self.end(engine)

    def engine(self, node: str, rank: int, **environ: str) -> Any:
        """As a process of that rank attaches, on that machine."""
        env = {"RANK": str(rank), "WORLD_SIZE": "3", "LOCAL_RANK": "0"} | environ
        return attach("mimo", run_dir=str(self.machines.run_dir(node)), environ=env)

    def start(self) -> None:
        with self.step("up") as facts:
            facts["command"] = self.command("up", "--memory", MEMORY)
            logs = [path.read_text()[-2000:] for path in self.machines.folder.glob("*/serve.log")]
            assert facts["command"]["status"] == 0, (facts, logs)

    def plan(self) -> None:
        file = self.machines.folder / "request.json"
        file.write_text(json.dumps(REQUEST))
        with self.step("plan") as facts:
            facts["command"] = self.command("plan", str(file), "--name", "mimo")
            facts["again"] = self.manager.plan(REQUEST | {"strategy": "unify"}, "mimo").id
            facts["pools"] = self.pools()
            facts["other request"] = self.refused(lambda: self.manager.plan(SMALL, "mimo"))

    def refuse_attaching(self) -> None:
        with self.step("attach") as facts:
            facts["two ranks"] = self.refused(lambda: self.engine("a", 0, WORLD_SIZE="2"))
            facts["another node's rank"] = self.refused(lambda: self.engine("a", 2))
            with attach("mimo", run_dir=str(self.machines.run_dir("b")), environ={"LOCAL_RANK": "0"}) as engine:
                facts["by local rank"] = list(engine.plan.layers)

    def abort(self) -> None:
        with self.step("abort") as facts:
            facts["before"] = self.kept()
            facts["not enough memory"] = self.refused(lambda: self.manager.plan(LARGE, "large", PLACES))
            facts["after phase 1"] = self.kept()
            facts["commit refused"] = self.refused(lambda: self.coordinator(undo_first).create(SMALL, "small", PLACES))
            facts["after phase 2"] = self.kept()
            try:
                self.coordinator(die_at_commit).create(SMALL, "small", PLACES)
            except CoordinatorDiedError:
                facts["coordinator died"] = [plan.state for plan in self.manager.status().plans if plan.name == "small"]
            heir = Coordinator(self.transport, new_id=ray_cluster.new_id, reservation_ttl_s=0)
            facts["mended by its heir"] = heir.mend()
            facts["after its death"] = self.kept()

    def serve(self) -> None:
        """A head on this machine, with no worker of its own."""
        with self.step("head") as facts:
            asked = ("--external-workers", "--fleet", self.machines.address)
            with ApiService(self.machines.run_dir("h"), *asked, wait_ready=False) as head, head.client() as client:
                facts["nodes"] = until(lambda: nodes_seen_by(client))
                facts["plan"] = client.create_fleet_plan(SMALL, name="by-http", places=PLACES).state
                facts["plans"] = sorted(plan.name for plan in client.fleet().plans)
                facts["left"] = client.delete_fleet_plan("by-http")
                facts["status"] = head.terminate()

    def coordinator(self, before: Any) -> Coordinator:
        return Coordinator(Interposed(self.transport, before), new_id=ray_cluster.new_id)

    def replace_allocator(self) -> None:
        """The actor's process on a is killed; Ray starts another, which finds the same pools."""
        with self.step("allocator") as facts:
            before = self.pools()
            ray_id = ray_cluster.living_nodes()["a"]
            actor = ray.get_actor(f"allocator-{ray_id}", namespace="kvpage")
            ray.kill(actor, no_restart=False)
            until(lambda: self.manager.plan_status("mimo").state == "degraded", 30)
            until(lambda: self.manager.plan_status("mimo").state == "ready", 60)
            facts["same pools"] = self.pools() == before

    def lose_and_mend(self) -> None:
        with self.step("lost") as facts:
            before = self.pools()
            self.manager.mend()  # the state that events are told against
            self.machines.kill("c")
            until(lambda: {node.name: node.state for node in self.manager.mend().nodes}["c"] == "lost", 60)
            facts["command"] = self.command("status")
            facts["healthy"] = self.healthy() == {n: before[n] for n in "ab"}
        with self.step("mended") as facts:
            self.machines.add("c")
            fleet = until(self.mended, 90)
            after = self.pools()
            facts["healthy untouched"] = {n: after[n] for n in "ab"} == {n: before[n] for n in "ab"}
            facts["c made again"] = [list(after["c"]) == list(before["c"]), after["c"] != before["c"]]
            facts["events"] = [[event.kind, event.subject, event.before, event.after] for event in fleet.events]

    def mended(self) -> Fleet | None:
        fleet = self.manager.mend()
        return fleet if fleet.plans[0].state == "ready" else None

    def healthy(self) -> dict[str, dict[str, str]]:
        found = {}
        for name in "ab":
            with self.client(name) as client:
                found[name] = {pool.name: f"{pool.id} {pool.epoch}" for pool in client.pools()}
        return found

    def end(self, engine: Any) -> None:
        with self.step("down") as facts:
            facts["held"] = self.command("down", "mimo")
            engine.close()
            facts["plan"] = self.command("down", "mimo")
            facts["kept"] = self.kept()
            facts["fleet"] = self.command("down")
            left = [path.name for name in NODES for path in self.machines.run_dir(name).iterdir()]
            facts["sockets"] = [name for name in left if name.endswith(".sock")]
        ray_cluster.disconnect()
        self.machines.close()

    def refused(self, attempt: Any) -> list[str]:
        try:
            attempt()
        except KvpageError as error:
            return [error.code, error.message]
        return []


def nodes_seen_by(client: Client) -> list[str] | None:
    """None until it serves, and has joined the cluster."""
    try:
        return [f"{node.name} {node.state}" for node in client.fleet().nodes]
    except DeviceUnavailable:
        return None


def undo_first(transport: RayTransport, questions: Mapping[str, Message]) -> None:
    """Before a node is told to commit, another coordinator has undone what is reserved there."""
    for node, message in questions.items():
        if isinstance(message, messages.Commit):
            transport.ask({node: messages.Abort(id=message.id)}, timeout_s=60)


def die_at_commit(_: RayTransport, questions: Mapping[str, Message]) -> None:
    if any(isinstance(message, messages.Commit) for message in questions.values()):
        raise CoordinatorDiedError


def main() -> None:
    scenario = Scenario(Path(sys.argv[1]))
    scenario.run()
    print("\n" + json.dumps(scenario.facts))  # on a line of its own: Ray prints as well


if __name__ == "__main__":
    main()
