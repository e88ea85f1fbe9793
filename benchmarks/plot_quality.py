"""Draws ``docs/images/policy_quality.png`` from results of :mod:`benchmarks.policy_quality`.

Needs matplotlib, which no other part needs: ``pip install matplotlib``.

    python -m benchmarks.plot_quality docs/evaluation/policy_quality.json OUT.png
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

TASKS = {"text": "text", "copy": "copy", "lookup": "lookup", "lookup_later": "lookup, asked later"}
POLICIES = {
    "snapkv": "tab:green",
    "h2o": "tab:red",
    "streaming_llm": "black",
    "scissorhands": "tab:orange",
    "tova": "tab:purple",
    "rkv": "tab:blue",
    "paged_eviction": "tab:brown",
    "knorm": "tab:pink",
    "random": "tab:grey",
}

Row = dict[str, Any]


def standard_error(row: Row) -> float:
    """Of the mean loss per token over the cases of a row."""
    means = [loss / n for loss, n in zip(row["case_nll"], row["case_tokens"], strict=True)]
    middle = sum(means) / len(means)
    variance = sum((mean - middle) ** 2 for mean in means) / max(1, len(means) - 1)
    return float((variance / len(means)) ** 0.5)


def draw_task(axes: Any, rows: list[Row], title: str) -> None:
    """Loss over keep ratio, a line per policy; whiskers are standard errors over the cases."""
    full = next(row for row in rows if row["policy"] == "none")
    axes.axhline(full["nll"], color="grey", linewidth=0.8, linestyle=":", label="full attention")
    for i, (policy, colour) in enumerate(POLICIES.items()):
        points = sorted((r for r in rows if r["policy"] == policy), key=lambda r: r["keep_ratio"])
        shift = 0.006 * (i - len(POLICIES) / 2)  # whiskers side by side
        axes.errorbar(
            [row["keep_ratio"] + shift for row in points],
            [row["nll"] for row in points],
            [standard_error(row) for row in points],
            fmt="o-",
            markersize=3,
            linewidth=1,
            color=colour,
            label=policy,
        )
    axes.set(title=f"{title} ({full['num_cases']} cases)", xlabel="keep ratio")
    axes.set_xticks([0.25, 0.5, 0.75])


def main() -> None:
    """Draw one panel per task."""
    source, target = map(Path, sys.argv[1:3])
    plt = importlib.import_module("matplotlib.pyplot")
    rows = json.loads(source.read_text())["rows"]
    figure, axes = plt.subplots(1, len(TASKS), figsize=(15, 4.2), layout="constrained")
    for part, (task, title) in zip(axes, TASKS.items(), strict=True):
        draw_task(part, [row for row in rows if row["task"] == task], title)
    axes[0].set_ylabel("nats per token (lower is better)")
    axes[0].legend(fontsize=7)
    figure.savefig(target, dpi=80)


if __name__ == "__main__":
    main()
