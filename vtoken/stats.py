"""Counters, gauges and histograms of the token layer.

The scheduler process owns one :class:`VTokenStats`; ``snapshot()`` is plain data that travels
to the API process, where ``service.metrics`` turns it into Prometheus families. Every family
in :data:`METRICS` is present from the first snapshot, with value zero.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

Kind = Literal["counter", "gauge", "histogram"]

_SECONDS = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 0.01, 0.03, 0.1, 0.3, 1.0)
_BLOCKS = (1.0, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096)
_TOKENS = (0.0, 16, 64, 256, 1024, 4096, 16384, 65536)


@dataclass(frozen=True)
class MetricSpec:
    """One metric family: its kind, help text, extra labels with initial values, buckets.

    ``name`` has no prefix; Prometheus sees ``vtoken_<name>``. ``labels`` maps the label to the
    values that exist from the start; more may appear (a policy chosen later).
    """

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    initial: tuple[tuple[str, ...], ...] = ()
    buckets: tuple[float, ...] = ()


def _counter(name: str, help: str, label: str = "", initial: Iterable[str] = ()) -> MetricSpec:
    labels = (label,) if label else ()
    return MetricSpec(name, "counter", help, labels, tuple((v,) for v in initial))


def _gauge(name: str, help: str, label: str = "", initial: Iterable[str] = ()) -> MetricSpec:
    labels = (label,) if label else ()
    return MetricSpec(name, "gauge", help, labels, tuple((v,) for v in initial))


def _histogram(name: str, help: str, buckets: tuple[float, ...]) -> MetricSpec:
    return MetricSpec(name, "histogram", help, buckets=buckets)


SKIP_REASONS: tuple[str, ...] = (
    "below_theta_f",
    "above_watermark",
    "in_flight",
    "no_gain",
    "no_headroom",
    "spares_cache",
)
"""Why a look for relocation work ended without a plan (paper §3.3, stages 1–3)."""

UTILIZATIONS: tuple[str, ...] = ("0.125", "0.25", "0.375", "0.5", "0.625", "0.75", "0.875", "1")
"""Upper ends of the ranges in which blocks are counted by u_b; an empty block is in the first."""

RELOCATION_OUTCOMES: tuple[str, ...] = ("committed", "rolled_back", "failed")
INVARIANTS: tuple[str, ...] = ("I1", "I2", "I4")

_SPECS: tuple[MetricSpec, ...] = (
    _gauge("waste_ratio", "Intra-block waste ratio F (Eq. 1) over blocks of running requests."),
    _gauge(
        "low_utilization_block_ratio",
        "Share of blocks of running requests that are at most half full of live tokens.",
    ),
    _gauge(
        "blocks_by_utilization",
        "Blocks of running requests by their share of live tokens, in ranges up to this.",
        "utilization",
        UTILIZATIONS,
    ),
    _gauge("live_tokens", "Tokens of running requests that attention reads."),
    _gauge("dead_tokens", "Tokens of running requests that a policy has evicted."),
    _gauge("retained_blocks", "Blocks held by running requests."),
    _gauge("ideal_blocks", "Blocks running requests would hold if live tokens were packed."),
    _gauge("free_blocks", "Blocks of the pool that nobody references."),
    _gauge("total_blocks", "Usable blocks of the pool."),
    _gauge("headroom_blocks", "Blocks kept back from admission for relocations."),
    _gauge("in_flight_relocations", "Relocation plans sent to the worker and not yet settled."),
    _gauge("effective_theta_f", "θ_F in force: the configured one, or where it adapted to."),
    _gauge(
        "relocation_disabled",
        "1 after an invariant violation stopped relocation (mode naive), else 0.",
    ),
    _histogram("request_retained_blocks", "Blocks a request held when it ended.", _BLOCKS),
    _histogram("request_evicted_tokens", "Tokens a request had lost when it ended.", _TOKENS),
    _histogram("relocation_copy_seconds", "Time to copy one batch of moves.", _SECONDS),
    _histogram("relocation_stall_seconds", "Time a forward waited for a batch of moves.", _SECONDS),
    _histogram(
        "scheduler_overhead_seconds",
        "Time the token layer adds to one engine step in the scheduler.",
        _SECONDS,
    ),
    _histogram(
        "worker_overhead_seconds",
        "Time the token layer adds to one engine step in the worker, without copies.",
        _SECONDS,
    ),
    _counter("evicted_tokens_total", "Tokens marked dead.", "policy"),
    _counter(
        "freed_blocks_total",
        "Blocks given back to vLLM before their request ended, net of destinations.",
        "how",
        ("empty", "relocation"),
    ),
    _counter("relocations_total", "Relocation plans by outcome.", "outcome", RELOCATION_OUTCOMES),
    _counter("relocated_tokens_total", "Tokens moved by committed plans."),
    _counter("relocated_bytes_total", "K/V bytes copied by the copy engine."),
    _counter(
        "reclaim_skipped_total", "Looks for relocation work without a plan.", "reason", SKIP_REASONS
    ),
    _counter(
        "headroom_backpressure_total",
        "Engine steps in which the headroom held back the admission of a waiting request.",
    ),
    _counter(
        "headroom_backpressure_seconds_total",
        "Time during which the headroom held back the admission of a waiting request.",
    ),
    _counter("preemptions_total", "Requests preempted by vLLM while vToken was in charge."),
    _counter(
        "preemptions_avoided_total",
        "Allocations of running requests that succeeded because blocks were freed at once.",
    ),
    _counter(
        "shared_relocations_total",
        "Batches in which all holders of shared blocks copied their live tokens out.",
    ),
    _counter(
        "urgent_relocations_total", "Plans copied before the next forward to avoid preemption."
    ),
    _counter("invariant_checks_total", "Online invariant checks.", "invariant", INVARIANTS),
    _counter("invariant_violations_total", "Online invariant violations.", "invariant", INVARIANTS),
    _counter(
        "evictions_postponed_total",
        "Evictions put off by one interval because the policy had no observations yet.",
        "policy",
    ),
    _counter("policy_errors_total", "Evictions skipped because a policy failed.", "policy"),
    _counter("policy_changes_total", "Live changes of the policy document."),
)

METRICS: Mapping[str, MetricSpec] = {spec.name: spec for spec in _SPECS}


class _Histogram:
    """Cumulative-free bucket counts with sum, as Prometheus needs them."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = np.zeros(len(bounds) + 1, np.int64)
        self.total = 0.0

    def add(self, value: float) -> None:
        """Count one observation in its bucket."""
        self.counts[bisect.bisect_left(self.bounds, value)] += 1
        self.total += value


class VTokenStats:
    """Accumulates the families of :data:`METRICS`; counters only ever grow."""

    def __init__(self) -> None:
        self._counters: dict[str, dict[tuple[str, ...], float]] = {}
        self._gauges: dict[str, dict[tuple[str, ...], float]] = {}
        self._histograms: dict[str, _Histogram] = {}
        for spec in METRICS.values():
            start = spec.initial if spec.labels else ((),)
            if spec.kind == "counter":
                self._counters[spec.name] = dict.fromkeys(start, 0.0)
            elif spec.kind == "gauge":
                self._gauges[spec.name] = dict.fromkeys(start, 0.0)
            else:
                self._histograms[spec.name] = _Histogram(spec.buckets)

    def inc(self, name: str, value: float = 1, label: str | None = None) -> None:
        """Add ``value`` (>= 0) to a counter, under its one label if it has one."""
        key = () if label is None else (label,)
        family = self._counters[name]
        family[key] = family.get(key, 0.0) + value

    def counter(self, name: str, label: str | None = None) -> float:
        """The present value of a counter (0 if the label was never used)."""
        return self._counters[name].get(() if label is None else (label,), 0.0)

    def set(self, name: str, value: float, label: str | None = None) -> None:
        """Set a gauge, under its one label if it has one; no other values than those declared.

        Raises:
            KeyError: there is no such gauge, or it has no such label value.
        """
        key = () if label is None else (label,)
        if key not in self._gauges[name]:
            raise KeyError(f"{name}{key}")
        self._gauges[name][key] = value

    def observe(self, name: str, value: float) -> None:
        """Add one observation to a histogram."""
        self._histograms[name].add(value)

    def snapshot(self) -> dict[str, Any]:
        """All values as plain data.

        Returns:
            ``{"counters": {name: [[label_values, value], …]}, "gauges": {name: value, or as a
            counter if it has a label},
            "histograms": {name: {"bounds": […], "counts": […], "sum": x}}}`` where ``counts``
            has one more entry than ``bounds`` (the ``+Inf`` bucket) and is not cumulative.
        """
        return {
            "counters": {
                name: [[list(k), v] for k, v in family.items()]
                for name, family in self._counters.items()
            },
            "gauges": {
                name: family[()] if () in family else [[list(k), v] for k, v in family.items()]
                for name, family in self._gauges.items()
            },
            "histograms": {
                name: {"bounds": list(h.bounds), "counts": h.counts.tolist(), "sum": h.total}
                for name, h in self._histograms.items()
            },
        }
