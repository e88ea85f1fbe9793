"""Reads a service while it works: ``/metrics`` before and after, ``/admin/state`` in between."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np
from prometheus_client.parser import text_string_to_metric_families

from loadtest.client import Client, ServiceError

POLL_SECONDS = 0.2
MAX_MISSED = 5
"""Samples of one run that may fail: an engine in a long step does not answer in time."""
STEPS = "vllm:iteration_tokens_total_count"

logger = logging.getLogger(__name__)

Labels = tuple[tuple[str, str], ...]


class Metrics:
    """One reading of ``/metrics``."""

    def __init__(self, text: str) -> None:
        self._values: dict[str, dict[Labels, float]] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                labels = tuple(sorted(sample.labels.items()))
                self._values.setdefault(sample.name, {})[labels] = sample.value

    def total(self, name: str, **labels: str) -> float:
        """Sum over the series of ``name`` that have ``labels``; 0 if there is none."""
        series = self._values.get(name, {}).items()
        return sum(value for key, value in series if labels.items() <= dict(key).items())

    def by_label(self, name: str, label: str) -> dict[str, float]:
        """Sums over the series of ``name`` by the value of ``label``."""
        sums: dict[str, float] = {}
        for key, value in self._values.get(name, {}).items():
            own = dict(key).get(label, "")
            sums[own] = sums.get(own, 0.0) + value
        return sums

    def label(self, name: str, label: str) -> str:
        """That label of the first series; empty if there is none."""
        return next((dict(key).get(label, "") for key in self._values.get(name, {})), "")


def histogram_increase(before: Metrics, after: Metrics, name: str) -> dict[str, float]:
    """What a histogram gained, by upper bound, not cumulative."""
    old, new = (m.by_label(f"{name}_bucket", "le") for m in (before, after))
    bounds = sorted(new, key=float)
    gained = [new[b] - old.get(b, 0.0) for b in bounds]
    return dict(zip(bounds, np.diff(gained, prepend=0.0).tolist(), strict=True))


@dataclass(frozen=True)
class Sample:
    """The engine at one moment.

    Attributes:
        time: monotonic seconds.
        steps: engine steps so far.
        running: requests that compute.
        waiting: requests that do not, yet or again.
        pool: gauges of the pool; in mode ``off`` ``used_blocks`` and ``total_blocks`` alone.
        decoding: of the running requests, those past their prefill (``None`` in mode ``off``).
    """

    time: float
    steps: float
    running: float
    waiting: float
    pool: Mapping[str, float] = field(default_factory=dict)
    decoding: int | None = None


async def take_sample(client: Client, *, is_off: bool) -> Sample:
    """Look once, through ``/admin/state``, or in mode ``off`` through ``/metrics``."""
    if is_off:
        metrics = Metrics(await client.metrics_text())
        total = float(metrics.label("vllm:cache_config_info", "num_gpu_blocks") or 0)
        used = metrics.total("vllm:kv_cache_usage_perc") * (total - 1)  # one block is never given
        return Sample(
            time.monotonic(),
            metrics.total(STEPS),
            metrics.total("vllm:num_requests_running"),
            metrics.total("vllm:num_requests_waiting"),
            {"used_blocks": used, "total_blocks": total},
        )
    return sample_of_state(await client.state(), time.monotonic())


def sample_of_state(state: Mapping[str, Any], now: float) -> Sample:
    """The sample that an answer of ``/admin/state`` holds."""
    engine, pool = state["engine"], dict(state["pool"])
    pool["used_blocks"] = pool["total_blocks"] - pool["free_blocks"]
    running = [r for r in state["requests"] if r["status"] == "running"]
    decoding = sum(r["num_computed_tokens"] >= r["num_tokens"] - 1 for r in running)
    return Sample(now, engine["steps"], engine["running"], engine["waiting"], pool, decoding)


class Sampler:
    """Takes samples in the background while its ``async with`` block runs.

    Attributes:
        samples: taken so far.
        num_missed: that could not be taken.
    """

    def __init__(self, client: Client, *, is_off: bool, seconds: float = POLL_SECONDS) -> None:
        self._client = client
        self._is_off = is_off
        self._seconds = seconds
        self.samples: list[Sample] = []
        self.num_missed = 0

    async def __aenter__(self) -> Sampler:
        """Start."""
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *_: object) -> None:
        """Stop; an error of the sampling is raised here."""
        self._task.cancel()
        results = await asyncio.gather(self._task, return_exceptions=True)
        for result in results:
            if isinstance(result, Exception):
                raise result

    @property
    def has_failed(self) -> bool:
        """Whether sampling ended with an error, which is raised at the end of the block."""
        return self._task.done()

    async def _run(self) -> None:
        while True:
            try:
                self.samples.append(await take_sample(self._client, is_off=self._is_off))
            except (ServiceError, httpx.HTTPError) as error:
                self.num_missed += 1
                if self.num_missed > MAX_MISSED:
                    raise
                logger.warning("no sample: %s", error)
            await asyncio.sleep(self._seconds)


def mean_per_step(samples: Sequence[Sample], values: Sequence[float]) -> float:
    """Mean of a value over engine steps: each sample stands for the steps since the one before.

    Samples come at intervals of time, so that slow steps, those with a prefill, are seen more
    often than they are.
    """
    if not samples:
        return 0.0
    steps = np.diff([s.steps for s in samples], prepend=samples[0].steps)
    if not steps.sum():
        return float(np.mean(values))
    return float(np.average(values, weights=steps))
