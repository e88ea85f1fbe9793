"""Tables of docs/evaluation.md in which one setting after the other is changed."""

from __future__ import annotations

from collections.abc import Sequence

from tests.loadtest.published.cells import Cell, mean, plain, ratio
from tests.loadtest.published.numbers import number
from tests.loadtest.published.results import Result
from tests.loadtest.published.tables import Column, Row, Table

_SETTINGS = {
    "theta_f": ("θ_F", "0.25", ("0.05", "0.1", "0.25", "0.5", "0.7", "0.9")),
    "keep_ratio": ("keep ratio", "0.5", ("0.3", "0.4", "0.5", "0.6", "0.7")),
    "max_source_blocks": ("B, source blocks per plan", "32", ("2", "8", "32")),
    "evict_interval_tokens": ("tokens between evictions", "16", ("1", "16", "64")),
    "block_size": ("block size", "16", ("16", "32", "48", "64")),
}
"""Label, default and values of each setting."""


def slots(result: Result, key: str) -> str:
    """Held blocks in tokens."""
    held = result.mean(key, "end_retained_blocks")
    assert held is not None
    setting, _, value = key.partition("@")
    return number(held.value * (int(value) if setting == "block_size" else 16))


def _against_default(metric: str) -> Cell:
    def cell(result: Result, key: str) -> str:
        setting = key.partition("@")[0]
        return ratio(metric, f"{setting}@{_SETTINGS[setting][1]}")(result, key)

    return cell


def _values(settings: Sequence[str]) -> list[tuple[str, str, str]]:
    """Label, value (the default in bold) and key of each arm."""
    return [
        (label, f"**{value}**" if value == default else value, f"{setting}@{value}")
        for setting in settings
        for label, default, values in [_SETTINGS[setting]]
        for value in values
    ]


SENSITIVITY = Table(
    name="sensitivity",
    source="sensitivity",
    labels=["setting", "value"],
    columns=[
        Column("blocks held", mean("end_retained_blocks", 1)),
        Column("needed", plain("end_ideal_blocks")),
        Column("slots", slots),
        Column("tokens copied", mean("relocated_tokens")),
        Column("plans", mean("relocations")),
        Column("tokens per second", mean("output_throughput", 1)),
        Column("against default", _against_default("output_throughput")),
        Column("p95, s", mean("p95_e2el_ms", 2, scale=1e-3)),
        Column("against default", _against_default("p95_e2el_ms")),
    ],
    rows=[Row([label, value], key) for label, value, key in _values(list(_SETTINGS))],
    align="lrrrrrrrrrr",
)

SENSITIVITY_LONG = Table(
    name="sensitivity, longer requests",
    source="sensitivity_long",
    labels=["θ_F"],
    columns=[
        Column("blocks held at the end, per request", mean("end_retained_blocks", 1)),
        Column("needed", plain("end_ideal_blocks")),
        Column("tokens copied for the load", mean("relocated_tokens", nearest=10)),
        Column("plans", mean("relocations")),
    ],
    rows=[Row([value], key) for _, value, key in _values(["theta_f"])],
    align="rrrrr",
)

TABLES = [SENSITIVITY, SENSITIVITY_LONG]
