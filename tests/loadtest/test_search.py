"""The search for an operating point, against a simulated server with a known knee."""

from __future__ import annotations

import asyncio
import random

import pytest

from loadtest.search import MAX_MISSES, Point, best_within, highest_feasible, sweep

CONCURRENCIES = (1, 2, 4, 6, 8, 10, 12, 16, 24, 32)


class SimulatedServer:
    """Serves up to ``knee`` requests at once, one second each; the others queue.

    Below the knee the latency is flat and throughput rises; beyond it throughput is flat and
    latency rises with the queue.
    """

    def __init__(self, knee: int, noise: float = 0.0) -> None:
        self.knee = knee
        self.noise = noise
        self.asked: list[int] = []
        self.rng = random.Random(0)

    async def measure(self, concurrency: int) -> Point:
        self.asked.append(concurrency)
        factor = 1 + self.noise * self.rng.uniform(-1, 1)
        latency = 1000 * max(1.0, concurrency / self.knee) * factor
        return Point(concurrency, 1000 * concurrency / latency, latency)


def search(server: SimulatedServer, limit_ms: float) -> Point | None:
    points = asyncio.run(sweep(server.measure, CONCURRENCIES, limit_ms))
    return best_within(points, limit_ms)


@pytest.mark.parametrize("knee", [2, 6, 8, 12, 24])
def test_search_finds_the_knee(knee):
    """The highest throughput within 5 % of the unloaded latency is at the knee."""
    found = search(SimulatedServer(knee), 1050.0)
    assert found.concurrency == knee


def test_search_finds_the_knee_in_noise():
    """Two percent of noise do not move it past its neighbours."""
    found = search(SimulatedServer(8, noise=0.02), 1050.0)
    assert found.concurrency == 8


def test_two_servers_are_told_apart_by_the_same_limit():
    """The limit comes from the worse one; the better one takes more clients and more throughput."""
    worse, better = SimulatedServer(4), SimulatedServer(8)
    limit = 1.05 * asyncio.run(worse.measure(8)).latency_ms
    assert search(better, limit).throughput > 1.9 * search(worse, limit).throughput


def test_sweep_ends_after_two_misses_in_a_row():
    """Points far beyond the limit cost time and say nothing."""
    server = SimulatedServer(4)
    asyncio.run(sweep(server.measure, CONCURRENCIES, 1050.0))
    assert server.asked == [1, 2, 4, 6, 8]
    assert MAX_MISSES == 2


def test_one_miss_does_not_end_the_sweep():
    """A point that was disturbed may be followed by good ones."""

    async def measure(concurrency: int) -> Point:
        return Point(concurrency, concurrency, 2000 if concurrency == 4 else 1000)

    points = asyncio.run(sweep(measure, CONCURRENCIES, 1050.0))
    assert best_within(points, 1050.0).concurrency == 32


def test_sweep_without_a_limit_measures_all_in_order():
    """Whatever the order given."""
    server = SimulatedServer(4)
    asyncio.run(sweep(server.measure, CONCURRENCIES[::-1], None))
    assert server.asked == list(CONCURRENCIES)


def test_nothing_within_the_limit_is_none():
    """Rather than the least bad."""
    assert search(SimulatedServer(4), 10.0) is None


def test_of_equal_throughputs_the_fewer_clients_win():
    """More clients would only wait."""
    points = [Point(4, 10.0, 1.0), Point(8, 10.0, 1.0), Point(2, 9.0, 1.0)]
    assert best_within(points, 5.0).concurrency == 4


@pytest.mark.parametrize(
    ("feasible", "highest"),
    [
        ([(2, True), (4, True), (8, False)], 4),
        ([(8, True), (2, True), (4, False)], 2),
        ([(2, False), (4, True)], 0),
        ([], 0),
    ],
)
def test_highest_feasible_ends_at_the_first_failure(feasible, highest):
    """A success above a failure does not count."""
    assert highest_feasible(feasible) == highest
