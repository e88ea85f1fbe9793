"""Tables of docs/performance.md: a decode step, bookkeeping at scale, adaptive θ_F."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tests.loadtest.published.cells import Cell, marked
from tests.loadtest.published.numbers import number
from tests.loadtest.published.results import Result, load
from tests.loadtest.published.tables import Column, Row, Table


def _step(key: str, result: Result) -> Mapping[str, Any]:
    """The key is the context and the arm."""
    context, _, arm = key.partition(" ")
    found: Mapping[str, Any] = result.data[context][arm]
    return found


def quartiles(name: str) -> Cell:
    """``1.01 **1.06** 1.10``."""

    def cell(result: Result, key: str) -> str:
        low, median, high = (number(value, 2) for value in _step(key, result)[name])
        return f"{low} **{median}** {high}"

    return cell


STEP = Table(
    name="decode step",
    source="step_time",
    labels=["context", "arm"],
    columns=[
        Column("step", quartiles("step_ratio_to_stock")),
        Column("attention", quartiles("attention_ratio_to_stock")),
        Column("F", lambda result, key: number(_step(key, result)["waste_ratio"], 2)),
    ],
    rows=[
        Row([context, label], f"{context} {arm}")
        for context in ("512", "1500")
        for label, arm in (
            ("`naive`, `none`: indirection only", "naive none"),
            ("`naive`, `random`", "naive random 50 %"),
            ("`lazy`, `random`", "lazy random 50 %"),
        )
    ],
    align="rlllr",
    grouped=False,
)


def milliseconds(statistic: str, digits: int = 2) -> Cell:
    """Of a step's bookkeeping; the key is the number of requests and of tokens."""

    def cell(result: Result, key: str) -> str:
        requests, tokens = map(int, key.split())
        (found,) = (
            entry["milliseconds"]["total"]
            for entry in result.data["after"]
            if (entry["case"]["num_requests"], entry["case"]["num_tokens"]) == (requests, tokens)
        )
        return number(found[statistic], digits)

    return cell


_MEDIAN = milliseconds("median")

BOOKKEEPING = Table(
    name="bookkeeping",
    source="bookkeeping",
    labels=["requests", "tokens"],
    columns=[
        Column("median ms", _MEDIAN),
        Column("mean ms", milliseconds("mean")),
        Column("p99 ms", milliseconds("p99", 1)),
    ],
    rows=[
        Row(
            [str(requests), f"{tokens // 1024}K"],
            f"{requests} {tokens}",
            instead={0: marked(_MEDIAN)} if (requests, tokens) == (512, 16384) else {},
        )
        for tokens in (4096, 16384)
        for requests in (64, 128, 256, 512, 1024)
    ],
    align="r" * 5,
    grouped=False,
)


def simulated(
    name: str,
    source: str,
    loads: tuple[str, str],
    label: str,
    spelt: Callable[[str], str],
    *,
    plans: bool = False,
) -> Table:
    """A simulation of bursts: waits in engine steps, by load and threshold.

    Args:
        name: of the table.
        source: name of the JSON.
        loads: labels of the loads ``tuned`` and ``held_out``.
        label: head of the column of arms.
        spelt: an arm as it is written.
        plans: whether their number is shown.
    """

    def figure(field: str, digits: int = 0) -> Cell:
        def cell(result: Result, key: str) -> str:
            load_name, _, arm = key.partition(" ")
            return number(result.data[load_name][arm][field], digits)

        return cell

    return Table(
        name=name,
        source=source,
        labels=["load", label],
        columns=[
            Column("mean wait", figure("mean_wait_steps", 1)),
            Column("p90 wait", figure("p90_wait_steps", 1)),
            Column("preempted", figure("preempted")),
            Column("moved tokens", figure("moved_tokens")),
            *([Column("plans", figure("batches"))] if plans else []),
            Column("mean F", figure("mean_waste_ratio", 2)),
        ],
        rows=[
            Row([title, spelt(arm)], f"{load_name} {arm}")
            for load_name, title in zip(("tuned", "held_out"), loads, strict=True)
            for arm in load(source).data[load_name]
        ],
    )


ADAPTIVE = simulated(
    "adaptive",
    "adaptive_threshold",
    ("tuned", "held out"),
    "θ_F",
    lambda arm: arm.removeprefix("fixed "),
)

TABLES = [STEP, BOOKKEEPING, ADAPTIVE]
