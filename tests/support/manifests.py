"""The Kubernetes manifests in deploy/k8s, with components applied as kustomize applies their patches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from support.deployment import DEPLOY, Started, documents, started
from support.dockerfile import Dockerfile

K8S = DEPLOY / "k8s"
KEYS = {
    "containers": "name", "initContainers": "name", "volumes": "name", "env": "name", "volumeMounts": "mountPath",
    "ports": "containerPort", "tolerations": "key",
}  # fmt: skip
"""By which entries of a list are the same: Kubernetes' strategic merge."""


def patched(base: Any, patch: Any, field: str = "") -> Any:
    if isinstance(base, dict) and isinstance(patch, dict):
        return {**base, **{key: patched(base.get(key), value, key) for key, value in patch.items()}}
    if (
        isinstance(base, list)
        and isinstance(patch, list)
        and field in KEYS
        and all(KEYS[field] in one for one in patch)
    ):
        key = KEYS[field]
        entries = {one[key]: one for one in base}
        for one in patch:
            entries[one[key]] = patched(entries.get(one[key]), one)
        return list(entries.values())
    return patch


def resources(*components: str) -> list[dict[str, Any]]:
    """All that `kubectl apply -k` would send. Raises AssertionError for a patch of nothing."""
    found = [document for name in _kustomization(K8S)["resources"] for document in documents(K8S / name)]
    for component in components:
        folder = K8S / component
        about = _kustomization(folder)
        found += [document for name in about.get("resources", []) for document in documents(folder / name)]
        for patch in [one for entry in about["patches"] for one in documents(folder / entry["path"])]:
            places = [place for place, one in enumerate(found) if _identity(one) == _identity(patch)]
            assert len(places) == 1, f"{component} patches {_identity(patch)}, of which there are {len(places)}"
            found[places[0]] = patched(found[places[0]], patch)
    return found


def _kustomization(folder: Path) -> dict[str, Any]:
    [found] = documents(folder / "kustomization.yaml")
    return found


def _identity(resource: Mapping[str, Any]) -> tuple[str, str, str]:
    return resource["apiVersion"], resource["kind"], resource["metadata"]["name"]


def of_kind(found: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    """The only one."""
    [resource] = [one for one in found if one["kind"] == kind]
    return resource


def pods(found: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """What describes pods, whatever makes them."""
    for resource in found:
        if resource["kind"] == "Pod":
            yield resource["spec"]
        elif resource["kind"] == "DaemonSet":
            yield resource["spec"]["template"]["spec"]


def programs(pod: Mapping[str, Any], dockerfile: Dockerfile) -> list[Started]:
    """What the containers run that are kvpage's own image with its entry point."""
    own = {name: value for name, value in dockerfile.environment("planner").items() if name.startswith("KVPAGE_")}
    return [
        started(container["args"], own | _variables(container))
        for container in pod["containers"]
        if "args" in container and "command" not in container
    ]


def _variables(container: Mapping[str, Any]) -> dict[str, str]:
    every = {one["name"]: one["value"] for one in container.get("env", [])}
    return {name: value for name, value in every.items() if name.startswith("KVPAGE_")}
