"""``vtoken_*`` families on ``/metrics``, beside vLLM's own ``vllm:*``.

The engine's statistics live in another process. The poller brings a snapshot about once a
second; this collector holds the last one and answers each scrape from it. Every family is there
from the first scrape, with value zero.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from service.health import CODES
from service.refusals import REASONS
from vtoken.stats import METRICS, MetricSpec

PREFIX = "vtoken_"
BASE_LABELS: tuple[str, ...] = ("model_name", "engine")

POLICY_INFO = MetricSpec(
    "policy_info",
    "gauge",
    "Always 1; its labels tell the policy in force, the mode, θ_F and the document's version.",
    ("policy", "mode", "theta_f", "version"),
)
POLL_FAILURES = MetricSpec(
    "poll_failures_total",
    "counter",
    "Readings of the engine's statistics that failed. Of the server: all its engines are read at "
    "once, and the series has the first one's label.",
)
SNAPSHOT_AGE = MetricSpec(
    "snapshot_age_seconds",
    "gauge",
    "Age of the statistics shown here; grows while the engine does not answer. Of the server: all "
    "its engines are read at once, and the series has the first one's label.",
)
NOT_READY = MetricSpec(
    "not_ready",
    "gauge",
    "1 while GET /health/ready answers 503 for this reason, else 0. Of the server, not of an "
    "engine: one series per reason, with the first engine's label.",
    ("reason",),
    tuple((code,) for code in CODES),
)
REFUSED = MetricSpec(
    "refused_requests_total",
    "counter",
    "Requests to the model that the server turned away or ended early. Of the server, not of an "
    "engine: one series per reason, with the first engine's label.",
    ("reason",),
    tuple((reason,) for reason in REASONS),
)
SERVICE_METRICS: tuple[MetricSpec, ...] = (
    POLICY_INFO,
    POLL_FAILURES,
    SNAPSHOT_AGE,
    NOT_READY,
    REFUSED,
)

_Samples = list[tuple[Sequence[str], Any]]


@dataclass(frozen=True)
class Reading:
    """What is known of the engine's statistics.

    Attributes:
        reply: the engine's last snapshot.
        policies: that were ever in force; a series that was shown once never vanishes.
        updated: when it was read, monotonic seconds.
        num_failures: readings that brought none.
    """

    reply: Mapping[str, Any]
    policies: Sequence[str]
    updated: float
    num_failures: int = 0


class ReadingStore(Protocol):
    """Where one process puts its readings for all that answer scrapes."""

    def write(self, reading: Reading) -> None:
        """Keep it, in place of the one before."""

    def read(self) -> Reading | None:
        """The last one, if there is any."""


class VTokenCollector(Collector):
    """Prometheus collector over the last snapshot of each engine.

    Args:
        model_name: value of that label, the same as vLLM's.
        config: ``VTokenConfig.to_dict()`` at the start; in mode ``off`` only ``policy_info``,
            ``not_ready`` and ``refused_requests_total`` are shown.
        engines: values of that label, one for each engine behind this server.
        not_ready_codes: why the server is not ready now, of ``service.health.CODES``.
        refusals: how many requests were refused, by ``service.refusals.REASONS``.
        store: for readings, where several processes answer scrapes; all show what is in it.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        model_name: str,
        config: Mapping[str, Any],
        *,
        engines: Sequence[str] = ("0",),
        not_ready_codes: Callable[[], Collection[str]] = tuple,
        refusals: Callable[[], Mapping[str, int]] = dict,
        store: ReadingStore | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._not_ready_codes = not_ready_codes
        self._refusals = refusals
        self._model_name = model_name
        self._engines = engines
        self._clock = clock
        self._store = store
        self._is_off = config["mode"] == "off"
        nothing = {"stats": {}, "config": config, "policy_version": 0}
        first = {"engines": [nothing] * len(engines)}
        self._reading = Reading(first, [config["policy"]], clock())

    def update(self, reply: Mapping[str, Any]) -> None:
        """Show the engine's ``snapshot`` reply from now on.

        Raises:
            KeyError, TypeError, ValueError: it has not the agreed form; the last stays.
        """
        in_force = [engine["config"]["policy"] for engine in reply.get("engines", [reply])]
        policies = list(dict.fromkeys([*self._reading.policies, *in_force]))
        reading = replace(self._reading, reply=reply, policies=policies, updated=self._clock())
        self._build(reading)  # raises here, not at the next scrape
        self._keep(reading)

    def count_failure(self) -> None:
        """Count a reading that brought no snapshot."""
        self._keep(replace(self._reading, num_failures=self._reading.num_failures + 1))

    def _keep(self, reading: Reading) -> None:
        self._reading = reading
        if self._store is not None:
            self._store.write(reading)

    def describe(self) -> Iterator[Metric]:
        """The families' names, for the registry; see :meth:`collect`."""
        return self.collect()

    def collect(self) -> Iterator[Metric]:
        """All families, as of the last snapshot."""
        stored = None if self._store is None else self._store.read()
        reading = stored or self._reading
        yield from self._build(reading)
        codes = self._not_ready_codes()
        yield self._of_server(NOT_READY, [((code,), float(code in codes)) for code in CODES])
        refused = self._refusals()
        yield self._of_server(REFUSED, [((reason,), refused.get(reason, 0)) for reason in REASONS])
        if not self._is_off:
            yield self._of_server(POLL_FAILURES, [((), reading.num_failures)])
            yield self._of_server(SNAPSHOT_AGE, [((), self._clock() - reading.updated)])

    def _build(self, reading: Reading) -> list[Metric]:
        engines = reading.reply.get("engines", [reading.reply])
        families = [self._family(POLICY_INFO, [_policy_info(engine) for engine in engines])]
        if not self._is_off:
            for spec in METRICS.values():
                samples = [_samples(spec, engine["stats"], reading.policies) for engine in engines]
                families.append(self._family(spec, samples))
        return families

    def _of_server(self, spec: MetricSpec, samples: _Samples) -> Metric:
        """With the first engine's label, once: else sums would grow with the number of engines."""
        return self._family(spec, [samples, *[[]] * (len(self._engines) - 1)])

    def _family(self, spec: MetricSpec, engines: Sequence[_Samples]) -> Metric:
        kinds: dict[str, Any] = {
            "counter": CounterMetricFamily,
            "gauge": GaugeMetricFamily,
            "histogram": HistogramMetricFamily,
        }
        labels = [*BASE_LABELS, *spec.labels]
        family = kinds[spec.kind](PREFIX + spec.name, spec.help, labels=labels)
        for engine, samples in zip(self._engines, engines, strict=True):
            for own, value in samples:
                values = [self._model_name, engine, *own]
                if spec.kind == "histogram":
                    family.add_metric(values, buckets=value[0], sum_value=value[1])
                else:
                    family.add_metric(values, value)
        assert isinstance(family, Metric)
        return family


def register(collector: VTokenCollector, registry: CollectorRegistry) -> None:
    """Put ``collector`` on ``registry``, in place of an earlier one; mutates ``registry``."""
    for other in list(registry._collector_to_names):
        if isinstance(other, VTokenCollector):
            registry.unregister(other)
    registry.register(collector)


def _policy_info(engine: Mapping[str, Any]) -> _Samples:
    config, version = engine["config"], engine["policy_version"]
    labels = [config["policy"], config["mode"], f"{config['theta_f']:g}", str(version)]
    return [(labels, 1)]


def _samples(spec: MetricSpec, stats: Mapping[str, Any], policies: Sequence[str]) -> _Samples:
    """Label values with value; what the engine has not counted yet is zero."""
    if spec.kind == "gauge" and not spec.labels:
        return [((), float(stats.get("gauges", {}).get(spec.name, 0)))]
    if spec.kind == "histogram":
        return [((), _histogram(spec, stats.get("histograms", {}).get(spec.name)))]
    start = spec.initial if spec.labels else ((),)
    if spec.labels == ("policy",):
        start = (*start, *((policy,) for policy in policies))
    values = dict.fromkeys(start, 0.0)
    counted = stats.get(f"{spec.kind}s", {}).get(spec.name, [])
    values |= {tuple(str(v) for v in labels): float(value) for labels, value in counted}
    return list(values.items())


def _histogram(
    spec: MetricSpec, value: Mapping[str, Any] | None
) -> tuple[list[tuple[str, float]], float]:
    """Cumulative buckets up to ``+Inf``, and the sum."""
    bounds = spec.buckets if value is None else value["bounds"]
    counts = [0] * (len(bounds) + 1) if value is None else value["counts"]
    names = [*(str(float(bound)) for bound in bounds), "+Inf"]
    total = 0.0 if value is None else float(value["sum"])
    buckets = zip(names, itertools.accumulate(counts), strict=True)
    return [(name, float(count)) for name, count in buckets], total
