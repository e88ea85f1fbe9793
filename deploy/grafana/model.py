"""Panels and dashboards as plain frozen data, and their way to Grafana's JSON.

In expressions ``$S`` stands for the matchers of the chosen model and instance, ``$HTTP`` for those
of metrics that know no model.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

HTTP_SELECTOR = 'instance=~"$instance"'
SELECTOR = f'model_name=~"$model",{HTTP_SELECTOR}'
TAG = "vtoken-serve"
GRID_WIDTH = 24
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}

Json = dict[str, Any]
Kind = Literal["timeseries", "stat", "heatmap", "table"]
Thresholds = tuple[tuple[float, str], ...]


@dataclass(frozen=True)
class Query:
    """One expression; ``legend`` is Grafana's template, as ``{{policy}}``."""

    expr: str
    legend: str = ""

    @property
    def promql(self) -> str:
        """The expression with the matchers filled in; Grafana's variables stay."""
        return self.expr.replace("$S", SELECTOR).replace("$HTTP", HTTP_SELECTOR)


@dataclass(frozen=True)
class Panel:
    """One panel. ``unit`` is Grafana's name; ``thresholds`` are (from value, colour), rising."""

    title: str
    description: str
    queries: tuple[Query, ...]
    unit: str = "short"
    kind: Kind = "timeseries"
    width: int = 12
    height: int = 8
    thresholds: Thresholds = ()
    is_stacked: bool = False
    maximum: float | None = None


@dataclass(frozen=True)
class Row:
    """A titled row of panels, placed left to right and wrapped."""

    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True)
class Dashboard:
    """One dashboard; ``uid`` is also its file name."""

    uid: str
    title: str
    description: str
    rows: tuple[Row, ...]
    has_compare: bool = False

    def panels(self) -> Iterable[Panel]:
        """All panels, row by row."""
        for row in self.rows:
            yield from row.panels

    def to_json(self) -> Json:
        """Grafana's document."""
        return {
            "uid": self.uid,
            "title": self.title,
            "description": self.description,
            "tags": [TAG],
            "schemaVersion": 39,
            "version": 1,
            "editable": True,
            "graphTooltip": 1,
            "refresh": "30s",
            "time": {"from": "now-1h", "to": "now"},
            "timezone": "browser",
            "links": [_DASHBOARD_LINKS],
            "annotations": {"list": [_POLICY_ANNOTATION]},
            "templating": {"list": _variables(self.has_compare)},
            "panels": _place(self.rows),
        }


POLICY_CHANGES = Query(
    "max without (engine) (vtoken_policy_info{$S} unless (vtoken_policy_info{$S} offset 1m))"
)
"""Has a value while the policy document is younger than a minute; the annotation's query. One for
all engines of an instance: they are changed together."""

MODELS = "vtoken_policy_info"
INSTANCES = 'vtoken_policy_info{model_name=~"$model"}'
"""Whose labels are offered: the series that every vtoken-serve has, and nobody else."""

_POLICY_ANNOTATION: Json = {
    "name": "Policy changes",
    "datasource": DATASOURCE,
    "enable": True,
    "iconColor": "purple",
    "expr": POLICY_CHANGES.promql,
    "step": "60s",
    "titleFormat": "Policy version {{version}}",
    "textFormat": "{{policy}}, mode {{mode}}, θ_F {{theta_f}} on {{instance}}",
}

_DASHBOARD_LINKS: Json = {
    "title": "vtoken-serve",
    "type": "dashboards",
    "tags": [TAG],
    "asDropdown": False,
    "includeVars": True,
    "keepTime": True,
}


def _variables(has_compare: bool) -> list[Json]:
    source: Json = {"name": "datasource", "label": "Data source", "type": "datasource"}
    variables = [
        {**source, "query": "prometheus"},
        _query_variable("model", "Model", "model_name", MODELS, has_compare),
        _query_variable("instance", "Instance", "instance", INSTANCES, has_compare),
    ]
    if has_compare:
        options = ("15m", "1h", "6h", "1d", "7d")
        compare = {"name": "compare", "label": "Compare with", "type": "custom"}
        current = {"text": "1h", "value": "1h"}
        variables.append({**compare, "query": ",".join(options), "current": current})
    return variables


def _query_variable(name: str, title: str, label: str, selector: str, has_compare: bool) -> Json:
    """Values of a label in the dashboard's time; no ``allValue``, so that All is these and no more.

    A Prometheus that others use as well has ``http_requests_total`` and ``vllm:*`` of theirs, which
    ``.*`` would take in. With a comparison, the values ``$compare`` before are offered, too: pods
    that were replaced meanwhile had other addresses.
    """
    query, regex = f"label_values({selector}, {label})", ""
    if has_compare:
        query = (
            f"query_result(count by ({label}) (count_over_time({selector}[$__range])"
            f" or count_over_time({selector}[$__range] offset $compare)))"
        )
        regex = f'/{label}="([^"]+)"/'
    return {
        "name": name,
        "label": title,
        "type": "query",
        "datasource": DATASOURCE,
        "query": {"query": query, "refId": name},
        "regex": regex,
        "refresh": 2,
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "current": {"text": "All", "value": "$__all"},
    }


def _place(rows: Sequence[Row]) -> list[Json]:
    """Lay rows out on Grafana's grid of 24 columns, top to bottom."""
    placed: list[Json] = []
    top = 0
    for row in rows:
        head = {"type": "row", "title": row.title, "collapsed": False, "panels": []}
        placed.append({**head, "gridPos": {"h": 1, "w": GRID_WIDTH, "x": 0, "y": top}})
        top, left, height = top + 1, 0, 0
        for panel in row.panels:
            if left + panel.width > GRID_WIDTH:
                top, left, height = top + height, 0, 0
            position = {"h": panel.height, "w": panel.width, "x": left, "y": top}
            placed.append({**_panel_json(panel), "gridPos": position})
            left, height = left + panel.width, max(height, panel.height)
        top += height
    return [{"id": number, **panel} for number, panel in enumerate(placed, start=1)]


def _panel_json(panel: Panel) -> Json:
    return {
        "type": panel.kind,
        "title": panel.title,
        "description": panel.description,
        "datasource": DATASOURCE,
        "targets": [_target(panel, i, query) for i, query in enumerate(panel.queries)],
        "fieldConfig": {"defaults": _field_defaults(panel), "overrides": []},
        "options": _options(panel),
    }


def _target(panel: Panel, index: int, query: Query) -> Json:
    target: Json = {
        "refId": chr(ord("A") + index),
        "datasource": DATASOURCE,
        "expr": query.promql,
        "legendFormat": query.legend,
    }
    if panel.kind == "heatmap":
        # Grafana takes cumulative buckets apart by their label "le"; other rows are as they come.
        target["format"] = "heatmap" if query.legend == "{{le}}" else "time_series"
    elif panel.kind in ("stat", "table"):
        target["instant"] = True
        target["format"] = "table" if panel.kind == "table" else "time_series"
    return target


def _field_defaults(panel: Panel) -> Json:
    steps: list[Json] = [{"color": "green", "value": None}]
    steps += [{"color": colour, "value": value} for value, colour in panel.thresholds]
    defaults: Json = {
        "unit": panel.unit,
        "min": 0,
        "thresholds": {"mode": "absolute", "steps": steps},
    }
    if panel.maximum is not None:
        defaults["max"] = panel.maximum
    if panel.kind == "timeseries":
        stacking = {"mode": "normal" if panel.is_stacked else "none"}
        style = {"mode": "line" if panel.thresholds else "off"}
        fill = 30 if panel.is_stacked else 5
        custom = {"fillOpacity": fill, "stacking": stacking, "thresholdsStyle": style}
        defaults["custom"] = {**custom, "showPoints": "never", "lineWidth": 1}
    return defaults


def _options(panel: Panel) -> Json:
    if panel.kind == "stat":
        reduce = {"calcs": ["lastNotNull"], "fields": "", "values": False}
        return {"reduceOptions": reduce, "colorMode": "background", "graphMode": "none"}
    if panel.kind == "heatmap":
        axis = {"yAxis": {"unit": panel.unit}, "rowsFrame": {"layout": "le"}}
        return {"calculate": False, "color": {"scheme": "Oranges"}, **axis}
    if panel.kind == "table":
        return {"showHeader": True}
    legend = {"displayMode": "list", "placement": "bottom", "showLegend": True}
    return {"legend": legend, "tooltip": {"mode": "multi", "sort": "desc"}}
