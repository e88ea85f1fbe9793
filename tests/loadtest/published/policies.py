"""Tables of docs/policies.md: losses per policy and ratio, beside kvpress, and caps of blocks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from benchmarks.kvpress_table import KEEP_RATIOS, PAIRS, Rows, by_key, difference, same_cases
from benchmarks.plot_quality import TASKS
from tests.loadtest.published.cells import Cell
from tests.loadtest.published.numbers import number
from tests.loadtest.published.performance import simulated
from tests.loadtest.published.results import Result, load
from tests.loadtest.published.tables import Column, Row, Table

LEVELS = (
    "h2o",
    "snapkv",
    "scissorhands",
    "tova",
    "rkv",
    "knorm",
    "paged_eviction",
    "streaming_llm",
    "random",
)
BY_COPY = (
    "snapkv",
    "h2o",
    "rkv",
    "paged_eviction",
    "tova",
    "scissorhands",
    "knorm",
    "random",
)
"""Policies by what they lose of a list at a half, the best first."""


@cache
def ours() -> Rows:
    """All cases, by task, policy and ratio."""
    return by_key(dict(load("policy_quality").data), "policy")


@cache
def presses() -> Rows:
    """Of kvpress, by task, press and ratio."""
    return by_key(dict(load("kvpress_quality").data), "press")


@cache
def ours_beside_presses() -> Rows:
    """Ours, of the cases that kvpress went through."""
    return same_cases(ours(), presses())


def losses(rows: Rows, name: str) -> list[str]:
    """Per task: nats per token at each ratio; full attention has one."""
    ratios = (1.0,) if name == "none" else KEEP_RATIOS
    return [
        " / ".join(number(rows[task, name, ratio]["nll"], 2) for ratio in ratios) for task in TASKS
    ]


def _of_task(index: int) -> Cell:
    """The key is a policy."""
    return lambda _, key: losses(ours(), key)[index]


def _against_window(task: str) -> Cell:
    def cell(_: Result, key: str) -> str:
        return difference(ours()[task, key, 0.5], ours()[task, "streaming_llm", 0.5])

    return cell


def _beside(index: int, *, is_press: bool) -> Cell:
    return lambda _, key: losses(presses() if is_press else ours_beside_presses(), key)[index]


def _press_less_policy(task: str) -> Cell:
    """The key is both names."""

    def cell(_: Result, key: str) -> str:
        press, policy = key.split()
        return difference(presses()[task, press, 0.5], ours_beside_presses()[task, policy, 0.5])

    return cell


def _table(
    name: str, source: str, label: str, rows: Sequence[Row], cells: Sequence[Cell | str]
) -> Table:
    columns = [Column(head, cell) for head, cell in zip(TASKS.values(), cells, strict=True)]
    return Table(name, source, [label], columns, rows, align="l" * (1 + len(columns)))


def _beside_rows() -> list[Row]:
    def row(label: str, key: str, *, is_press: bool) -> Row:
        return Row([label], key, [_beside(i, is_press=is_press) for i in range(len(TASKS))])

    found = [row("full attention", "none", is_press=False)]
    for title, (press, policy) in PAIRS.items():
        found.append(row(title, press, is_press=True))
        if policy:
            found.append(row(f"`{policy}`", policy, is_press=False))
    return found


TABLES = [
    simulated(
        "block cap",
        "block_cap",
        ("256-token budget", "320-token budget"),
        "trigger",
        lambda arm: f"{arm.replace('fixed', 'θ_F')}{' blocks' if 'cap' in arm else ''}",
        plans=True,
    ),
    _table(
        "losses",
        "policy_quality",
        "policy",
        [Row(["full attention"], "none"), *(Row([f"`{policy}`"], policy) for policy in LEVELS)],
        [_of_task(index) for index in range(len(TASKS))],
    ),
    _table(
        "losses, against streaming_llm",
        "policy_quality",
        "policy",
        [Row([f"`{policy}`"], policy) for policy in BY_COPY],
        [_against_window(task) for task in TASKS],
    ),
    _table(
        "losses, kvpress", "kvpress_quality", "press, policy", _beside_rows(), [""] * len(TASKS)
    ),
    _table(
        "losses, press less policy",
        "kvpress_quality",
        "at a half",
        [
            Row([f"{title} − `{policy}`"], f"{press} {policy}")
            for title, (press, policy) in PAIRS.items()
            if policy
        ],
        [_press_less_policy(task) for task in TASKS],
    ),
]
