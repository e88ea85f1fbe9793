"""The table at the top of docs/evaluation.md, of figures from several files."""

from __future__ import annotations

from tests.loadtest.published.cells import joined, of, plain, ratio
from tests.loadtest.published.memory import RETAINED
from tests.loadtest.published.numbers import number
from tests.loadtest.published.results import Result
from tests.loadtest.published.tables import Column, Row, Table


def blocks_saved(result: Result, _: str) -> str:
    """Least and most over policies and workloads: ``−44 … −46 %``."""
    ratios = [
        result.ratio(RETAINED, f"{workload}/{policy}/lazy", f"{workload}/{policy}/naive")
        for workload in ("document", "conversation")
        for policy in ("h2o", "random")
    ]
    saved = sorted(100 * (found.value - 1) for found in ratios if found)
    assert len(saved) == 4
    return f"{number(saved[-1])} … {number(saved[0])} %"


def indirection(result: Result, _: str) -> str:
    """Ends of the interval in per cent: ``+ 5 … 7 % (CPU)``."""
    found = result.ratio("mean_tpot_ms", "indirection@512", "stock@512")
    assert found is not None
    assert found.low is not None
    assert found.high is not None
    return f"+ {number(100 * (found.low - 1))} … {number(100 * (found.high - 1))} % (CPU)"


def identical(result: Result, _: str) -> str:
    """``144 of 144 identical to the bit``."""
    parts = [part for name, part in result.data["details"].items() if name.startswith("identity/")]
    same, all_of_them = (sum(part[name] for part in parts) for name in ("identical", "generations"))
    return f"{same} of {all_of_them} identical to the bit"


SUMMARY = Table(
    name="in short",
    source="",
    labels=[""],
    columns=[Column("here"), Column("paper")],
    rows=[
        Row(
            ["[what eviction leaves unused](#what-eviction-leaves-unused), scattered policies: F"],
            cells=[
                of(
                    "waste",
                    joined(
                        " and ",
                        plain("waste_ratio", 2, "document/h2o"),
                        plain("waste_ratio", 2, "document/random"),
                    ),
                ),
                "0.40 … 0.60",
            ],
        ),
        Row(
            ["[blocks held](#blocks-held-with-the-same-evictions), `lazy` against `naive`"],
            cells=[of("paired", blocks_saved), "−27 … −72 %"],
        ),
        Row(
            [
                "[clients](#how-many-fit-into-a-fixed-pool) that a tight pool bears, "
                "`lazy` against `naive`"
            ],
            cells=[
                of(
                    "frontier_sweep",
                    joined(
                        " against ",
                        plain("highest_feasible", arm="random/lazy, sweep@200"),
                        plain("highest_feasible", arm="random/naive, sweep@200"),
                    ),
                ),
                "8 against 5",
            ],
        ),
        Row(
            ["[throughput](#throughput-within-a-latency-limit) within 1.05 × the p95 of `naive`"],
            cells=[
                of("sla", ratio("selected_throughput", "random/naive", "random/lazy")),
                "× 1.10 … 1.37",
            ],
        ),
        Row(
            [
                "[the indirection alone](#what-it-costs-against-stock-vllm), time per token "
                "against stock vLLM"
            ],
            cells=[of("overhead", indirection), "below 1 % (H100)"],
        ),
        Row(
            [
                "[answers](#are-answers-the-same-with-and-without-repacking) "
                "with and without repacking"
            ],
            cells=[of("quality", identical), "ROUGE-L −0.0016"],
        ),
    ],
)
