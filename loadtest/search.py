"""Searching an operating point: the best within a latency limit, the highest that still fits."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

MAX_MISSES = 2
"""A sweep ends after so many points in a row that miss the limit: one may be an accident."""


@dataclass(frozen=True)
class Point:
    """One operating point of a closed loop.

    Attributes:
        concurrency: clients.
        throughput: output tokens per second.
        latency_ms: the latency that the limit is about.
    """

    concurrency: int
    throughput: float
    latency_ms: float


Measure = Callable[[int], Awaitable[Point]]


async def sweep(
    measure: Measure, concurrencies: Sequence[int], limit_ms: float | None
) -> list[Point]:
    """Measure ascending concurrencies until :data:`MAX_MISSES` in a row miss the limit.

    Args:
        measure: runs one closed loop.
        concurrencies: to try.
        limit_ms: of the latency; ``None``: measure all.
    """
    points: list[Point] = []
    for concurrency in sorted(concurrencies):
        points.append(await measure(concurrency))
        recent = points[-MAX_MISSES:]
        if limit_ms is None or len(recent) < MAX_MISSES:
            continue
        if all(point.latency_ms > limit_ms for point in recent):
            break
    return points


def best_within(points: Sequence[Point], limit_ms: float) -> Point | None:
    """The point of highest throughput within the limit; of equals the lower concurrency."""
    good = [point for point in points if point.latency_ms <= limit_ms]
    return max(good, key=lambda p: (p.throughput, -p.concurrency), default=None)


def highest_feasible(feasible: Sequence[tuple[int, bool]]) -> int:
    """The highest concurrency below which every tried one was feasible; 0 if the first was not."""
    highest = 0
    for concurrency, is_feasible in sorted(feasible):
        if not is_feasible:
            break
        highest = concurrency
    return highest
