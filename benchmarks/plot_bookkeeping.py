"""Draws ``docs/images/bookkeeping.png`` from results of :mod:`benchmarks.bookkeeping`.

Needs matplotlib, which no other part needs: ``pip install matplotlib``.

    python -m benchmarks.plot_bookkeeping docs/evaluation/bookkeeping.json OUT.png
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

GOAL_MS = 1.0
COLOURS = {4096: "tab:blue", 16384: "tab:red"}
PHASES = {
    "sync": "new tokens",
    "rows": "rows",
    "plan": "plan",
    "settle": "commit",
    "policy": "policy",
    "evict": "evict",
}

Result = dict[str, Any]


def curve(results: list[Result], num_tokens: int, statistic: str) -> tuple[list[int], list[float]]:
    """Numbers of requests and milliseconds of one line."""
    points = sorted(
        (r["case"]["num_requests"], r["milliseconds"]["total"][statistic])
        for r in results
        if r["case"]["num_tokens"] == num_tokens
    )
    return [x for x, _ in points], [y for _, y in points]


def draw_curves(axes: Any, data: dict[str, list[Result]]) -> None:
    """Median and mean over the number of requests; before the optimisation dashed."""
    for num_tokens, colour in COLOURS.items():
        label = f"{num_tokens // 1024}K tokens"
        axes.plot(*curve(data["after"], num_tokens, "median"), "o-", color=colour, label=label)
        x, y = curve(data["after"], num_tokens, "mean")
        axes.plot(x, y, ":", color=colour, label=f"{label}, mean")
        x, y = curve(data["before"], num_tokens, "median")
        axes.plot(x, y, "x--", color=colour, alpha=0.4, label=f"{label}, before")
    axes.axhline(GOAL_MS, color="grey", linewidth=0.8)
    axes.set(xscale="log", yscale="log", xlabel="requests", ylabel="ms of CPU per step")
    ticks = curve(data["after"], 16384, "median")[0]
    axes.set_xticks(ticks, [str(n) for n in ticks])
    axes.minorticks_off()
    axes.set_title("Bookkeeping per step (median)")
    axes.legend(fontsize=8)


def draw_split(axes: Any, data: dict[str, list[Result]], num_requests: int = 512) -> None:
    """Where the mean step of one size goes, before and after."""
    bars = [(name, n) for n in COLOURS for name in ("before", "after")]
    labels = [f"{name}\n{n // 1024}K" for name, n in bars]
    bottom = [0.0] * len(bars)
    for phase, label in PHASES.items():
        heights = [
            next(
                r["milliseconds"][phase]["mean"]
                for r in data[name]
                if (r["case"]["num_requests"], r["case"]["num_tokens"]) == (num_requests, n)
            )
            for name, n in bars
        ]
        axes.bar(labels, heights, bottom=bottom, label=label)
        bottom = [b + h for b, h in zip(bottom, heights, strict=True)]
    axes.set(ylabel="ms of CPU per step, mean", title=f"Parts at {num_requests} requests")
    axes.legend(fontsize=8)


def main() -> None:
    """Read the JSON file named first, write the picture named second."""
    pyplot = importlib.import_module("matplotlib.pyplot")
    data = json.loads(Path(sys.argv[1]).read_text())
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    draw_curves(left, data)
    draw_split(right, data)
    figure.savefig(sys.argv[2], dpi=90)


if __name__ == "__main__":
    main()
