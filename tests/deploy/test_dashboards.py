"""The dashboards ask for metrics that exist, show all of ours, and are what the code says."""

from __future__ import annotations

import json
import re

import pytest

from deploy.grafana import build
from deploy.grafana.model import GRID_WIDTH, POLICY_CHANGES, Dashboard
from tests.deploy.metric_names import our_families, series, used_series, vllm_families

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
    known = series(our_families()) | series(vllm_families())
    assert used_series(EXPRESSIONS) - known == set()


def test_every_metric_of_ours_is_shown_or_left_out_on_purpose() -> None:
    """A new metric must be put on a dashboard, or on the list with a reason."""
    shown = used_series(EXPRESSIONS)
    hidden = {name for name, kind in our_families().items() if not series({name: kind}) & shown}
    assert hidden == set(build.NOT_SHOWN)


def test_rates_only_of_counters_and_never_of_gauges() -> None:
    """rate() and increase() stand around counters and buckets."""
    kinds = our_families() | vllm_families()
    gauges = {name for name, kind in kinds.items() if kind == "gauge"}
    for expr in EXPRESSIONS:
        assert not set(re.findall(r"(?:rate|increase)\((\S+?)\{", expr)) & gauges, expr


def test_every_selector_is_templated() -> None:
    """Model and instance can be chosen in every panel."""
    for expr in EXPRESSIONS:
        assert expr.count("{") == expr.count('model_name=~"$model",instance=~"$instance"'), expr


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


def test_ids_are_unique() -> None:
    """Dashboards can be installed side by side, panels addressed by id."""
    documents = [json.loads(text) for text in build.files().values()]
    assert len({document["uid"] for document in documents}) == len(documents)
    for document in documents:
        ids = [panel["id"] for panel in document["panels"]]
        assert len(ids) == len(set(ids))
