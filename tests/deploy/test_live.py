"""The chart's CPU preset run for real: probes, helm test, Prometheus, dashboards, draining.

One server is started exactly as the manifest says and serves all tests; the last one ends it.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from deploy.grafana.build import DASHBOARDS
from deploy.grafana.model import HTTP_SELECTOR, POLICY_CHANGES, Dashboard
from deploy.grafana.not_shown import NOT_SHOWN, NOT_SHOWN_OF_OTHERS
from tests.deploy import tools
from tests.deploy.conftest import obtain
from tests.deploy.helm import CHART, Helm, find
from tests.deploy.live import ADMIN_KEY, API_KEY, OWN_JOB, Live, running
from tests.deploy.load import Stream
from tests.deploy.metric_names import (
    families_in,
    misplaced,
    our_families,
    series,
    used_series,
    vllm_families,
)
from tests.deploy.prometheus import has_number
from tests.service.server_process import wait_for

pytestmark = [
    pytest.mark.k8s,
    pytest.mark.prometheus,
    pytest.mark.engine,
    pytest.mark.timeout(900),
]


QUERIES: list[tuple[Dashboard, str]] = [
    (dashboard, query.promql)
    for dashboard in DASHBOARDS
    for panel in dashboard.panels()
    for query in panel.queries
]


@pytest.fixture(scope="module")
def live(helm4: Helm, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """Started once for all tests of this file."""
    binary = obtain(lambda: tools.debian_tool("prometheus"))
    with running(helm4, binary, tmp_path_factory.mktemp("live")) as state:
        yield state


def test_probes_are_answered_as_the_manifest_says(live: Live) -> None:
    """A loaded server passes all three."""
    assert all(live.pod.probe(name) for name in ("startup", "readiness", "liveness"))


def test_api_key_guards_the_api(live: Live) -> None:
    """The key of the Secret opens /v1, and nothing else does."""
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(f"{live.pod.url}/v1/models", timeout=120)


def test_helm_test_passes(live: Live) -> None:
    """The script of `helm test`, with the environment of its pod: it chats and patches."""
    done = run_smoke(live, ADMIN_KEY)
    assert done.returncode == 0, done.stderr
    assert "policy: theta_f 0.1 -> 0.5 -> 0.1" in done.stdout


def test_helm_test_fails_with_a_sentence(live: Live) -> None:
    """A wrong admin key is not passed over."""
    done = run_smoke(live, "wrong")
    assert done.returncode == 1
    assert re.match(r"smoke: GET http\S+/admin/policy answered 401", done.stderr)


def run_smoke(live: Live, admin_key: str) -> subprocess.CompletedProcess[str]:
    environment = {
        "SMOKE_API_KEY": API_KEY,
        "SMOKE_ADMIN_KEYS": admin_key,
        "SMOKE_MODE": find(live.objects, "Pod")["spec"]["containers"][0]["env"][1]["value"],
    }
    return subprocess.run(
        [sys.executable, str(CHART / "files" / "smoke.py"), live.pod.url],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_every_series_asked_for_is_there(live: Live) -> None:
    """Each metric of the dashboards and alerts is scraped; ours are the specified ones."""
    scraped = set(live.prometheus.get("label/__name__/values"))
    asked = used_series([expr for _, expr in QUERIES] + [rule["query"] for rule in rules(live)])
    assert asked - scraped == set()
    ours = {name for name in scraped if name.startswith("vtoken_")}
    assert ours - series(our_families()) == set()
    assert series(our_families()) - ours == set()


def test_every_metric_emitted_is_shown_or_left_out_on_purpose(live: Live) -> None:
    """vLLM's and the libraries' too: one that is new or has another name needs a decision."""
    with urllib.request.urlopen(f"{live.pod.url}/metrics", timeout=120) as answer:
        emitted = families_in(answer.read().decode())
    assert "vllm:num_requests_running" in emitted
    shown = used_series([*(expr for _, expr in QUERIES), POLICY_CHANGES.promql])
    listed = NOT_SHOWN | NOT_SHOWN_OF_OTHERS
    assert misplaced(vllm_families() | emitted, shown, listed) == []


@pytest.mark.parametrize("number", range(len(QUERIES)))
def test_panel_has_data_under_load(live: Live, number: int) -> None:
    """No panel says "No data": each expression gives a number at some moment of the run."""
    dashboard, promql = QUERIES[number]
    expr = live.fill(dashboard)(promql)
    assert has_number(live.prometheus.query_range(expr, live.start, live.end + 5)), expr


def test_panels_leave_a_neighbour_on_the_same_prometheus_out(live: Live) -> None:
    """With All selected, another vLLM that serves the same model and has requests is in none."""
    time = (live.start, live.end)
    assert live.prometheus.query_range('http_requests_total{job="neighbour"}', *time)
    for dashboard, promql in QUERIES:
        fill = live.fill(dashboard)
        own = promql.replace(HTTP_SELECTOR, f'{HTTP_SELECTOR},job="{OWN_JOB}"')
        shown = live.prometheus.query_range(fill(promql), *time)
        assert shown == live.prometheus.query_range(fill(own), *time), promql


def test_policy_change_is_annotated(live: Live) -> None:
    """The annotation's query has a value right after the change, with the new version."""
    expr = live.fill(DASHBOARDS[0])(POLICY_CHANGES.promql)
    found = live.prometheus.query_range(expr, live.start, live.end + 5)
    assert {one["metric"]["version"] for one in found} >= {"2"}


def test_alerts_are_evaluated_without_error_and_their_series_exist(live: Live) -> None:
    """Prometheus accepts every rule, and each selector in it finds series of this release."""
    assert {rule["health"] for rule in rules(live)} == {"ok"}
    for rule in rules(live):
        for selector in re.findall(r'(?:vtoken_|vllm:)\w+\{(?:"[^"]*"|[^}"])*\}', rule["query"]):
            assert live.prometheus.query_range(selector, live.start, live.end), selector


def test_no_critical_alert_fires_on_a_healthy_service(live: Live) -> None:
    """Load alone is no incident."""
    firing = [r for r in rules(live) if r["labels"]["severity"] == "critical"]
    assert [rule["name"] for rule in firing if rule["state"] == "firing"] == []


def test_keda_queries_have_data(live: Live, helm4: Helm) -> None:
    """What KEDA would ask gives a number."""
    values = {"autoscaling": {"kind": "keda", "keda": {"serverAddress": "http://x"}}}
    for trigger in find(helm4.template(values), "ScaledObject")["spec"]["triggers"]:
        query = trigger["metadata"]["query"]
        assert has_number(live.prometheus.query_range(query, live.start, live.end)), query


def test_termination_loses_no_stream(live: Live) -> None:
    """preStop, SIGTERM: open streams end whole, within the grace period. Ends the server."""
    streams = [Stream(live.pod.url, API_KEY, 30, 300) for _ in range(6)]
    threads = [stream.start() for stream in streams]
    wait_for(lambda: all(stream.chunks for stream in streams))
    seconds = live.pod.terminate()
    for thread in threads:
        thread.join(timeout=300)
    assert [stream.error for stream in streams] == [""] * 6
    assert all(stream.is_whole for stream in streams)
    assert seconds < live.pod.pod_spec["terminationGracePeriodSeconds"]
    assert live.pod.process.returncode == 0
    assert not live.pod.probe("readiness")


def rules(live: Live) -> list[dict[str, Any]]:
    """The alerts as Prometheus sees them."""
    (group,) = live.prometheus.get("rules")["groups"]
    found: list[dict[str, Any]] = group["rules"]
    return found
