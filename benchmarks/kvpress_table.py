"""Prints the tables of docs/policies.md that put kvpress beside our policies, as Markdown.

Our side is cut to the cases that kvpress went through. Both shuffle the same cases in the same
way, so the first cases of a task are the same ones, which the losses of full attention prove.

    python -m benchmarks.kvpress_table \\
        docs/evaluation/policy_quality.json docs/evaluation/kvpress_quality.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.plot_quality import TASKS, Row, standard_error

KEEP_RATIOS = (0.75, 0.5, 0.25)
PAIRS = {
    "StreamingLLMPress": ("streaming_llm", "streaming_llm"),
    "SnapKVPress": ("snapkv", "snapkv"),
    "TOVAPress": ("tova", "tova"),
    "KnormPress": ("knorm", "knorm"),
    "ObservedAttentionPress": ("observed_attention", "h2o"),
    "RandomPress": ("random", "random"),
    "ExpectedAttentionPress": ("expected_attention", None),
}
"""By its class: the press's name in the results, and the policy of ours that is nearest."""

MAX_ROUNDING = 0.05
"""Nats by which the loss of a whole case may differ between two versions of transformers."""

Rows = dict[tuple[str, str, float], Row]


def by_key(results: dict[str, Any], name: str) -> Rows:
    """Rows by task, method (the field ``name``) and ratio."""
    return {(row["task"], row[name], row["keep_ratio"]): row for row in results["rows"]}


def same_cases(ours: Rows, theirs: Rows) -> Rows:
    """Our rows, cut to the cases that kvpress went through.

    Raises:
        ValueError: full attention has other losses there, so these are not the same cases.
    """
    counts = {task: row["num_cases"] for (task, name, _), row in theirs.items() if name == "none"}
    cut = {key: first_cases(row, counts[key[0]]) for key, row in ours.items() if key[0] in counts}
    for task in counts:
        pair = cut[task, "none", 1.0], theirs[task, "none", 1.0]
        for case, (mine, other) in enumerate(zip(*(row["case_nll"] for row in pair), strict=True)):
            if abs(mine - other) > MAX_ROUNDING:
                raise ValueError(f"{task} case {case} without eviction: {mine} and {other} nats")
    return cut


def first_cases(row: Row, num_cases: int) -> Row:
    """A row of the first cases alone; ``nll`` is the mean per token again."""
    losses, num_tokens = row["case_nll"][:num_cases], row["case_tokens"][:num_cases]
    mean = sum(losses) / sum(num_tokens)
    return {**row, "nll": mean, "num_cases": len(losses), "case_nll": losses} | {
        "case_tokens": num_tokens,
        "num_tokens": sum(num_tokens),
    }


def difference(theirs: Row, ours: Row) -> str:
    """Press less policy in nats per token: mean ± standard error over the paired cases."""
    pairs = zip(theirs["case_nll"], ours["case_nll"], strict=True)
    row = {**ours, "case_nll": [a - b for a, b in pairs]}
    means = [loss / n for loss, n in zip(row["case_nll"], row["case_tokens"], strict=True)]
    mean = sum(means) / len(means)
    signed = f"{mean:+.2f}".replace("-", "−")
    return f"{'0.00' if signed[1:] == '0.00' else signed} ± {standard_error(row):.2f}"


def _line(head: str, cells: list[str]) -> str:
    return " | ".join([f"| {head}", *cells]) + " |"


def _losses(rows: Rows, name: str) -> list[str]:
    return [
        " / ".join(f"{rows[task, name, keep]['nll']:.2f}" for keep in KEEP_RATIOS) for task in TASKS
    ]


def _header(first: str) -> list[str]:
    return [_line(first, list(TASKS.values())), "|---" * (1 + len(TASKS)) + "|"]


def loss_table(ours: Rows, theirs: Rows) -> list[str]:
    """Each press, and under it the policy that is nearest; ``ours`` is of the same cases."""
    full = [f"{ours[task, 'none', 1.0]['nll']:.2f}" for task in TASKS]
    lines = [*_header("press, policy"), _line("full attention", full)]
    for title, (press, policy) in PAIRS.items():
        lines.append(_line(title, _losses(theirs, press)))
        if policy:
            lines.append(_line(f"`{policy}`", _losses(ours, policy)))
    return lines


def difference_table(ours: Rows, theirs: Rows) -> list[str]:
    """Press less policy at a half; ``ours`` is of the same cases."""
    lines = _header("at a half")
    for title, (press, policy) in PAIRS.items():
        if policy:
            pairs = [(theirs[task, press, 0.5], ours[task, policy, 0.5]) for task in TASKS]
            cells = [difference(*pair) for pair in pairs]
            lines.append(_line(f"{title} − `{policy}`", cells))
    return lines


def render(ours_path: Path, theirs_path: Path) -> str:
    """Both tables and the numbers of cases behind them."""
    theirs = by_key(json.loads(theirs_path.read_text()), "press")
    ours = same_cases(by_key(json.loads(ours_path.read_text()), "policy"), theirs)
    counts = [f"{theirs[task, 'none', 1.0]['num_cases']} {title}" for task, title in TASKS.items()]
    tables = [*loss_table(ours, theirs), "", *difference_table(ours, theirs)]
    return "\n".join([*tables, "", "Cases: " + ", ".join(counts)])


def main() -> None:
    """Print the tables of two files of results."""
    print(render(Path(sys.argv[1]), Path(sys.argv[2])))


if __name__ == "__main__":
    main()
