"""Pictures of results, with matplotlib where it is installed: ``pip install matplotlib``."""

from __future__ import annotations

import importlib
import importlib.util
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

Result = Mapping[str, Any]
Plot = Mapping[str, Any]
"""``metric`` and ``title``; with ``x``, the prefix-free number in the arms' names, a line plot:
arms ``GROUP@X`` become the points X of the line GROUP."""


def draw(result: Result, plots: Sequence[Plot], folder: Path) -> list[Path]:
    """One PNG per plot whose metric was measured into ``folder``; none without matplotlib."""
    if plots and importlib.util.find_spec("matplotlib") is None:
        logger.warning("no plots: matplotlib is not installed")
        return []
    paths = []
    for plot in plots:
        if not any(plot["metric"] in arm for arm in result["arms"].values()):
            continue
        path = folder / f"{result['scenario']}_{plot['metric']}.png"
        _draw_one(result, plot, path)
        paths.append(path)
    return paths


def lines(arms: Mapping[str, Any], metric: str) -> dict[str, list[tuple[float, Any]]]:
    """``{group: [(x, metric), …]}`` of arms named ``GROUP@X``, ascending in x."""
    found: dict[str, list[tuple[float, Any]]] = {}
    for name, values in arms.items():
        group, _, x = name.rpartition("@")
        if group and metric in values:
            found.setdefault(group, []).append((float(x), values[metric]))
    return {group: sorted(points, key=lambda p: p[0]) for group, points in found.items()}


def _draw_one(result: Result, plot: Plot, path: Path) -> None:
    matplotlib = importlib.import_module("matplotlib")
    matplotlib.use("Agg")
    pyplot = importlib.import_module("matplotlib.pyplot")
    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    if "x" in plot:
        _draw_lines(axes, lines(result["arms"], plot["metric"]))
        axes.set(xlabel=plot["x"], ylabel=plot["metric"])
        axes.legend(fontsize=8)
    else:
        _draw_bars(axes, result["arms"], plot["metric"])
        axes.set(xlabel=plot["metric"])
    axes.set_title(plot["title"], fontsize=10)
    figure.savefig(path, dpi=90)
    pyplot.close(figure)


def _draw_lines(axes: Any, found: Mapping[str, Sequence[tuple[float, Any]]]) -> None:
    for group, points in found.items():
        xs = [x for x, _ in points]
        axes.plot(xs, [m["mean"] for _, m in points], "o-", label=group)
        bounds = [m["ci95"] or [m["mean"], m["mean"]] for _, m in points]
        axes.fill_between(xs, [b[0] for b in bounds], [b[1] for b in bounds], alpha=0.2)


def _draw_bars(axes: Any, arms: Mapping[str, Any], metric: str) -> None:
    shown = {name: values[metric] for name, values in arms.items() if metric in values}
    names = list(shown)[::-1]
    means = [shown[name]["mean"] for name in names]
    bounds = [shown[name]["ci95"] or [shown[name]["mean"]] * 2 for name in names]
    errors = [
        [max(0.0, mean - low) for mean, (low, _) in zip(means, bounds, strict=True)],
        [max(0.0, high - mean) for mean, (_, high) in zip(means, bounds, strict=True)],
    ]
    axes.barh(names, means, xerr=errors, color="tab:blue", alpha=0.7)
    axes.tick_params(axis="y", labelsize=7)
