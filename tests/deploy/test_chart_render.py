"""The chart renders with helm 3 and 4, to objects that every supported Kubernetes accepts."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from deploy.grafana import build
from tests.deploy import schemas, tools
from tests.deploy.conftest import obtain
from tests.deploy.golden import FOLDER, golden_text
from tests.deploy.helm import CHART, PRESETS, Helm, Object, container, find, kinds
from tests.deploy.matrix import GPU, KEYS, MATRIX

pytestmark = pytest.mark.k8s

KUBERNETES = tuple(f"1.{minor}" for minor in range(28, 35))


@pytest.fixture(scope="session")
def validate() -> Callable[[Object, str], None]:
    """Checks an object strictly against one Kubernetes version."""
    package = obtain(tools.kubernetes_validate)
    return lambda document, version: schemas.validate(document, package, version)


@pytest.mark.parametrize("name", MATRIX)
def test_values_pass_strict_lint(helm: Helm, name: str) -> None:
    """`helm lint --strict` finds nothing."""
    helm.lint(MATRIX[name])


@pytest.mark.parametrize("name", MATRIX)
def test_objects_are_valid_in_every_kubernetes(helm: Helm, name: str, validate) -> None:
    """Each object passes the strict schemas of 1.28 to 1.34, or its CRD's."""
    objects = helm.template(MATRIX[name])
    for version in KUBERNETES:
        for document in objects:
            validate(document, version)


@pytest.mark.parametrize("preset", PRESETS)
def test_preset_is_valid_and_as_recorded(helm: Helm, preset: str, validate) -> None:
    """A preset renders to its golden file, with both versions of helm."""
    helm.lint({}, [preset])
    for document in helm.template({}, [preset]):
        validate(document, KUBERNETES[0])
    recorded = (FOLDER / preset).read_text(encoding="utf-8")
    assert golden_text(helm, preset) == recorded, "run: python -m tests.deploy.golden"


def test_validation_refuses_unknown_fields(helm4: Helm, validate) -> None:
    """The check above is strict, for built-in and custom resources."""
    service = find(helm4.template(), "Service")
    service["spec"]["sessionAfinity"] = "None"
    rule = find(helm4.template(MATRIX["monitoring"]), "PrometheusRule")
    rule["spec"]["groups"][0]["rules"][0]["expression"] = "up"
    for document in (service, rule):
        with pytest.raises(Exception, match="Additional properties are not allowed"):
            validate(document, "1.34")


def test_matrix_renders_every_template(helm4: Helm) -> None:
    """No template is left out of the tests above."""
    command = ("template", "demo", str(CHART), "--values", "-")
    texts = [helm4.run(*command, stdin=json.dumps(values)) for values in MATRIX.values()]
    for template in (CHART / "templates").rglob("*.yaml"):
        source = f"# Source: vtoken-serve/{template.relative_to(CHART)}"
        assert any(source in text for text in texts), template


def test_every_object_has_the_release_namespace_and_labels(helm4: Helm) -> None:
    """Nothing lands in the default namespace or without the standard labels."""
    for document in helm4.template({**MATRIX["network"], **MATRIX["monitoring"], **KEYS}):
        metadata = document["metadata"]
        assert metadata["namespace"] == "llm"
        if not metadata["name"].endswith("-test"):
            assert metadata["labels"]["app.kubernetes.io/instance"] == "demo"


def test_grace_period_is_the_sum_and_follows(helm4: Helm) -> None:
    """terminationGracePeriodSeconds = preStop + drain + margin, and the program gets the drain."""
    values = {"shutdown": {"preStopSeconds": 7}, "server": {"drainSeconds": 300}}
    objects = helm4.template(values)
    pod = find(objects, "Deployment")["spec"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] == 7 + 300 + 15
    assert find(objects, "ConfigMap", "vtoken-serve")["data"]["VTOKEN_DRAIN_SECONDS"] == "300"
    assert pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"] == ["sleep", "7"]


def test_gpus_are_added_without_mixing_limits_and_requests(helm4: Helm) -> None:
    """The user's limits and requests stay apart; vLLM splits the model over all GPUs."""
    resources = {"requests": {"cpu": "2"}, "limits": {"memory": "9Gi"}}
    server = container(helm4.template({**GPU, "resources": resources}))
    assert server["resources"] == {
        "requests": {"cpu": "2", "nvidia.com/gpu": 2},
        "limits": {"memory": "9Gi", "nvidia.com/gpu": 2},
    }
    assert "--tensor-parallel-size=2" in server["args"]
    assert server["image"] == "vtoken-serve:0.1.0-gpu"


def test_pod_replacement_frees_the_gpu_first_by_default(helm4: Helm) -> None:
    """Recreate, unless asked otherwise."""
    assert find(helm4.template(GPU), "Deployment")["spec"]["strategy"] == {"type": "Recreate"}
    rolling = find(helm4.template(MATRIX["rolling"]), "Deployment")["spec"]["strategy"]
    assert rolling["rollingUpdate"] == {"maxSurge": "25%", "maxUnavailable": 1}


def test_claim_per_replica_makes_a_stateful_set(helm4: Helm) -> None:
    """Where each pod wants its own cache, a StatefulSet with a headless Service is rendered."""
    objects = helm4.template(MATRIX["per-replica"])
    assert "Deployment" not in kinds(objects)
    workload = find(objects, "StatefulSet")
    assert (
        workload["spec"]["serviceName"] == find(objects, "Service", "headless")["metadata"]["name"]
    )
    assert workload["spec"]["volumeClaimTemplates"][0]["metadata"]["name"] == "cache"


def test_pod_runs_without_privileges_and_with_a_read_only_root(helm4: Helm) -> None:
    """Restricted pod security; everything that is written to is a volume."""
    objects = helm4.template()
    pod = find(objects, "Deployment")["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["enableServiceLinks"] is False
    assert pod["automountServiceAccountToken"] is False
    server = container(objects)
    assert server["securityContext"]["readOnlyRootFilesystem"] is True
    writable = {mount["mountPath"] for mount in server["volumeMounts"]}
    assert writable == {"/cache", "/home/vtoken", "/tmp", "/dev/shm"}


def test_openshift_may_choose_the_user(helm4: Helm) -> None:
    """Setting runAsUser to null leaves it to the platform."""
    pod = find(helm4.template(MATRIX["openshift"]), "Deployment")["spec"]["template"]["spec"]
    assert "runAsUser" not in pod["securityContext"]


def test_probes_wait_for_loading_and_do_not_kill(helm4: Helm) -> None:
    """The startup probe's budget is minutes; every probe has 5 s to be answered."""
    server = container(helm4.template())
    probes = {name: server[f"{name}Probe"] for name in ("startup", "readiness", "liveness")}
    assert all(probe["timeoutSeconds"] >= 5 for probe in probes.values())
    startup = probes["startup"]
    assert startup["periodSeconds"] * startup["failureThreshold"] >= 600
    assert "initialDelaySeconds" not in probes["liveness"]


def test_keys_come_from_secrets_and_never_from_arguments(helm4: Helm) -> None:
    """Created and existing Secrets; the key itself is in one object only."""
    objects = helm4.template(KEYS)
    secret = find(objects, "Secret")
    assert secret["stringData"] == {
        "api-key": "api-secret",
        "admin-keys": "first-admin\nsecond-admin\n",
    }
    env = {entry["name"]: entry for entry in container(objects)["env"]}
    assert env["HF_TOKEN"]["valueFrom"]["secretKeyRef"] == {"name": "hf", "key": "token"}
    assert env["VLLM_API_KEY"]["valueFrom"]["secretKeyRef"]["key"] == "api-key"
    assert env["VTOKEN_ADMIN_KEY_FILE"]["value"] == "/etc/vtoken/admin/keys"
    others = [o for o in objects if o is not secret]
    assert "api-secret" not in json.dumps(others)
    assert "first-admin" not in json.dumps(others)


def test_changed_setting_or_key_replaces_the_pods(helm4: Helm) -> None:
    """The pod template's checksums follow settings and created keys."""

    def annotations(values):
        template = find(helm4.template(values), "Deployment")["spec"]["template"]
        return template["metadata"]["annotations"]

    base = annotations({})
    assert (
        annotations({"vtoken": {"thetaF": 0.5}})["checksum/settings"] != base["checksum/settings"]
    )
    assert annotations(KEYS)["checksum/keys"] != base["checksum/keys"]
    assert annotations({"replicas": 2}) == base


def test_network_policy_denies_what_it_does_not_open(helm4: Helm) -> None:
    """Without peers and `helm test` nothing comes in; the embedded model needs DNS alone."""
    values = {
        "networkPolicy": {"enabled": True, "ingressFrom": [], "allowDns": False},
        "tests": {"enabled": False},
    }
    spec = find(helm4.template(values), "NetworkPolicy")["spec"]
    assert spec["policyTypes"] == ["Ingress", "Egress"]
    assert spec["ingress"] == []
    assert spec["egress"] == []


def test_rollout_waits_for_the_old_pod_and_the_new(helm4: Helm) -> None:
    """With `Recreate` the old one may drain to its end before the new one begins to load."""
    values = {"server": {"drainSeconds": 1800}, "probes": {"startup": {"failureThreshold": 240}}}
    spec = find(helm4.template(values), "Deployment")["spec"]
    grace = spec["template"]["spec"]["terminationGracePeriodSeconds"]
    assert grace > 1800
    assert spec["progressDeadlineSeconds"] > grace + 2400


def test_scraping_finds_each_pod_once(helm4: Helm) -> None:
    """The ServiceMonitor's selector matches the Service but not the headless one."""
    objects = helm4.template({**MATRIX["monitoring"], **MATRIX["per-replica"]})
    wanted = find(objects, "ServiceMonitor")["spec"]["selector"]["matchLabels"].items()
    matching = [
        o for o in objects if o["kind"] == "Service" and wanted <= o["metadata"]["labels"].items()
    ]
    assert len(matching) == 1


def test_autoscaler_owns_the_number_of_pods(helm4: Helm) -> None:
    """With an HPA or KEDA the workload names no replicas, and the target is the workload."""
    for name, kind in (("hpa", "HorizontalPodAutoscaler"), ("keda", "ScaledObject")):
        objects = helm4.template(MATRIX[name])
        workload = find(objects, "Deployment")
        assert "replicas" not in workload["spec"]
        target = find(objects, kind)["spec"]["scaleTargetRef"]
        assert target["name"] == workload["metadata"]["name"]


def test_notes_name_the_curl_lines_that_fit(helm4: Helm) -> None:
    """The printed commands follow the keys and the mode."""
    notes = helm4.notes(KEYS)
    assert 'curl http://127.0.0.1:8000/v1/models -H "Authorization: Bearer $API_KEY"' in notes
    assert "curl -X PATCH http://127.0.0.1:8000/admin/policy" in notes
    assert "WARNING" not in notes
    bare = helm4.notes({"vtoken": {"mode": "off"}})
    assert "WARNING: no auth.apiKey" in bare
    assert "/admin" not in bare


def test_the_token_layer_on_gpus_is_opt_in_and_says_what_it_is(helm4: Helm) -> None:
    """The presets serve stock vLLM; mode lazy is passed on, with a warning."""
    gpu = {**GPU, "vtoken": {"mode": "lazy"}}
    settings = find(helm4.template(gpu), "ConfigMap", "vtoken-serve")
    assert settings["data"]["VTOKEN_MODE"] == "lazy"
    assert "WARNING: vtoken.mode=lazy on GPUs was never run on one" in helm4.notes(gpu)
    assert "on GPUs" not in helm4.notes(GPU)


def test_dashboards_arrive_unchanged(helm: Helm) -> None:
    """Grafana's own braces and dollars are not touched, and the sidecar finds the ConfigMap."""
    config = find(helm.template(MATRIX["monitoring"]), "ConfigMap", "-dashboards")
    assert config["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert {n: json.loads(t) for n, t in config["data"].items()} == {
        n: json.loads(t) for n, t in build.files().items()
    }


def test_kept_claim_survives_and_others_do_not(helm4: Helm) -> None:
    """`modelCache.keep` decides about the claim when the release is uninstalled."""
    kept = find(helm4.template(MATRIX["pvc-kept"]), "PersistentVolumeClaim")
    assert kept["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
    dropped = find(helm4.template(MATRIX["pvc-shared"]), "PersistentVolumeClaim")
    assert "annotations" not in dropped["metadata"]
