"""Who gets the last blocks: vLLM's real scheduler with the token layer, no engine, no worker."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests.integration.schedulers import add, make_scheduler, step
from vtoken.integration.vllm import backpressure
from vtoken.integration.vllm.scheduler import VTokenScheduler


def counter(scheduler: VTokenScheduler, name: str) -> float:
    """Of the token layer."""
    return scheduler.layer.stats.counter(name)


def test_headroom_holds_a_waiting_request_back_counted_and_timed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It fits into the free blocks but not beside the headroom: it waits, and that is on record."""
    clock = iter(range(100, 200))  # a second a step
    monkeypatch.setattr(backpressure, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    scheduler = make_scheduler(20)
    add(scheduler, "first", 9)
    assert step(scheduler) == {"first"}
    add(scheduler, "second", 8)  # 10 are free, 4 of them headroom
    assert [step(scheduler) for _ in range(3)] == [{"first"}] * 3
    assert counter(scheduler, "headroom_backpressure_total") == 3
    assert counter(scheduler, "headroom_backpressure_seconds_total") == 2.0  # between four looks
    scheduler.layer.control.patch({"headroom_blocks": 0})
    assert step(scheduler) == {"first", "second"}
    assert counter(scheduler, "headroom_backpressure_total") == 3
    assert counter(scheduler, "headroom_backpressure_seconds_total") == 3.0


def test_request_that_would_not_fit_anyway_is_not_held_back() -> None:
    """The headroom is not to blame: nothing is counted."""
    scheduler = make_scheduler(20)
    add(scheduler, "first", 9)
    step(scheduler)
    add(scheduler, "second", 14)
    step(scheduler)
    assert counter(scheduler, "headroom_backpressure_total") == 0


def test_naive_has_no_headroom() -> None:
    """Nothing is repacked, so nothing is kept back for it."""
    scheduler = make_scheduler(20, mode="naive")
    add(scheduler, "first", 9)
    step(scheduler)
    add(scheduler, "second", 8)
    assert step(scheduler) == {"first", "second"}


def test_lone_request_may_take_every_block_and_ends() -> None:
    """The headroom is as large as the pool, but for one block: still no deadlock."""
    scheduler = make_scheduler(14, headroom_blocks=13)
    add(scheduler, "only", 9)
    for _ in range(70):
        assert step(scheduler) == {"only"}
    assert scheduler.layer.requests["only"].num_retained == 14


def test_running_request_gets_the_last_block_rather_than_a_preemption() -> None:
    """Beside others it leaves one block, until nothing can be packed any more."""
    scheduler = make_scheduler(16)
    add(scheduler, "first", 7)
    add(scheduler, "second", 5)
    for _ in range(33):
        assert step(scheduler) == {"first", "second"}
    assert scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == 0
    assert counter(scheduler, "preemptions_total") == 0


def test_destinations_in_flight_are_headroom_at_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are not reserved a second time."""
    scheduler = make_scheduler(20)
    add(scheduler, "first", 9)
    step(scheduler)
    monkeypatch.setattr(scheduler.layer.reclamation, "blocks_in_flight", lambda: 3)
    add(scheduler, "second", 8)
    assert step(scheduler) == {"first", "second"}


def test_refused_allocation_is_a_shortage_for_the_next_look() -> None:
    """From then on relocation may overwrite what is cached."""
    scheduler = make_scheduler(20)
    add(scheduler, "first", 9)
    step(scheduler)
    assert not scheduler.layer.reclamation.reservations._is_short
    add(scheduler, "second", 14)
    scheduler.layer.control.patch({"check_interval_steps": 1000})
    step(scheduler)
    step(scheduler)
    assert scheduler.layer.reclamation.reservations._is_short


@pytest.mark.parametrize("headroom", [0, 4])
def test_priorities_are_respected(headroom: int) -> None:
    """The urgent request of two that wait is admitted, and the unimportant one that runs gives
    way, with headroom and without."""
    scheduler = make_scheduler(18 + headroom, "priority", headroom_blocks=headroom)
    add(scheduler, "unimportant", 8, priority=9)
    add(scheduler, "normal", 3, priority=5)
    step(scheduler)
    add(scheduler, "idle", 3, priority=8)
    add(scheduler, "urgent", 4, priority=1)  # five are free beside the headroom
    with_urgent = step(scheduler)
    assert "urgent" in with_urgent
    assert "idle" not in with_urgent
    while not counter(scheduler, "preemptions_total"):
        step(scheduler)
    running = {request.request_id for request in scheduler.running}
    assert {"normal", "urgent"} <= running
    assert "unimportant" not in running
