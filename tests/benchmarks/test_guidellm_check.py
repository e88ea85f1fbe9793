"""guidellm's report under our names, and the comparison of both tools."""

import pytest

from benchmarks.guidellm_check import LENGTHS, METRICS, OURS, THEIRS, compared, figures_of


def report(completed: int = LENGTHS.num_jobs) -> dict:
    """What is read of a report of guidellm 0.8."""
    metrics = {
        "time_to_first_token_ms": {"median": 40.0},
        "inter_token_latency_ms": {"mean": 8.0},
        "request_latency": {"mean": 0.6, "count": completed},
        "output_token_count": {"total_sum": 1536.0},
    }
    successful = {name: {"successful": values} for name, values in metrics.items()}
    return {"benchmarks": [{"duration": 4.0, "metrics": successful}]}


def test_report_is_read_under_our_names():
    """Seconds become milliseconds; throughput is tokens over the benchmark's duration."""
    assert figures_of(report()) == {
        "output_throughput": 384.0,
        "median_ttft_ms": 40.0,
        "mean_tpot_ms": 8.0,
        "mean_e2el_ms": 600.0,
    }


def test_incomplete_report_is_no_measurement():
    """Requests that failed would flatter the rest."""
    with pytest.raises(ValueError, match="completed 23 of 24"):
        figures_of(report(LENGTHS.num_jobs - 1))


def test_ratios_pair_the_rounds():
    """Ours over theirs, round by round."""
    theirs = [dict.fromkeys(METRICS, 10.0 * (1 + n)) for n in range(3)]
    ours = [dict.fromkeys(METRICS, 11.0 * (1 + n)) for n in range(3)]
    found = compared({OURS: ours, THEIRS: theirs})
    for metric in METRICS:
        assert found["comparisons"][metric]["ratio"] == pytest.approx(1.1)
        assert found["arms"][OURS][metric]["samples"] == [11.0, 22.0, 33.0]
