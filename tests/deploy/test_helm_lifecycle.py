"""helm install, upgrade, rollback and uninstall, against a stand-in for the Kubernetes API."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.helm import CHART, NAMESPACE, RELEASE, Helm, HelmError, Object
from tests.deploy.kube_stub import KubeStub, merge
from tests.deploy.matrix import KEYS, MONITORING

pytestmark = pytest.mark.k8s

FIRST: dict[str, Any] = {**MONITORING, **KEYS, "modelCache": {"type": "pvc"}}
SECOND: dict[str, Any] = {
    **FIRST,
    "vtoken": {"thetaF": 0.5, "keepRatio": 0.25},
    "vllm": {"maxNumSeqs": 4, "extraArgs": ["--seed=7"]},
    "podDisruptionBudget": {"enabled": True},
    "podMonitor": {"enabled": False},
    "extraEnv": [{"name": "A", "value": "B"}],
    "image": {"tag": "next"},
}


@dataclass(frozen=True)
class Cluster:
    """The stub with a kubeconfig for helm."""

    stub: KubeStub
    helm: Helm
    kubeconfig: Path

    def run(self, command: str, *arguments: str, values: dict[str, Any] | None = None) -> str:
        """One helm command on the stub."""
        flags = ["--kubeconfig", str(self.kubeconfig), "--namespace", NAMESPACE]
        if values is not None:
            flags += [str(CHART), "--values", "-", "--disable-openapi-validation"]
        return self.helm.run(command, RELEASE, *flags, *arguments, stdin=json.dumps(values))

    def state(self) -> dict[tuple[str, str], Object]:
        """Live objects by kind and name, without what the API adds."""
        return {(o["kind"], o["metadata"]["name"]): cleaned(o) for o in self.stub.live()}

    def rendered(self, values: dict[str, Any]) -> dict[tuple[str, str], Object]:
        """What the state should be."""
        objects = self.helm.template(values)
        hooks = [o for o in objects if "helm.sh/hook" in o["metadata"].get("annotations", {})]
        return {(o["kind"], o["metadata"]["name"]): cleaned(o) for o in objects if o not in hooks}


def cleaned(document: Object) -> Object:
    """The object without server-side metadata and helm's ownership marks."""
    document = json.loads(json.dumps(document))
    metadata = document["metadata"]
    for name in ("uid", "resourceVersion", "managedFields"):
        metadata.pop(name, None)
    notes = metadata.get("annotations") or {}
    own = {k: v for k, v in notes.items() if not k.startswith("meta.helm.sh/")}
    metadata.pop("annotations", None)
    return {**document, "metadata": {**metadata, **({"annotations": own} if own else {})}}


@pytest.fixture
def cluster(helm: Helm, tmp_path: Path) -> Iterator[Cluster]:
    with KubeStub().serving() as stub:
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "stub",
            "clusters": [{"name": "stub", "cluster": {"server": stub.url}}],
            "users": [{"name": "stub", "user": {"token": "none"}}],
            "contexts": [{"name": "stub", "context": {"cluster": "stub", "user": "stub"}}],
        }
        path = tmp_path / "kubeconfig"
        path.write_text(yaml.safe_dump(config))
        path.chmod(0o600)
        yield Cluster(stub, helm, path)


def test_install_upgrade_rollback_uninstall(cluster: Cluster) -> None:
    """Each step leaves exactly the rendered objects; only a kept claim outlives the release."""
    assert "vtoken-serve 0.1.0: the embedded" in cluster.run("install", values=FIRST)
    assert cluster.state() == cluster.rendered(FIRST)

    cluster.run("upgrade", values=SECOND)
    second = cluster.rendered(SECOND)
    assert cluster.state() == second != cluster.rendered(FIRST)

    cluster.run("rollback", "1")
    assert cluster.state() == cluster.rendered(FIRST)

    cluster.run("uninstall")
    assert list(cluster.state()) == [("PersistentVolumeClaim", "demo-vtoken-serve-cache")]
    cluster.run("install", values=FIRST)
    assert cluster.state() == cluster.rendered(FIRST)


def test_values_can_change_without_touching_immutable_fields(cluster: Cluster) -> None:
    """Labels, names of settings and images change; selectors and claims do not."""
    values = {"modelCache": {"type": "perReplica"}, "replicas": 2}
    cluster.run("install", values=values)
    changed = {**values, "commonLabels": {"team": "b"}, "replicas": 3, "image": {"tag": "next"}}
    cluster.run("upgrade", values=changed)
    assert cluster.state() == cluster.rendered(changed)


def test_refused_upgrade_changes_nothing(cluster: Cluster) -> None:
    """A value that is refused leaves the release as it was."""
    cluster.run("install", values=FIRST)
    before = cluster.state()
    with pytest.raises(HelmError, match="terminationGracePeriodSeconds"):
        cluster.run("upgrade", values={**FIRST, "terminationGracePeriodSeconds": 1})
    assert cluster.state() == before


def test_stub_refuses_immutable_changes(cluster: Cluster) -> None:
    """The stand-in is not too kind: another name changes the selector, which the API refuses."""
    cluster.run("install", values={"fullnameOverride": "fixed"})
    renamed = {"fullnameOverride": "fixed", "nameOverride": "other"}
    with pytest.raises(HelmError, match="field is immutable"):
        cluster.run("upgrade", values=renamed)


def test_strategic_patch_merges_by_key() -> None:
    """Items are matched, deleted and ordered as a strategic merge patch says."""
    old = {"c": [{"name": "a", "x": 1, "y": [1]}, {"name": "b"}], "d": 1}
    patch = {
        "$setElementOrder/c": [{"name": "new"}, {"name": "a"}],
        "c": [{"name": "a", "y": [2]}, {"$patch": "delete", "name": "b"}, {"name": "new"}],
        "d": None,
    }
    assert merge(old, patch) == {"c": [{"name": "new"}, {"name": "a", "x": 1, "y": [2]}]}
