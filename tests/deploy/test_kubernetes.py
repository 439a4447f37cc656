"""deploy/k8s: by the schemas of Kubernetes, and what it starts fits together. No cluster runs it here."""

from __future__ import annotations

import copy
import importlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvpage.cli import health
from kvpage_server.app import create_app
from support.api_in_process import settings_without_worker
from support.api_service import ApiService
from support.checkout import ROOT
from support.deployment import DEPLOY, documents, faults_between, is_probe, output_of, tool_beside_python
from support.dockerfile import Dockerfile
from support.manifests import K8S, of_kind, patched, pods, programs, resources

DOCKERFILE = Dockerfile.read(ROOT / "Dockerfile")
VARIANTS: list[tuple[str, ...]] = [(), ("gpu",), ("metrics",), ("gpu", "metrics")]
OWN_KINDS = {"PodMonitor"}
"""Of operators: kubernetes-validate has no schema of them."""
VERSION = "1.37"
UID, GID = map(int, DOCKERFILE.last("planner", "USER").text.split(":"))
RUN_DIR = DOCKERFILE.last("planner", "VOLUME").text


def examples() -> list[dict[str, Any]]:
    files = [K8S / "engine-pod.yaml", K8S / "dra/resourceclaim.yaml", K8S / "dra/pods.yaml"]
    return [document for file in files for document in documents(file)]


def all_pods() -> list[dict[str, Any]]:
    return [pod for components in VARIANTS for pod in pods(resources(*components))] + list(pods(examples()))


def validate(resource: dict[str, Any]) -> None:
    """Raises what the library raises for a resource that does not fit its schema."""
    library: Any = importlib.import_module("kubernetes_validate")
    library.validate(resource, VERSION, strict=True)


def own_containers(pod: dict[str, Any]) -> list[dict[str, Any]]:
    return [container for container in pod["containers"] if "args" in container]


@pytest.mark.parametrize("components", VARIANTS, ids=lambda names: "+".join(names) or "base")
def test_what_is_applied_fits_the_schemas(components: tuple[str, ...]) -> None:
    for resource in resources(*components):
        if resource["kind"] not in OWN_KINDS:
            validate(resource)


def test_the_examples_fit_the_schemas() -> None:
    assert {resource["kind"] for resource in examples()} == {"Pod", "ResourceClaim"}
    for resource in examples():
        validate(resource)


def test_the_schemas_find_a_misspelt_probe() -> None:
    wrong = copy.deepcopy(of_kind(resources(), "DaemonSet"))
    container = wrong["spec"]["template"]["spec"]["containers"][0]
    container["readynessProbe"] = container.pop("readinessProbe")
    with pytest.raises(Exception, match="readynessProbe"):
        validate(wrong)


def test_every_file_is_applied_or_an_example() -> None:
    applied = {
        K8S / "kustomization.yaml",
        K8S / "engine-pod.yaml",
        K8S / "dra/resourceclaim.yaml",
        K8S / "dra/pods.yaml",
    }
    for folder in (K8S, K8S / "gpu", K8S / "metrics"):
        [about] = documents(folder / "kustomization.yaml")
        applied |= {folder / "kustomization.yaml"} | {folder / name for name in about.get("resources", [])}
        applied |= {folder / entry["path"] for entry in about.get("patches", [])}
    assert set(K8S.rglob("*.yaml")) == applied


def test_the_yaml_is_clean() -> None:
    yamllint = tool_beside_python("yamllint")
    assert yamllint is not None
    assert output_of(yamllint, "--strict", str(DEPLOY), cwd=ROOT) == (0, "")


def test_the_yaml_check_fires(tmp_path: Path) -> None:
    (tmp_path / "sloppy.yaml").write_text("one: 1\none: 2 \n")
    yamllint = tool_beside_python("yamllint")
    assert yamllint is not None
    status, told = output_of(yamllint, "--strict", "-c", str(ROOT / ".yamllint.yaml"), str(tmp_path))
    assert status == 1
    assert "duplication of key" in told


@pytest.mark.parametrize("components", VARIANTS, ids=lambda names: "+".join(names) or "base")
def test_what_a_node_runs_serves_together(components: tuple[str, ...]) -> None:
    [pod] = pods(resources(*components))
    found = programs(pod, DOCKERFILE)
    assert faults_between(found) == []
    assert {str(settings.run_dir) for _, settings in found} == {RUN_DIR}


def test_the_pair_of_the_claim_serves_together() -> None:
    kvpage, engine = pods(documents(K8S / "dra/pods.yaml"))
    assert faults_between(programs(kvpage, DOCKERFILE)) == []
    [claim] = documents(K8S / "dra/resourceclaim.yaml")
    for pod in (kvpage, engine):
        [reference] = pod["resourceClaims"]
        assert reference["resourceClaimName"] == claim["metadata"]["name"]
        users = [
            one["name"]
            for one in pod["containers"]
            if {"name": reference["name"]} in one["resources"].get("claims", [])
        ]
        assert len(users) == 1


def test_a_pod_whose_api_knows_of_no_gpu_is_found() -> None:
    [pod] = pods(resources("gpu"))
    api = pod["containers"][0]
    wrong = {
        **pod,
        "containers": [{**api, "env": [{"name": "KVPAGE_DEVICES", "value": "host"}]}, *pod["containers"][1:]],
    }
    assert faults_between(programs(wrong, DOCKERFILE))


def test_the_api_is_probed_by_commands_that_there_are_and_workers_are_not() -> None:
    for pod in all_pods():
        for container in own_containers(pod):
            probes = {name: container[name]["exec"]["command"] for name in container if name.endswith("Probe")}
            if container["args"][0] == "worker":
                assert probes == {}
                continue
            assert set(probes) == {"startupProbe", "livenessProbe", "readinessProbe"}
            assert all(is_probe(command) for command in probes.values())
            asked = {name: health.parse(command[2:]) for name, command in probes.items()}
            # Not by readiness: a worker that is away would have the API process restarted, which keeps its pools.
            assert {name for name, one in asked.items() if one and one.live} == {"startupProbe", "livenessProbe"}


def test_probes_ask_paths_that_are_served(run_dir: Path) -> None:
    app = create_app(settings_without_worker(run_dir))
    assert {"/livez", "/readyz"} <= {getattr(route, "path", "") for route in app.routes}


def test_containers_have_no_more_rights_than_they_need() -> None:
    for pod in all_pods():
        context = pod["securityContext"]
        assert (context["runAsUser"], context["runAsGroup"]) == (UID, GID)
        assert context["runAsNonRoot"] is True
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod["automountServiceAccountToken"] is False
        assert pod["enableServiceLinks"] is False
        assert {"hostIPC", "hostPID", "hostNetwork"}.isdisjoint(pod)
        for container in pod["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }, container["name"]
        for container in pod.get("initContainers", []):
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["CHOWN", "FOWNER"]}
            assert container["command"][:8] == ["install", "-d", "-o", str(UID), "-g", str(GID), "-m", "0750"]


def test_every_mount_has_its_volume_and_the_run_directory_is_where_programs_look() -> None:
    for pod in all_pods():
        volumes = {volume["name"] for volume in pod["volumes"]}
        for container in [*pod["containers"], *pod.get("initContainers", [])]:
            mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
            assert set(mounts) <= volumes
            assert mounts["run"] == RUN_DIR
        assert {"hostPath"} == {key for volume in pod["volumes"] if volume["name"] == "run" for key in volume} - {
            "name"
        }


def test_no_update_takes_pools_along_unasked() -> None:
    assert of_kind(resources(), "DaemonSet")["spec"]["updateStrategy"] == {"type": "OnDelete"}


def test_without_tcp_nothing_may_come_in_or_go_out() -> None:
    policy = of_kind(resources(), "NetworkPolicy")["spec"]
    assert set(policy["policyTypes"]) == {"Ingress", "Egress"}
    assert policy["ingress"] == policy["egress"] == []
    [pod] = pods(resources())
    assert not any("ports" in container for container in pod["containers"])


def test_ports_secrets_and_labels_of_the_metrics_agree() -> None:
    found = resources("metrics")
    daemon = of_kind(found, "DaemonSet")
    [pod] = pods(found)
    [api] = [settings for program, settings in programs(pod, DOCKERFILE) if program == "serve"]
    [port] = next(container for container in pod["containers"] if container["name"] == "api")["ports"]
    assert port == {"name": "https", "containerPort": api.port}
    [served] = of_kind(found, "Service")["spec"]["ports"]
    [endpoint] = of_kind(found, "PodMonitor")["spec"]["podMetricsEndpoints"]
    assert served["targetPort"] == endpoint["port"] == port["name"]
    assert endpoint["scheme"] == "https"
    [rule] = of_kind(found, "NetworkPolicy")["spec"]["ingress"]
    assert [one["port"] for one in rule["ports"]] == [api.port]
    labels = daemon["spec"]["template"]["metadata"]["labels"].items()
    selectors = [
        daemon["spec"]["selector"]["matchLabels"], of_kind(found, "Service")["spec"]["selector"],
        of_kind(found, "PodMonitor")["spec"]["selector"]["matchLabels"],
        of_kind(found, "NetworkPolicy")["spec"]["podSelector"]["matchLabels"],
    ]  # fmt: skip
    assert all(selector.items() <= labels for selector in selectors)
    mounts = {mount["name"]: mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]}
    assert api.token_file == Path(mounts["tokens"]) / "tokens"
    assert (api.tls_cert_file, api.tls_key_file) == (Path(mounts["tls"]) / "tls.crt", Path(mounts["tls"]) / "tls.key")
    modes = [volume["secret"]["defaultMode"] for volume in pod["volumes"] if "secret" in volume]
    assert modes == [0o440, 0o440]  # kvpage refuses a token that everybody may read


def test_a_patch_is_merged_by_name() -> None:
    base = {"containers": [{"name": "a", "args": ["1"], "env": [{"name": "x", "value": "1"}]}, {"name": "b"}]}
    patch = {"containers": [{"name": "a", "args": ["2"], "env": [{"name": "y", "value": "2"}]}, {"name": "c"}]}
    assert patched(base, patch) == {
        "containers": [
            {"name": "a", "args": ["2"], "env": [{"name": "x", "value": "1"}, {"name": "y", "value": "2"}]},
            {"name": "b"},
            {"name": "c"},
        ]
    }


READ_ONLY = 'mount --bind "$0" "$0" && mount -o remount,bind,ro "$0" && ! touch "$0/x" 2>/dev/null && exec "$@"'


def test_the_program_of_the_example_engines_attaches_over_a_read_only_mount(mimo: ApiService) -> None:
    engines = [list(pods(documents(K8S / file)))[-1] for file in ("engine-pod.yaml", "dra/pods.yaml")]
    containers = [container for pod in engines for container in pod["containers"]]
    assert containers[0]["command"] == containers[1]["command"]
    interpreter, option, program = containers[0]["command"]
    assert (interpreter, option) == ("python", "-c")
    for container in containers:
        assert container["env"] == [{"name": "KVPAGE_RUN_DIR", "value": RUN_DIR}]
        assert {"name": "run", "mountPath": RUN_DIR, "readOnly": True} in container["volumeMounts"]
    run_dir = str(mimo.run_directory.path)
    apart = ["unshare", "--map-root-user", "--mount", "sh", "-c", READ_ONLY, run_dir]
    trial = subprocess.run([*apart, "true"], capture_output=True, text=True, check=False)
    if trial.returncode != 0:
        pytest.skip(f"this machine permits no read-only mount in a new user namespace: {trial.stderr.strip()}")
    environment = {**os.environ, "KVPAGE_RUN_DIR": run_dir}
    command = [*apart, sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("attached to sha256:")
