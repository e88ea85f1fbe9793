"""The dashboards ask for metrics that exist, show all of ours, and are what the code says."""

from __future__ import annotations

import json
import re

import pytest

from deploy.grafana import build
from deploy.grafana.model import GRID_WIDTH, HTTP_SELECTOR, POLICY_CHANGES, SELECTOR, Dashboard
from deploy.grafana.not_shown import NOT_SHOWN, NOT_SHOWN_OF_OTHERS
from tests.deploy.grafana import expanded
from tests.deploy.metric_names import (
    HTTP_FAMILIES,
    families_in,
    misplaced,
    our_families,
    series,
    used_series,
    vllm_families,
)

pytestmark = pytest.mark.k8s

EXPRESSIONS = [
    query.promql
    for dashboard in build.DASHBOARDS
    for panel in dashboard.panels()
    for query in panel.queries
] + [POLICY_CHANGES.promql]


@pytest.fixture(params=build.DASHBOARDS, ids=lambda dashboard: dashboard.uid)
def dashboard(request: pytest.FixtureRequest) -> Dashboard:
    return request.param


def test_files_are_what_the_code_says() -> None:
    """Nothing was edited by hand, forgotten or left over."""
    assert build.stale() == []
    assert build.main(["--check"]) == 0


def test_stale_missing_and_left_over_files_are_found(tmp_path) -> None:
    """The check above can fail."""
    for name, text in build.files().items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    (tmp_path / "vtoken-overview.json").write_text("{}")
    (tmp_path / "vtoken-policy.json").unlink()
    (tmp_path / "old.json").write_text("{}")
    assert build.stale(tmp_path) == ["old.json", "vtoken-overview.json", "vtoken-policy.json"]


def test_every_metric_asked_for_exists() -> None:
    """No panel can say "No data" because a metric has another name."""
    known = series(our_families() | vllm_families() | HTTP_FAMILIES)
    assert used_series(EXPRESSIONS) - known == set()


def test_every_metric_of_ours_is_shown_or_left_out_on_purpose() -> None:
    """A new metric must be put on a dashboard, or on the list with a reason."""
    assert misplaced(our_families(), used_series(EXPRESSIONS), NOT_SHOWN) == []


def test_every_metric_in_vllms_source_is_shown_or_left_out_on_purpose() -> None:
    """Also those that only some settings bring; the live test looks at what is really emitted."""
    wrong = misplaced(vllm_families(), used_series(EXPRESSIONS), NOT_SHOWN_OF_OTHERS)
    assert [sentence for sentence in wrong if "nothing is called so" not in sentence] == []


def test_a_new_a_renamed_and_a_shown_metric_are_told_apart() -> None:
    """The two tests above can fail, and say what to do."""
    emitted = families_in(
        "# HELP vllm:new_total x\n# TYPE vllm:new_total counter\nvllm:new_total 1\n"
        "# TYPE vllm:lat_seconds histogram\n# TYPE vllm:old gauge\n"
    )
    assert emitted == {
        "vllm:new_total": "counter",
        "vllm:lat_seconds": "histogram",
        "vllm:old": "gauge",
    }
    listed = {"vllm:ol*": "why", "vllm:lat_*": "why", "vllm:gone": "why"}
    assert misplaced(emitted, {"vllm:lat_seconds_bucket"}, listed) == [
        "vllm:lat_seconds is on a dashboard, and on the list as vllm:lat_*",
        "vllm:new_total is new: put it on a dashboard, or on the list with a reason",
        "vllm:gone is on the list, and nothing is called so",
    ]


def test_rates_only_of_counters_and_never_of_gauges() -> None:
    """rate() and increase() stand around counters and buckets."""
    kinds = our_families() | vllm_families()
    gauges = {name for name, kind in kinds.items() if kind == "gauge"}
    for expr in EXPRESSIONS:
        assert not set(re.findall(r"(?:rate|increase)\((\S+?)\{", expr)) & gauges, expr


def test_every_selector_is_templated() -> None:
    """Model and instance can be chosen in every panel; HTTP metrics know no model."""
    for expr in EXPRESSIONS:
        own, http = expr.count("{" + SELECTOR), expr.count("http_requests_total{" + HTTP_SELECTOR)
        assert expr.count("{") == own + http, expr


def test_panels_are_explained_and_fit_the_grid(dashboard: Dashboard) -> None:
    """Title, description and unit everywhere; nothing overlaps or sticks out."""
    taken: set[tuple[int, int]] = set()
    for panel in dashboard.to_json()["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        assert place["x"] + place["w"] <= GRID_WIDTH
        taken |= cells
        if panel["type"] != "row":
            assert panel["description"].endswith(".")
            assert panel["fieldConfig"]["defaults"]["unit"]


def test_dashboard_has_variables_links_and_policy_annotations(dashboard: Dashboard) -> None:
    """Data source, model and instance can be chosen; policy versions are marked."""
    document = dashboard.to_json()
    names = [variable["name"] for variable in document["templating"]["list"]]
    assert names[:3] == ["datasource", "model", "instance"]
    used = set(re.findall(r"\$(\w+)", json.dumps(document))) | set(names)
    assert {"compare"} & used <= set(names)
    assert document["links"][0]["tags"] == document["tags"]
    assert document["annotations"]["list"][0]["expr"] == POLICY_CHANGES.promql


def test_all_is_what_the_variables_list(dashboard: Dashboard) -> None:
    """Not `.*`: on a Prometheus that others use as well, their series have the same names."""
    for variable in dashboard.to_json()["templating"]["list"]:
        assert "allValue" not in variable
        if variable["type"] == "query":
            assert "vtoken_policy_info" in variable["query"]["query"]


def test_all_is_escaped_as_grafana_does() -> None:
    """Backslashes are doubled, since they stand within a string of PromQL."""
    assert expanded(["10.0.0.7:8000", "m+1"]) == r"(10\\.0\\.0\\.7:8000|m\\+1)"
    assert expanded(["a.b"]) == r"a\\.b"
    assert expanded([]) == "()"


def test_comparison_offers_pods_that_are_gone() -> None:
    """A pod replaced since has another address; the time before is asked for it, too."""
    (policy,) = [d for d in build.DASHBOARDS if d.has_compare]
    (instance,) = [v for v in policy.to_json()["templating"]["list"] if v["name"] == "instance"]
    matched = 'vtoken_policy_info{model_name=~"$model"}[$__range]'
    assert (
        f"count_over_time({matched}) or count_over_time({matched} offset $compare)"
        in (instance["query"]["query"])
    )


def test_engines_of_one_instance_have_lines_of_their_own() -> None:
    """And are not counted as instances where they all say the same."""
    for dashboard in build.DASHBOARDS:
        for panel in dashboard.panels():
            for query in panel.queries:
                assert query.legend.count("{{instance}}") == query.legend.count("{{engine}}")
    for name in ("vtoken_not_ready", "vtoken_policy_changes_total"):
        (expr,) = [expr for expr in EXPRESSIONS if name in expr]
        assert "(max without (engine) (" in expr


def test_ids_are_unique() -> None:
    """Dashboards can be installed side by side, panels addressed by id."""
    documents = [json.loads(text) for text in build.files().values()]
    assert len({document["uid"] for document in documents}) == len(documents)
    for document in documents:
        ids = [panel["id"] for panel in document["panels"]]
        assert len(ids) == len(set(ids))
