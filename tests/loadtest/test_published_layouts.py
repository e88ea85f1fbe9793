"""Tables of a kind: a new result gets one by naming its file, and what it shows is the file's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from loadtest.outcome import Outcome, describe_arms, describe_comparisons
from tests.loadtest.published import memory, quality, results, speed
from tests.loadtest.published.results import Result
from tests.loadtest.published.tables import Table


def make_result(
    arms: Mapping[str, Mapping[str, Sequence[float]]],
    compared: Sequence[tuple[str, str, Sequence[str]]] = (),
) -> Result:
    """As a scenario writes it: samples per arm and metric, and some arms compared."""
    outcome = Outcome(
        arms={
            name: {metric: list(samples) for metric, samples in arm.items()}
            for name, arm in arms.items()
        }
    )
    for ours, theirs, metrics in compared:
        outcome.compare(ours, theirs, metrics)
    data: dict[str, Any] = {
        "arms": describe_arms(outcome.arms),
        "comparisons": describe_comparisons(outcome),
    }
    return Result("made", data)


@pytest.fixture
def body(monkeypatch: pytest.MonkeyPatch):
    """Cells of a table whose JSON is made."""

    def rows(table: Table, result: Result) -> list[list[str]]:
        monkeypatch.setattr(results, "load", lambda name: result)
        return table.body()

    return rows


def test_overhead_at_another_context(body) -> None:
    """Arms are of that context; stock is compared with nothing, the indirection with stock only."""
    arms = {
        f"{arm}@1500": {"output_throughput": [20.0 + i] * 2, "mean_tpot_ms": [200.0 - 10 * i] * 2}
        for i, (_, arm) in enumerate(speed.ARMS)
    }
    metrics = ("output_throughput", "mean_tpot_ms")
    names = list(arms)
    compared = [(ours, names[0], metrics) for ours in names[1:]]
    compared += [(ours, names[1], metrics) for ours in names[2:]]
    table = speed.overhead("o", "made", 1500)
    stock, indirection, _, lazy = body(table, make_result(arms, compared))
    assert stock == ["stock vLLM (mode `off`)", "20.0", "", "", "200.0", "", ""]
    assert indirection[1:] == ["21.0", "× 1.05", "", "190.0", "× 0.95", ""]
    assert lazy[1:] == ["23.0", "× 1.15", "× 1.10", "170.0", "× 0.85", "× 0.89"]


def test_open_loops(body) -> None:
    """Goodput and latency by rate; a repeat that could not say is no pair."""
    arms = {
        "random/naive open@0.7": {
            "request_goodput": [0.4, 0.5],
            "p95_e2el_ms": [14000.0, 16000.0],
            "p99_ttft_ms": [7000.0],
            "preemptions": [3.0, 5.0],
        },
        "random/lazy open@0.7": {
            "request_goodput": [0.6, 0.75],
            "p95_e2el_ms": [7000.0, float("nan")],
            "p99_ttft_ms": [2000.0],
            "preemptions": [0.0, 0.0],
        },
    }
    pair = ("random/lazy open@0.7", "random/naive open@0.7")
    result = make_result(arms, [(*pair, ("request_goodput", "p95_e2el_ms"))])
    (row,) = body(speed.open_loops("s", "made", [0.7]), result)
    assert row[0] == "0.7"
    assert row[1].startswith("0.45 (")
    assert row[3:7] == ["× 1.50", "15.0 (2.3 … 27.7)", "7.0", "× 0.50"]
    assert row[7:] == ["7.0", "2.0", "3 to 5", "0"]


def test_closed_loops(body) -> None:
    """The best is in bold, and only there."""
    metrics = {"output_throughput": [60.0, 62.0], "p95_e2el_ms": [9000.0], "preemptions": [0.0]}
    arms = {f"h2o/{mode}@{n}": metrics for mode in ("naive", "lazy") for n in (4, 8)}
    table = speed.closed_loops("s", "made", (4, 8), best=8, policy="h2o")
    four, eight = body(table, make_result(arms))
    assert four[2] == "61.0 (48.3 … 73.7)"
    assert eight[2] == "**61.0** (48.3 … 73.7)"
    assert eight[1] == four[1] == "61.0 (48.3 … 73.7)"


def test_clients_of_pools(body) -> None:
    """A row per pool, each of its file; an arm that was not swept has none."""
    arms = {
        "random/naive, sweep@425": {"highest_feasible": [10.0, 10.0]},
        "random/lazy, sweep@425": {"highest_feasible": [19.0, 21.0]},
    }
    table = memory.clients("f", [memory.Sweep("roomy", "made", 425, "11, 11 and 22")])
    (row,) = body(table, make_result(arms))
    assert row == ["roomy", "–", "10", "**20** (7 … 33)", "–", "11, 11 and 22"]


def test_damage_of_text(body) -> None:
    """Differences are of the same cases; the arm of the comparison is compared with nothing."""
    arms = {
        f"{policy}@0.5": {
            "kl_top20": [0.01 + extra, 0.05 + extra],
            "top1_same": [0.9, 0.9],
            "nll_above_full": [0.1 - extra, 0.2 - extra],
            "perplexity": [15.0, 16.0],
        }
        for policy, extra in (("streaming_llm", 0.0), ("h2o", 0.002))
    }
    rows = [("window", "streaming_llm@0.5"), ("h2o", "h2o@0.5")]
    window, h2o = body(quality.damage_of_text("d", "made", rows), make_result(arms))
    assert (window[2], window[4]) == ("", "")
    assert (h2o[2], h2o[4], h2o[5]) == ("+0.002", "−0.002", "0.90")


def test_pairs_leave_out_repeats_in_which_either_arm_could_not_say() -> None:
    """As the scenarios' own comparisons do."""
    nan = float("nan")
    result = make_result({"a": {"m": [1.0, nan, 4.0]}, "b": {"m": [2.0, 3.0, nan]}})
    assert result.pairs("m", "a", "b") == ([1.0], [2.0])
    assert result.samples("a", "m") == [1.0, 4.0]
    assert result.mean("a", "missing") is None
