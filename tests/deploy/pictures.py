"""Pictures of the dashboards for docs/, drawn from a real run: panel by panel, by grid position.

python -m tests.deploy.pictures    # starts the CPU preset, loads it, writes docs/dashboards/*.svg

Each expression is asked through ``query_range`` of a real Prometheus. The drawing is our own,
not Grafana's: lines, numbers and heatmaps without its decoration.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterable
from html import escape
from pathlib import Path
from typing import Any

from deploy.grafana.build import DASHBOARDS
from deploy.grafana.model import GRID_WIDTH, Dashboard
from tests.deploy import tools
from tests.deploy.helm import Helm
from tests.deploy.live import Live, running

FOLDER = tools.ROOT / "docs" / "dashboards"
CELL_WIDTH, CELL_HEIGHT = 50, 26
COLOURS = ("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b", "#e377c2")

Json = dict[str, Any]
Series = list[Json]
Points = list[tuple[float, float]]


def main() -> None:
    """Run the service and write one picture per dashboard."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    helm, binary = Helm(tools.helm("helm4")), tools.debian_tool("prometheus")
    with tempfile.TemporaryDirectory() as folder, running(helm, binary, Path(folder)) as live:
        for dashboard in DASHBOARDS:
            path = FOLDER / f"{dashboard.uid}.svg"
            path.write_text(draw(dashboard, live), encoding="utf-8")


def draw(dashboard: Dashboard, live: Live) -> str:
    """The dashboard as SVG."""
    panels = dashboard.to_json()["panels"]
    height = max(p["gridPos"]["y"] + p["gridPos"]["h"] for p in panels) * CELL_HEIGHT + 30
    width = GRID_WIDTH * CELL_WIDTH
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"'
        ' font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="#f4f5f5"/>',
        f'<text x="8" y="20" font-size="16">{escape(dashboard.title)}</text>',
    ]
    fill = live.fill(dashboard)
    for panel in panels:
        parts.append(_panel(panel, live, fill))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(panel: Json, live: Live, fill: Callable[[str], str]) -> str:
    place = panel["gridPos"]
    x, y = place["x"] * CELL_WIDTH, place["y"] * CELL_HEIGHT + 30
    width, height = place["w"] * CELL_WIDTH - 6, place["h"] * CELL_HEIGHT - 6
    title = f'<text x="8" y="16" font-weight="bold">{escape(panel["title"])}</text>'
    if panel["type"] == "row":
        return f'<g transform="translate({x},{y})">{title}</g>'
    targets = [{**t, **{n: fill(t[n]) for n in ("expr", "legendFormat")}} for t in panel["targets"]]
    queries = [(target, _query(target["expr"], live)) for target in targets]
    drawing = {"stat": _stat, "table": _table, "heatmap": _heatmap}.get(panel["type"], _lines)
    frame = f'<rect width="{width}" height="{height}" fill="white" stroke="#d0d0d0"/>'
    unit = panel["fieldConfig"]["defaults"]["unit"]
    inner = drawing(queries, unit, width, height)
    return f'<g transform="translate({x},{y})">{frame}{title}{inner}</g>'


def _query(expr: str, live: Live) -> Series:
    series = live.prometheus.query_range(expr, live.start, live.end)
    return [one for one in series if _points(one)]


def _points(one: Json) -> Points:
    return [(float(t), float(v)) for t, v in one["values"] if math.isfinite(float(v))]


def _lines(queries: list[tuple[Json, Series]], unit: str, width: int, height: int) -> str:
    named = [(_legend(t, one), _points(one)) for t, series in queries for one in series]
    if not named:
        return ""
    times = [t for _, points in named for t, _ in points]
    top = max(value for _, points in named for _, value in points) or 1
    left, right, low, high = 52, width - 8, height - 34, 26
    span = (max(times) - min(times)) or 1
    parts = [_axis(left, right, low, high, top, unit)]
    for number, (name, points) in enumerate(named):
        colour = COLOURS[number % len(COLOURS)]
        path = " ".join(
            f"{left + (t - min(times)) / span * (right - left):.1f},"
            f"{low - value / top * (low - high):.1f}"
            for t, value in points
        )
        parts.append(
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>'
        )
        x, y = 10 + number % 4 * (width // 4), height - 18 + number // 4 * 12
        parts.append(f'<text x="{x}" y="{y}" fill="{colour}" font-size="9">{escape(name)}</text>')
    return "".join(parts)


def _axis(left: int, right: int, low: int, high: int, top: float, unit: str) -> str:
    lines = []
    for share in (0, 0.5, 1):
        y = low - share * (low - high)
        lines.append(f'<line x1="{left}" x2="{right}" y1="{y}" y2="{y}" stroke="#eeeeee"/>')
        text = _number(share * top, unit)
        lines.append(
            f'<text x="{left - 4}" y="{y + 4}" text-anchor="end" font-size="9">{text}</text>'
        )
    return "".join(lines)


def _stat(queries: list[tuple[Json, Series]], unit: str, width: int, height: int) -> str:
    values = [_points(one)[-1][1] for _, series in queries for one in series]
    text = _number(values[-1], unit) if values else "–"
    middle = f'x="{width / 2}" y="{height / 2 + 16}"'
    return f'<text {middle} text-anchor="middle" font-size="24">{text}</text>'


def _table(queries: list[tuple[Json, Series]], unit: str, width: int, height: int) -> str:
    names = ("instance", "model_name", "policy", "mode", "theta_f", "version")
    rows = [names, *(tuple(o["metric"].get(n, "") for n in names) for _, s in queries for o in s)]
    cells = []
    for number, row in enumerate(rows[: (height - 30) // 16]):
        for column, text in enumerate(row):
            x, y = 10 + column * (width - 20) / len(names), 40 + number * 16
            cells.append(f'<text x="{x:.0f}" y="{y}" font-size="10">{escape(text)}</text>')
    return "".join(cells)


def _heatmap(queries: list[tuple[Json, Series]], unit: str, width: int, height: int) -> str:
    ((target, series),) = queries
    rows = list(_heatmap_rows(target["legendFormat"].strip("{}"), series))
    times = sorted({t for _, values in rows for t in values})
    top = max((v for _, values in rows for v in values.values()), default=0) or 1
    left, low, high = 52, height - 12, 26
    cell_width = (width - 8 - left) / max(1, len(times))
    cell_height = (low - high) / max(1, len(rows))
    parts = []
    for number, (name, values) in enumerate(rows):
        y = low - (number + 1) * cell_height
        label = _number(float(name), unit)
        parts.append(
            f'<text x="{left - 4}" y="{y + 9:.1f}" text-anchor="end" font-size="8">{label}</text>'
        )
        for column, t in enumerate(times):
            if share := values.get(t, 0) / top:
                place = f'x="{left + column * cell_width:.1f}" y="{y:.1f}"'
                size = f'width="{cell_width:.1f}" height="{cell_height:.1f}"'
                parts.append(f'<rect {place} {size} fill="#d9480f" opacity="{share:.2f}"/>')
    return "".join(parts)


def _heatmap_rows(label: str, series: Series) -> Iterable[tuple[str, dict[float, float]]]:
    """The rows from below; buckets with a label ``le`` count those below them, too."""
    below: dict[float, float] = {}
    for one in sorted(series, key=lambda o: float(o["metric"][label])):
        values = dict(_points(one))
        yield one["metric"][label], {t: max(0.0, v - below.get(t, 0)) for t, v in values.items()}
        below = values if label == "le" else {}


def _legend(target: Json, one: Json) -> str:
    text = target["legendFormat"]
    for name, value in one["metric"].items():
        text = text.replace(f"{{{{{name}}}}}", value)
    return str(text)


def _number(value: float, unit: str) -> str:
    if math.isinf(value):
        return "more"
    if unit == "percentunit":
        return f"{value * 100:.3g} %"
    if unit == "s" and 0 < value < 1:
        return f"{value * 1000:.3g} ms"
    text = f"{value:.3g}" if value < 1000 else f"{value:,.0f}"
    for limit, letter in ((1e9, "G"), (1e6, "M")):
        if value >= limit:
            text = f"{value / limit:.3g} {letter}"
            break
    return text + {"s": " s", "Bps": "B/s", "reqps": "/s"}.get(unit, "")


if __name__ == "__main__":
    main()
