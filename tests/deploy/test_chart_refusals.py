"""Values that could only fail later are refused at once, in words."""

from __future__ import annotations

from typing import Any

import pytest

from tests.deploy.helm import Helm, HelmError
from tests.deploy.matrix import GPU

pytestmark = pytest.mark.k8s

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "unknown-setting": ({"vtoken": {"tetaF": 0.3}}, "tetaF"),
    "unknown-section": ({"vLLM": {"model": "x"}}, "vLLM"),
    "theta-out-of-bound": ({"vtoken": {"thetaF": 1.0}}, "thetaF"),
    "bad-mode": ({"vtoken": {"mode": "lazi"}}, "mode"),
    "wrong-type": ({"replicas": "two"}, "replicas"),
    "two-budgets": (
        {"vtoken": {"keepRatio": 0.5, "budgetTokens": 512}},
        "keepRatio and vtoken.budgetTokens exclude each other",
    ),
    "budget-below-protected": (
        {"vtoken": {"budgetTokens": 36}},
        "vtoken.budgetTokens=36 must be above sinkTokens + recentTokens = 36",
    ),
    "short-grace": (
        {"terminationGracePeriodSeconds": 30},
        "terminationGracePeriodSeconds=30 is less than",
    ),
    "too-few-gpus": (
        {**GPU, "vllm": {"tensorParallelSize": 4}},
        "vllm.tensorParallelSize=4 needs as many GPUs, gpu.count is 2",
    ),
    "shared-read-write-once": (
        {"modelCache": {"type": "pvc"}, "replicas": 2},
        "2 pods cannot share one claim with accessModes ReadWriteOnce",
    ),
    "scaled-read-write-once": (
        {"modelCache": {"type": "pvc"}, "autoscaling": {"kind": "hpa"}},
        "4 pods cannot share one claim",
    ),
    "surging-read-write-once": (
        {"modelCache": {"type": "pvc"}, "strategy": {"type": "RollingUpdate"}},
        "2 pods (one of them of strategy.maxSurge) cannot share one claim with accessModes "
        "ReadWriteOnce: use strategy.type=Recreate, ReadWriteMany, or modelCache.type=perReplica",
    ),
    "surging-read-write-once-pod": (
        {
            "modelCache": {"type": "pvc", "accessModes": ["ReadWriteOncePod"]},
            "strategy": {"type": "RollingUpdate", "maxSurge": "25%"},
        },
        "2 pods (one of them of strategy.maxSurge) cannot share one claim",
    ),
    "no-claim": ({"modelCache": {"type": "existingClaim"}}, "modelCache.existingClaim"),
    "api-key-in-arguments": (
        {"vllm": {"extraArgs": ["--api-key=secret"]}},
        "vllm.extraArgs has --api-key",
    ),
    "admin-on-the-api-port": ({"server": {"adminPort": 8000}}, "server.adminPort=8000"),
    "admin-port-zero": ({"server": {"adminPort": 0}}, "adminPort"),
    "scrape-without-key": (
        {"server": {"metricsKeyRequired": True}, "serviceMonitor": {"enabled": True}},
        "server.metricsKeyRequired with a monitor needs auth.apiKey",
    ),
    "port-in-arguments": ({"vllm": {"extraArgs": ["--port", "1"]}}, "vllm.extraArgs has --port"),
    "keda-without-prometheus": (
        {"autoscaling": {"kind": "keda"}},
        "autoscaling.keda.serverAddress",
    ),
    "max-below-min": (
        {"autoscaling": {"kind": "hpa", "minReplicas": 5}},
        "autoscaling.minReplicas=5 is above maxReplicas=4",
    ),
    "two-disruption-budgets": (
        {"podDisruptionBudget": {"enabled": True, "minAvailable": 1}},
        "podDisruptionBudget.minAvailable and maxUnavailable exclude each other",
    ),
    "stuck-rolling-update": (
        {"strategy": {"type": "RollingUpdate", "maxSurge": 0, "maxUnavailable": 0}},
        "a rolling update could never begin",
    ),
    "stuck-rolling-update-by-share": (
        {"strategy": {"type": "RollingUpdate", "maxSurge": "0%", "maxUnavailable": "0"}},
        "a rolling update could never begin",
    ),
    "ingress-without-host": ({"ingress": {"enabled": True}}, "ingress.hosts"),
    "route-without-gateway": ({"httpRoute": {"enabled": True}}, "httpRoute.parentRefs"),
    "no-drain": ({"server": {"drainSeconds": 0}}, "drainSeconds"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusal_names_the_value(helm: Helm, name: str) -> None:
    """Both versions of helm fail, and the message has the key and what to do."""
    values, message = REFUSED[name]
    with pytest.raises(HelmError) as refusal:
        helm.template(values)
    assert message in str(refusal.value)


@pytest.mark.parametrize(
    "values",
    [
        {"strategy": {"type": "RollingUpdate", "maxSurge": "0%", "maxUnavailable": 1}},
        {"strategy": {"type": "Recreate"}},
        {"strategy": {"type": "RollingUpdate"}, "modelCache": {"accessModes": ["ReadWriteMany"]}},
        {"strategy": {"type": "RollingUpdate"}, "modelCache": {"type": "perReplica"}},
    ],
    ids=["no-surge", "recreate", "read-write-many", "claim-per-replica"],
)
def test_updates_that_a_claim_allows_are_let_through(helm4: Helm, values: dict[str, Any]) -> None:
    """One pod at a time on a claim for one, or a claim that several pods may have."""
    helm4.template({**values, "modelCache": {"type": "pvc", **values.get("modelCache", {})}})
