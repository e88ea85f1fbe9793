"""VTokenStats: every family from the start, monotone counters, histograms as documented."""

from __future__ import annotations

import json

import pytest

from vtoken.stats import (
    INVARIANTS,
    METRICS,
    RELOCATION_OUTCOMES,
    SKIP_REASONS,
    UTILIZATIONS,
    VTokenStats,
)


def test_first_snapshot_has_every_family_with_zero() -> None:
    """A scrape before the first request sees all names and all initial labels."""
    snapshot = VTokenStats().snapshot()
    names = [*snapshot["counters"], *snapshot["gauges"], *snapshot["histograms"]]
    assert sorted(names) == sorted(METRICS)
    for name, rows in snapshot["counters"].items():
        spec = METRICS[name]
        assert [tuple(labels) for labels, _ in rows] == list(spec.initial if spec.labels else [()])
        assert not any(value for _, value in rows)
    for name, value in snapshot["gauges"].items():
        rows = value if METRICS[name].labels else [[[], value]]
        assert [tuple(labels) for labels, _ in rows] == list(METRICS[name].initial or [()])
        assert not any(number for _, number in rows)
    assert not any(sum(h["counts"]) for h in snapshot["histograms"].values())


def test_initial_labels_are_the_published_sets() -> None:
    """Outcomes, reasons and invariants exist as labels before they occur."""
    assert METRICS["reclaim_skipped_total"].initial == tuple((r,) for r in SKIP_REASONS)
    assert METRICS["relocations_total"].initial == tuple((r,) for r in RELOCATION_OUTCOMES)
    assert METRICS["invariant_checks_total"].initial == tuple((r,) for r in INVARIANTS)


@pytest.mark.parametrize("spec", METRICS.values(), ids=lambda spec: spec.name)
def test_metric_names_follow_the_habits(spec) -> None:  # type: ignore[no-untyped-def]
    """``_total`` on counters only, units in names, help as a sentence, buckets on histograms."""
    assert spec.name.endswith("_total") == (spec.kind == "counter")
    assert not spec.name.startswith("vtoken")
    assert spec.help.endswith(".")
    assert bool(spec.buckets) == (spec.kind == "histogram")
    assert list(spec.buckets) == sorted(set(spec.buckets))


def test_inc_adds_and_new_labels_appear() -> None:
    """Counters add up per label; a policy chosen later gets its own row."""
    stats = VTokenStats()
    stats.inc("evicted_tokens_total", 3, "random")
    stats.inc("evicted_tokens_total", 4, "random")
    stats.inc("evicted_tokens_total", 0, "h2o")
    stats.inc("policy_changes_total")
    assert stats.counter("evicted_tokens_total", "random") == 7
    assert stats.counter("evicted_tokens_total", "never") == 0
    assert stats.counter("policy_changes_total") == 1
    rows = stats.snapshot()["counters"]["evicted_tokens_total"]
    assert rows == [[["random"], 7.0], [["h2o"], 0.0]]


def test_labelled_gauge_has_one_row_per_label() -> None:
    """Only the labels that were declared, each with its last value."""
    stats = VTokenStats()
    stats.set("blocks_by_utilization", 3, "0.5")
    stats.set("blocks_by_utilization", 2, "0.5")
    rows = stats.snapshot()["gauges"]["blocks_by_utilization"]
    assert [label for (label,), _ in rows] == list(UTILIZATIONS)
    assert dict((label, n) for (label,), n in rows) == {**dict.fromkeys(UTILIZATIONS, 0), "0.5": 2}


def test_unknown_names_and_wrong_kinds_are_refused() -> None:
    """A typo is a KeyError at once and not a lost number."""
    stats = VTokenStats()
    for call in (
        lambda: stats.inc("no_such_total"),
        lambda: stats.inc("waste_ratio"),
        lambda: stats.set("no_such", 1),
        lambda: stats.set("evicted_tokens_total", 1),
        lambda: stats.set("waste_ratio", 1, "0.5"),
        lambda: stats.set("blocks_by_utilization", 1),
        lambda: stats.set("blocks_by_utilization", 1, "0.3"),
        lambda: stats.observe("waste_ratio", 1),
    ):
        with pytest.raises(KeyError):
            call()


def test_gauge_holds_the_last_value() -> None:
    """Gauges are set, not added."""
    stats = VTokenStats()
    stats.set("waste_ratio", 0.5)
    stats.set("waste_ratio", 0.25)
    assert stats.snapshot()["gauges"]["waste_ratio"] == 0.25


def test_histogram_bounds_are_inclusive_and_last_bucket_is_infinite() -> None:
    """A value equal to a bound counts under it (Prometheus ``le``), larger ones in +Inf."""
    stats = VTokenStats()
    for value in (0.5, 1, 1.5, 4096, 5000):
        stats.observe("request_retained_blocks", value)
    histogram = stats.snapshot()["histograms"]["request_retained_blocks"]
    assert len(histogram["counts"]) == len(histogram["bounds"]) + 1
    by_bound = dict(zip([*histogram["bounds"], "inf"], histogram["counts"], strict=True))
    assert {k: v for k, v in by_bound.items() if v} == {1.0: 2, 2.0: 1, 4096.0: 1, "inf": 1}
    assert histogram["sum"] == pytest.approx(9099)


def test_snapshot_is_json_and_detached() -> None:
    """It travels between processes and later changes do not reach it."""
    stats = VTokenStats()
    before = stats.snapshot()
    text = json.dumps(before)
    stats.inc("policy_changes_total")
    stats.set("waste_ratio", 1)
    stats.observe("request_retained_blocks", 1)
    assert json.dumps(before) == text
