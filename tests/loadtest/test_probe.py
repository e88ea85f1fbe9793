"""Readings of ``/metrics`` and ``/admin/state``."""

from __future__ import annotations

import asyncio

import pytest

from loadtest.client import Client, ServiceError
from loadtest.probe import (
    Metrics,
    Sample,
    Sampler,
    histogram_increase,
    mean_per_step,
    sample_of_state,
    take_sample,
)
from tests.loadtest.fake_service import KEY

PAGE = """
# TYPE c counter
c_total{engine="0",how="a"} %d
c_total{engine="0",how="b"} 5
# TYPE h histogram
h_bucket{le="0.1"} %d
h_bucket{le="1.0"} %d
h_bucket{le="+Inf"} %d
h_count %d
h_sum 1
# TYPE g gauge
g 3
"""


def make_sample(steps: float, **more) -> Sample:
    return Sample(time=0.0, steps=steps, running=1, waiting=0, **more)


def test_metrics_are_summed_over_series_with_the_labels():
    """What is absent is zero."""
    metrics = Metrics(PAGE % (2, 1, 3, 3, 3))
    assert metrics.total("c_total") == 7
    assert metrics.total("c_total", how="a") == 2
    assert metrics.total("c_total", how="z") == 0
    assert metrics.total("no_such") == 0
    assert metrics.by_label("c_total", "how") == {"a": 2, "b": 5}
    assert metrics.label("c_total", "engine") == "0"
    assert metrics.label("no_such", "engine") == ""


def test_increase_between_two_readings():
    """Histograms per bucket and not cumulative."""
    before, after = Metrics(PAGE % (2, 1, 3, 3, 3)), Metrics(PAGE % (9, 2, 8, 9, 9))
    gained = histogram_increase(before, after, "h")
    assert gained == {"0.1": 1, "1.0": 4, "+Inf": 1}


def test_each_sample_stands_for_the_steps_before_it():
    """A value seen during many steps weighs more than one seen during few."""
    samples = [make_sample(0), make_sample(10), make_sample(40)]
    assert mean_per_step(samples, [100.0, 1.0, 5.0]) == pytest.approx((10 * 1 + 30 * 5) / 40)
    assert mean_per_step([make_sample(3)] * 2, [1.0, 3.0]) == 2.0
    assert mean_per_step([], []) == 0.0


def test_sample_of_state_counts_what_decodes():
    """A request whose prompt is not computed yet runs, but does not decode."""
    requests = [
        {"status": "running", "num_computed_tokens": 99, "num_tokens": 100},
        {"status": "running", "num_computed_tokens": 64, "num_tokens": 100},
        {"status": "preempted", "num_computed_tokens": 99, "num_tokens": 100},
    ]
    state = {
        "pool": {"total_blocks": 100, "free_blocks": 30},
        "requests": requests,
        "engine": {"running": 2, "waiting": 1, "steps": 7},
    }
    sample = sample_of_state(state, now=1.0)
    assert (sample.running, sample.waiting, sample.steps, sample.decoding) == (2, 1, 7, 1)
    assert sample.pool["used_blocks"] == 70


@pytest.mark.parametrize("is_off", [True, False])
def test_samples_come_from_metrics_in_mode_off(service, is_off):
    """Stock vLLM has no admin state; used blocks come from its own gauge."""

    async def run():
        async with Client(service.url, admin_key=KEY) as client:
            return await take_sample(client, is_off=is_off)

    sample = asyncio.run(run())
    assert sample.pool["used_blocks"] == (0.5 * 99 if is_off else 50)  # vLLM keeps one of 100
    assert (sample.decoding is None) is is_off


def test_sampler_samples_until_its_block_ends(service):
    """At least one sample; an error of the service is not swallowed."""

    async def run(key: str):
        async with Client(service.url, admin_key=key) as client:
            async with Sampler(client, is_off=False, seconds=0.001) as sampler:
                deadline = asyncio.get_running_loop().time() + 30
                while len(sampler.samples) < 3 and not sampler.has_failed:
                    assert asyncio.get_running_loop().time() < deadline
                    await asyncio.sleep(0.001)
            return sampler.samples

    assert len(asyncio.run(run(KEY))) >= 3
    with pytest.raises(ServiceError, match="401"):
        asyncio.run(run("wrong"))
