"""The alerts, as the chart renders them, fire when they should and stay quiet when they should."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.grafana.build import DASHBOARDS
from deploy.grafana.model import POLICY_CHANGES
from tests.deploy.helm import CHART, Helm, find
from tests.deploy.metric_names import our_families, series, used_series, vllm_families
from tests.deploy.promtool import promtool
from tests.deploy.tools import ROOT
from vtoken.request_options import KEYS

RUNBOOKS = ROOT / "docs" / "runbooks"
POD = 'namespace="llm",pod="demo-vtoken-serve-6d4b75cb6d-x2kzp"'
OTHER_POD = 'namespace="other",pod="demo-vtoken-serve-6d4b75cb6d-x2kzp"'
SISTER_POD = 'namespace="llm",pod="demo-vtoken-serve-l4-6d4b75cb6d-x2kzp"'
GRAFANA_VARIABLES = {
    "$__rate_interval": "1m",
    "$__range": "1h",
    "$compare": "1h",
    "$model": ".*",
    "$instance": ".*",
}


@dataclass(frozen=True)
class Case:
    """Series by name and matchers, each with promtool's notation; who fires at which minute."""

    alert: str
    name: str
    series: dict[str, str]
    minute: int
    fires: bool


def case(alert: str, name: str, minute: int, fires: bool, **series: str) -> Case:
    """Keywords are metric names; ``vllm__x`` stands for ``vllm:x``, a tail ``__k__v`` for k="v"."""
    named = {}
    for key, values in series.items():
        metric, *labels = key.replace("vllm__", "vllm:").split("__")
        extra = "".join(
            f',{k}="{v}"' for k, v in zip(labels[::2], labels[1::2], strict=True)
        ).replace("Inf", "+Inf")
        named[f"{metric}{{{POD}{extra}}}"] = values
    return Case(alert, name, named, minute, fires)


_FLAT, _GROWS = "0x120", "0+30x120"
_STALL = "vtoken_relocation_stall_seconds_bucket__le__"
_SKIPS = "vtoken_reclaim_skipped_total__reason__"
CASES: tuple[Case, ...] = (
    case(
        *("VTokenWasteUnderBackpressure", "both last", 20, True),
        vtoken_waste_ratio="0.4x120",
        vtoken_headroom_backpressure_seconds_total=_GROWS,
    ),
    case(
        *("VTokenWasteUnderBackpressure", "not yet long enough", 8, False),
        vtoken_waste_ratio="0.4x120",
        vtoken_headroom_backpressure_seconds_total=_GROWS,
    ),
    case(
        *("VTokenWasteUnderBackpressure", "waste alone", 20, False),
        vtoken_waste_ratio="0.9x120",
        vtoken_headroom_backpressure_seconds_total=_FLAT,
    ),
    case(
        *("VTokenWasteUnderBackpressure", "pressure alone", 20, False),
        vtoken_waste_ratio="0.2x120",
        vtoken_headroom_backpressure_seconds_total=_GROWS,
    ),
    case(
        *("VTokenRelocationStallHigh", "slow", 20, True),
        **{f"{_STALL}0.01": _FLAT, f"{_STALL}0.1": _GROWS, f"{_STALL}Inf": _GROWS},
    ),
    case(
        *("VTokenRelocationStallHigh", "quick", 20, False),
        **{f"{_STALL}0.001": _GROWS, f"{_STALL}0.01": _GROWS, f"{_STALL}Inf": _GROWS},
    ),
    case(
        *("VTokenHeadroomExhausted", "full and skipping", 15, True),
        vtoken_free_blocks="4x120",
        vtoken_headroom_blocks="4x120",
        **{f"{_SKIPS}no_headroom": _GROWS, f"{_SKIPS}no_gain": _FLAT},
    ),
    case(
        *("VTokenHeadroomExhausted", "full, skipping for another reason", 15, False),
        vtoken_free_blocks="0x120",
        vtoken_headroom_blocks="4x120",
        **{f"{_SKIPS}no_headroom": _FLAT, f"{_SKIPS}no_gain": _GROWS},
    ),
    case(
        *("VTokenPreemptionsRising", "a new service under pressure", 20, True),
        vllm__num_preemptions_total="0+3x120",
    ),
    case(
        *("VTokenPreemptionsRising", "as many as an hour ago", 110, False),
        vllm__num_preemptions_total="0+3x120",
    ),
    case(
        *("VTokenPreemptionsRising", "three times an hour ago", 110, True),
        vllm__num_preemptions_total="0+2x60 120+8x60",
    ),
    case(
        *("VTokenPreemptionsRising", "a handful", 20, False),
        vllm__num_preemptions_total="0x10 1x5 3x100",
    ),
    case(
        *("VTokenInvariantViolation", "one", 12, True),
        vtoken_invariant_violations_total__invariant__I2="0x10 1x110",
    ),
    case(
        *("VTokenInvariantViolation", "none", 12, False),
        vtoken_invariant_violations_total__invariant__I2=_FLAT,
    ),
    case(
        *("VTokenPolicyFailing", "failing", 15, True),
        vtoken_policy_errors_total__policy__h2o=_GROWS,
    ),
    case(
        *("VTokenPolicyFailing", "well", 15, False),
        vtoken_policy_errors_total__policy__h2o=_FLAT,
    ),
    case(
        *("VTokenRelocationsFailing", "failing", 15, True),
        vtoken_relocations_total__outcome__failed=_GROWS,
    ),
    case(
        *("VTokenRelocationsFailing", "rolled back is no failure", 15, False),
        vtoken_relocations_total__outcome__failed=_FLAT,
        vtoken_relocations_total__outcome__rolled_back=_GROWS,
    ),
    case(
        *("VTokenEngineNotProgressing", "no answer, before a restart after 300 s", 4, True),
        vtoken_not_ready__reason__engine_unresponsive="1x120",
    ),
    case(
        *("VTokenEngineNotProgressing", "one slow step", 4, False),
        vtoken_not_ready__reason__engine_stalled="0 1 0 1 1 0x100",
    ),
    case(
        *("VTokenEngineNotProgressing", "draining, and relocation off", 15, False),
        vtoken_not_ready__reason__draining="1x120",
        vtoken_not_ready__reason__relocation_disabled="1x120",
    ),
    case(
        *("VTokenEngineNotProgressing", "wedged", 15, True),
        vllm__num_requests_running="3x120",
        vllm__generation_tokens_total="100x120",
        vllm__prompt_tokens_total="100x120",
    ),
    case(
        *("VTokenEngineNotProgressing", "idle", 15, False),
        vllm__num_requests_running="0x120",
        vllm__generation_tokens_total="100x120",
        vllm__prompt_tokens_total="100x120",
    ),
    case(
        *("VTokenEngineNotProgressing", "a long prompt", 15, False),
        vllm__num_requests_running="1x120",
        vllm__generation_tokens_total="100x120",
        vllm__prompt_tokens_total=_GROWS,
    ),
    case(
        *("VTokenStatisticsStale", "no answer", 10, True),
        vtoken_snapshot_age_seconds="0+60x120",
    ),
    case(*("VTokenStatisticsStale", "fresh", 10, False), vtoken_snapshot_age_seconds="1x120"),
    case(*("VTokenMetricsAbsent", "nothing scraped", 15, True)),
    case(*("VTokenMetricsAbsent", "scraped", 15, False), vtoken_policy_info="1x120"),
    Case(
        *("VTokenMetricsAbsent", "only another release"),
        *({f"vtoken_policy_info{{{OTHER_POD}}}": "1x120"}, 15, True),
    ),
    Case(
        *("VTokenMetricsAbsent", "only a release whose name begins alike"),
        *({f"vtoken_policy_info{{{SISTER_POD}}}": "1x120"}, 15, True),
    ),
    Case(
        *("VTokenInvariantViolation", "in another release"),
        *({f"vtoken_invariant_violations_total{{{OTHER_POD}}}": "0x10 1x110"}, 12, False),
    ),
)


@pytest.fixture(scope="module")
def rules(helm4: Helm) -> list[dict[str, Any]]:
    """The alerts as the chart renders them."""
    values = {"prometheusRule": {"enabled": True, "alertLabels": {"team": "inference"}}}
    (group,) = find(helm4.template(values), "PrometheusRule")["spec"]["groups"]
    return group["rules"]


def write_rules(folder: Path, rules: Sequence[dict[str, Any]]) -> Path:
    path = folder / "rules.yaml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "vtoken-serve", "rules": list(rules)}]}))
    return path


def promtool_test(case: Case) -> dict[str, Any]:
    """The case in promtool's words: is the alert among the firing ones?"""
    firing = f'count(ALERTS{{alertname="{case.alert}",alertstate="firing"}}) or vector(0)'
    expected = [{"labels": "{}", "value": 1 if case.fires else 0}]
    return {
        "name": f"{case.alert}: {case.name}",
        "interval": "1m",
        "input_series": [{"series": s, "values": v} for s, v in case.series.items()],
        "promql_expr_test": [
            {"expr": firing, "eval_time": f"{case.minute}m", "exp_samples": expected}
        ],
    }


@pytest.mark.prometheus
def test_alerts_fire_exactly_when_they_should(rules, tmp_path: Path) -> None:
    """`promtool test rules` over every case above."""
    write_rules(tmp_path, rules)
    path = tmp_path / "tests.yaml"
    tests = [promtool_test(case) for case in CASES]
    path.write_text(yaml.safe_dump({"rule_files": ["rules.yaml"], "tests": tests}))
    promtool("test", "rules", path)


@pytest.mark.prometheus
def test_promtool_refuses_a_wrong_expectation(rules, tmp_path: Path) -> None:
    """The test above can fail."""
    write_rules(tmp_path, rules)
    wrong = promtool_test(CASES[0])
    wrong["promql_expr_test"][0]["exp_samples"][0]["value"] = 0
    path = tmp_path / "tests.yaml"
    path.write_text(yaml.safe_dump({"rule_files": ["rules.yaml"], "tests": [wrong]}))
    with pytest.raises(AssertionError, match="FAILED"):
        promtool("test", "rules", path)


@pytest.mark.prometheus
def test_rules_and_dashboard_expressions_are_promql(rules, tmp_path: Path) -> None:
    """promtool parses every alert, its templates, and every panel's expression."""
    promtool("check", "rules", write_rules(tmp_path, rules))
    panels = [query.promql for d in DASHBOARDS for p in d.panels() for query in p.queries]
    recorded = []
    for number, expr in enumerate([*panels, POLICY_CHANGES.promql]):
        for variable, value in GRAFANA_VARIABLES.items():
            expr = expr.replace(variable, value)
        recorded.append({"record": f"panel_{number}", "expr": expr})
    promtool("check", "rules", write_rules(tmp_path, recorded))


@pytest.mark.k8s
def test_every_alert_has_both_kinds_of_case(rules) -> None:
    """A case in which it fires, and one in which it does not."""
    for rule in rules:
        outcomes = {case.fires for case in CASES if case.alert == rule["alert"]}
        assert outcomes == {True, False}, rule["alert"]


@pytest.mark.k8s
def test_every_alert_has_a_runbook_and_every_runbook_an_alert(rules) -> None:
    """The link in the alert leads to a file that says what to look at and what to do."""
    files = {path.stem: path.read_text() for path in RUNBOOKS.glob("VToken*.md")}
    assert set(files) == {rule["alert"] for rule in rules}
    for rule in rules:
        assert rule["annotations"]["runbook_url"] == f"docs/runbooks/{rule['alert']}.md"
        headings = re.findall(r"^## (.*)$", files[rule["alert"]], re.MULTILINE)
        assert headings == ["What it means", "Look", "Do"], rule["alert"]


@pytest.mark.k8s
def test_runbooks_name_metrics_and_settings_that_exist() -> None:
    """No runbook sends anybody to a metric, or to an option of a request, that is not there."""
    known = series(our_families()) | series(vllm_families()) | our_families().keys() | KEYS
    named = used_series(path.read_text() for path in RUNBOOKS.glob("*.md"))
    assert len(named) > 5
    assert {n for n in named - known if not is_beginning(n, known)} == set()


def is_beginning(name: str, known: Collection[str]) -> bool:
    """Whether it stands for several, as ``vtoken_relocation_…`` does."""
    return name.endswith("_") and any(one.startswith(name) for one in known)


@pytest.mark.k8s
def test_runbooks_name_panels_that_exist() -> None:
    """A line that names a dashboard names panels of it."""
    panels = {d.title.rpartition(" / ")[2]: {p.title for p in d.panels()} for d in DASHBOARDS}
    found = 0
    for path in RUNBOOKS.glob("*.md"):
        for item in path.read_text().replace("\n  ", " ").splitlines():
            if match := re.search(r"[Dd]ashboard \*(\w+)\*(.*)", item):
                named = set(re.findall(r"\*([^*]+)\*", match[2]))
                assert named <= panels[match[1]], f"{path.name}: {named}"
                found += len(named)
    assert found > 5


@pytest.mark.k8s
def test_alerts_use_metrics_that_exist_and_only_this_release(rules) -> None:
    """Names are real, and each selector has the release's matchers."""
    known = series(our_families()) | series(vllm_families())
    for rule in rules:
        assert used_series([rule["expr"]]) <= known
        selectors = re.sub(r'"[^"]*"', '""', rule["expr"]).count("{")
        assert selectors == rule["expr"].count('{namespace="llm",pod=~"demo-')
        assert rule["labels"]["team"] == "inference"
        assert rule["labels"]["severity"] in ("warning", "critical")


@pytest.mark.k8s
def test_thresholds_follow_the_values(helm4: Helm) -> None:
    """The waste threshold is θ_F unless it is set; nothing is left to fill in."""

    def text(values: dict[str, Any]) -> str:
        values = {"prometheusRule": {"enabled": True, **values}, "vtoken": {"thetaF": 0.4}}
        return json.dumps(find(helm4.template(values), "PrometheusRule")["spec"])

    assert "> 0.4" in text({})
    assert "> 0.6" in text({"thresholds": {"wasteRatio": 0.6}})
    assert 'vtoken_waste_ratio{job=\\"mine\\"}' in text({"selector": 'job="mine"'})
    source = (CHART / "files" / "alerts.yaml").read_text()
    names = set(re.findall(r"\$(\w+)", source)) - {"labels", "value"}
    assert names
    assert not any(f"${name}" in text({}) for name in names)
