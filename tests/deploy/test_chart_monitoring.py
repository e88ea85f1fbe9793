"""Alerts and autoscalers look at this release's pods alone, and at each pod once."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.helm import Helm, find
from tests.deploy.matrix import MATRIX
from tests.deploy.promtool import promtool
from tests.deploy.tools import ROOT

pytestmark = pytest.mark.k8s

LETTERS = "bcdfghjklmnpqrstvwxz2456789"
"""Of which Kubernetes makes names."""

GUIDE = ROOT / "docs" / "deploy.md"
RULES: dict[str, Any] = {"prometheusRule": {"enabled": True}}
KEDA: dict[str, Any] = {"autoscaling": {"kind": "keda", "keda": {"serverAddress": "http://x"}}}
PER_REPLICA: dict[str, Any] = {"modelCache": {"type": "perReplica"}}


def pod_of_deployment(name: str, template_hash: int, random: str = "x2kzp") -> str:
    """As the controllers name it: the template's hash re-lettered, and a random tail."""
    letters = "".join(LETTERS[ord(digit) % len(LETTERS)] for digit in str(template_hash))
    return f"{name}-{letters}-"[:58] + random


def pattern(helm: Helm, values: dict[str, Any]) -> re.Pattern[str]:
    """The matcher of pods in the alerts."""
    rules = find(helm.template({**RULES, **values}), "PrometheusRule")["spec"]["groups"][0]["rules"]
    (found,) = {p for rule in rules for p in re.findall(r'pod=~"([^"]*)"', rule["expr"])}
    return re.compile(found)


@pytest.mark.parametrize("length", [12, 45, 46, 47, 48])
def test_alerts_know_the_pods_of_a_deployment(helm4: Helm, length: int) -> None:
    """Of every hash; long names are cut by Kubernetes, which may take the dash."""
    name = "v" * length
    own = pattern(helm4, {"fullnameOverride": name})
    for template_hash in (0, 7, 89_123, 123_456_789, 1_234_567_890, 4_294_967_295):
        assert own.fullmatch(pod_of_deployment(name, template_hash)), template_hash


def test_alerts_know_the_pods_of_a_stateful_set(helm4: Helm) -> None:
    """They are numbered, and have no hash."""
    own = pattern(helm4, {**PER_REPLICA, "fullnameOverride": "vtoken-serve"})
    assert own.fullmatch("vtoken-serve-0")
    assert own.fullmatch("vtoken-serve-12")
    assert not own.fullmatch("vtoken-serve-l4-0")
    assert not own.fullmatch("vtoken-serve-4-0")
    assert not own.fullmatch(pod_of_deployment("vtoken-serve", 1_234_567_890))


@pytest.mark.parametrize("sister", ["vtoken-serve-l4", "vtoken-serve-4", "vtoken-serve-bcd-56789"])
def test_alerts_leave_releases_out_whose_names_begin_alike(helm4: Helm, sister: str) -> None:
    """Whatever their names go on with, and whichever kind of workload they are."""
    own = pattern(helm4, {"fullnameOverride": "vtoken-serve"})
    for template_hash in (0, 7, 1_234_567_890):
        assert not own.fullmatch(pod_of_deployment(sister, template_hash))
    assert not any(own.fullmatch(f"{sister}-{number}") for number in (0, 12))


TWO_ENGINES = {
    "vllm:num_requests_waiting": ("3x10", "1x10"),
    "vllm:kv_cache_usage_perc": ("0.5x10", "0.25x10"),
    "vtoken_headroom_backpressure_seconds_total": ("0+30x10", "0+15x10"),
}
"""What each of a pod's two engines has, minute by minute; all wait, the share is the fullest's."""
PER_POD = {"waiting": 3 + 1, "usage": 0.5, "backpressure": 0.5}
PODS = [pod_of_deployment("v", number) for number in (1_234_567_890, 89_123)]


def check_values(folder: Path, expected: dict[str, dict[str, float]]) -> None:
    """Evaluate expressions over two pods of two engines each; expected values by their labels."""
    series = [
        {"series": f'{name}{{namespace="llm",pod="{pod}",engine="{engine}"}}', "values": values}
        for name, of_engines in TWO_ENGINES.items()
        for pod in PODS
        for engine, values in enumerate(of_engines)
    ]
    asked = [
        {
            "expr": expr,
            "eval_time": "10m",
            "exp_samples": [{"labels": labels, "value": v} for labels, v in samples.items()],
        }
        for expr, samples in expected.items()
    ]
    path = folder / "tests.yaml"
    test = {"interval": "1m", "input_series": series, "promql_expr_test": asked}
    path.write_text(yaml.safe_dump({"tests": [test]}))
    promtool("test", "rules", path)


@pytest.mark.prometheus
def test_keda_counts_a_pod_with_two_engines_as_its_fullest(helm4: Helm, tmp_path: Path) -> None:
    """It divides the sum by the number of pods: the shares of two engines must not add up."""
    objects = helm4.template({**KEDA, "fullnameOverride": "v"})
    triggers = find(objects, "ScaledObject")["spec"]["triggers"]
    expected = {
        trigger["metadata"]["query"]: {"{}": len(PODS) * value}
        for trigger in triggers
        for name, value in PER_POD.items()
        if name in trigger["name"]
    }
    assert len(expected) == len(triggers) == 3
    check_values(tmp_path, expected)


@pytest.mark.prometheus
def test_the_guides_rules_for_an_hpa_count_alike(helm4: Helm, tmp_path: Path) -> None:
    """prometheus-adapter asks for each pod, under the names that the HPA has."""
    (block,) = re.findall(
        r"^```yaml\n(rules:\n.*?)^```", GUIDE.read_text(), re.DOTALL | re.MULTILINE
    )
    rules = {r["name"]["as"]: r["metricsQuery"] for r in yaml.safe_load(block)["rules"]["custom"]}
    metrics = find(helm4.template(MATRIX["hpa"]), "HorizontalPodAutoscaler")["spec"]["metrics"]
    assert {metric["pods"]["metric"]["name"] for metric in metrics} == rules.keys()
    matchers = f'namespace="llm",pod=~"{"|".join(PODS)}"'
    expected = {
        query.replace("<<.LabelMatchers>>", matchers).replace("<<.GroupBy>>", "pod"): {
            f'{{pod="{pod}"}}': value for pod in PODS
        }
        for rule, query in rules.items()
        for name, value in PER_POD.items()
        if name in rule
    }
    assert len(expected) == 3
    check_values(tmp_path, expected)
