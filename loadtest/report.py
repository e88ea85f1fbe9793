"""Writes what a scenario found as JSON and Markdown, and a table for the terminal."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from loadtest.machine import describe_machine, describe_versions
from loadtest.outcome import Outcome, describe_arms, describe_comparisons

_MAX_COLUMNS = 8


def build(
    scenario: str,
    outcome: Outcome,
    *,
    command: str,
    size: str,
    load: Mapping[str, Any],
    notes: Sequence[str] = (),
) -> dict[str, Any]:
    """The result as plain data.

    Args:
        scenario: its name.
        outcome: what was measured.
        command: that made it.
        size: ``full``, ``quick`` or ``smoke``.
        load: of the machine before and after, and how long it took.
        notes: sentences.
    """
    return {
        "scenario": scenario,
        "command": command,
        "size": size,
        "machine": describe_machine(),
        "versions": describe_versions(),
        "load": dict(load),
        "config": outcome.config,
        "arms": describe_arms(outcome.arms),
        "comparisons": describe_comparisons(outcome),
        "details": outcome.details,
        "notes": list(notes),
        "not_measured": outcome.not_measured,
    }


def write(result: Mapping[str, Any], folder: Path) -> Path:
    """Write JSON and Markdown; the path of the JSON."""
    folder.mkdir(parents=True, exist_ok=True)
    name = result["scenario"]
    path = folder / f"{name}.json"
    path.write_text(dump(result))
    (folder / f"{name}.md").write_text(markdown(result))
    return path


def dump(result: Mapping[str, Any]) -> str:
    """JSON with each list of numbers on one line, so that a change of a sample is a line's."""
    return _dump(result, 0) + "\n"


def _dump(value: Any, depth: int) -> str:
    pad, end = " " * (depth + 1), " " * depth
    if isinstance(value, Mapping) and value:
        lines = [f"{pad}{json.dumps(str(k))}: {_dump(v, depth + 1)}" for k, v in value.items()]
        return "{\n" + ",\n".join(lines) + f"\n{end}}}"
    is_nested = isinstance(value, list | tuple) and any(
        isinstance(v, Mapping | list | tuple | str) for v in value
    )
    if is_nested:
        return "[\n" + ",\n".join(pad + _dump(v, depth + 1) for v in value) + f"\n{end}]"
    return json.dumps(value, ensure_ascii=False)


def table(result: Mapping[str, Any]) -> str:
    """Arms as rows, metrics as columns: mean and half of the interval's width."""
    arms = result["arms"]
    metrics = list(dict.fromkeys(m for arm in arms.values() for m in arm))[:_MAX_COLUMNS]
    rows = [["arm", *metrics]]
    rows += [[name, *(_cell(arm.get(m)) for m in metrics)] for name, arm in arms.items()]
    return markdown_table(rows)


def comparison_table(result: Mapping[str, Any]) -> str:
    """Ratios with their intervals."""
    rows = [["comparison", "ratio", "95 % interval", "pairs", "pairs for 5 %"]]
    for name, found in result["comparisons"].items():
        interval = "–" if found["ci95"] is None else " … ".join(f"{x:.3f}" for x in found["ci95"])
        needed = str(found.get("pairs_for_5_percent", "–"))
        rows.append([name, f"{found['ratio']:.3f}", interval, str(found["pairs"]), needed])
    return markdown_table(rows) if len(rows) > 1 else ""


def markdown_table(rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; the first row is its head."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "| " + " | ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) + " |"
        for row in rows
    ]
    rule = "|" + "|".join("-" * (w + 1) + (":" if i else "-") for i, w in enumerate(widths)) + "|"
    return "\n".join([lines[0], rule, *lines[1:]])


def markdown(result: Mapping[str, Any]) -> str:
    """The whole report."""
    machine, load = result["machine"], result["load"]
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    parts = [
        f"# {result['scenario']} ({result['size']})",
        f"`{result['command']}`",
        f"Machine: {machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB, "
        f"{machine['os']}. Load average before {load['before']}, after {load['after']}; "
        f"{load['minutes']} minutes. Versions: {versions}.",
        table(result),
        comparison_table(result),
        "\n".join(f"* {note}" for note in result["notes"]),
        "Not measured: " + " ".join(result["not_measured"]) if result["not_measured"] else "",
        "Configuration:\n\n```json\n" + json.dumps(result["config"], indent=1) + "\n```",
    ]
    return "\n\n".join(filter(None, parts)) + "\n"


def _cell(metric: Mapping[str, Any] | None) -> str:
    if metric is None or metric["mean"] is None:
        return "–"
    mean, interval = metric["mean"], metric["ci95"]
    if interval is None or interval[0] == interval[1]:
        return f"{mean:.4g}"
    return f"{mean:.4g} ({interval[0]:.4g} … {interval[1]:.4g})"
