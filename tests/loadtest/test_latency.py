"""The figures of ``vllm bench serve`` from answers whose times are given."""

from __future__ import annotations

import pytest

from loadtest.latency import Answer, Goals, summarize


def make_answer(start: float, times: tuple[float, ...], num_output: int, **more) -> Answer:
    return Answer(
        start=start,
        end=times[-1] if times else start,
        chunk_times=times,
        num_prompt_tokens=100,
        num_output_tokens=num_output,
        **more,
    )


ANSWERS = [
    make_answer(0.0, (0.5, 0.7, 0.9, 1.5), 4),
    make_answer(1.0, (2.0, 2.1), 2),
]


def test_times_are_computed_as_vllm_bench_serve_does():
    """TTFT from sending, TPOT without the first token, ITL between events, E2EL to the last."""
    found = summarize(ANSWERS)
    assert found["mean_ttft_ms"] == pytest.approx(750)
    assert found["median_tpot_ms"] == pytest.approx((1000 / 3 + 100) / 2)
    assert found["mean_itl_ms"] == pytest.approx((200 + 200 + 600 + 100) / 4)
    assert found["mean_e2el_ms"] == pytest.approx((1500 + 1100) / 2)
    assert found["p99_e2el_ms"] == pytest.approx(1100 + 0.99 * 400)


def test_throughput_is_over_the_whole_run():
    """From the first request sent to the last token received."""
    found = summarize(ANSWERS)
    assert found["duration"] == pytest.approx(2.1)
    assert found["output_throughput"] == pytest.approx(6 / 2.1)
    assert found["total_token_throughput"] == pytest.approx(206 / 2.1)
    assert found["request_throughput"] == pytest.approx(2 / 2.1)


@pytest.mark.parametrize(
    ("goals", "num_good"),
    [
        (Goals(), 2),
        (Goals(ttft_ms=600), 1),
        (Goals(tpot_ms=150), 1),
        (Goals(e2el_ms=1200), 1),
        (Goals(ttft_ms=600, tpot_ms=150), 0),
    ],
)
def test_goodput_counts_requests_within_every_goal(goals, num_good):
    """A request that misses one goal is no good one."""
    assert summarize(ANSWERS, goals)["request_goodput"] == pytest.approx(num_good / 2.1)


def test_failures_are_counted_and_left_out():
    """They change no time; a run of failures alone has no figures."""
    failed = make_answer(0.0, (), 0, error="503")
    found = summarize([*ANSWERS, failed])
    assert (found["completed"], found["failed"]) == (2, 1)
    assert found["mean_ttft_ms"] == pytest.approx(750)
    assert summarize([failed]) == {"completed": 0.0, "failed": 1.0}


def test_one_token_has_no_time_per_output_token():
    """There is no token after the first."""
    answer = make_answer(0.0, (0.5,), 1)
    assert answer.tpot is None
    assert summarize([answer])["mean_tpot_ms"] == 0.0
