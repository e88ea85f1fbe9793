"""Open requests by key: in one process, and exactly over several."""

from __future__ import annotations

import multiprocessing
import random
from collections.abc import Callable
from multiprocessing.synchronize import Lock
from typing import Any

import pytest

from service import open_requests
from service.open_requests import (
    LocalOpenRequests,
    OpenRequests,
    SharedOpenRequests,
    make_table,
)

CONTEXT = multiprocessing.get_context("spawn")
KEYS = [f"name:team-{number}" for number in range(5)]
MOST = 3


def make_shared() -> SharedOpenRequests:
    return SharedOpenRequests(CONTEXT.Lock(), make_table(CONTEXT))


@pytest.mark.parametrize("make", [LocalOpenRequests, make_shared])
def test_a_key_has_at_most_so_many(make: Callable[[], OpenRequests]) -> None:
    """Others are not touched; what ends makes room."""
    opened = make()
    assert [opened.enter("a", 2) for _ in range(3)] == [True, True, False]
    assert opened.enter("", 2)
    assert opened.enter("b", 1)
    opened.leave("a")
    assert [opened.enter("a", 2) for _ in range(2)] == [True, False]


@pytest.mark.parametrize("make", [LocalOpenRequests, make_shared])
def test_any_order_of_requests_is_counted_right(make: Callable[[], OpenRequests]) -> None:
    """Against a plain count, at random."""
    opened, plain = make(), dict.fromkeys(KEYS, 0)
    chance = random.Random(5)
    for _ in range(3000):
        key = chance.choice(KEYS)
        if chance.random() < 0.5 and plain[key]:
            opened.leave(key)
            plain[key] -= 1
        else:
            assert opened.enter(key, MOST) == (plain[key] < MOST)
            plain[key] = min(MOST, plain[key] + 1)


def test_full_table_takes_no_new_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """It refuses; a key that has its row, and one that comes after an end, get in."""
    monkeypatch.setattr(open_requests, "NUM_ROWS", 2)
    opened = make_shared()
    assert opened.enter("a", 9)
    assert opened.enter("b", 9)
    assert not opened.enter("c", 9)
    assert opened.enter("a", 9)
    opened.leave("b")
    assert opened.enter("c", 9)
    assert not opened.enter("b", 9)


def test_lock_of_a_dead_process_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed with the lock in hand: the others go on after a moment, and release nothing."""
    monkeypatch.setattr(open_requests, "LOCK_SECONDS", 0.01)
    lock = CONTEXT.Lock()
    opened = SharedOpenRequests(lock, make_table(CONTEXT))
    lock.acquire()
    assert opened.enter("a", 1)
    assert not opened.enter("a", 1)
    assert not lock.acquire(block=False)


def hammer(lock: Lock, table: Any, held: Any, worst: Any) -> None:
    """Enter and leave in a process of its own, and note the most that was open at once."""
    open_requests.LOCK_SECONDS = 300  # nobody dies here, however slow the machine is
    opened = SharedOpenRequests(lock, table)
    for _ in range(2000):
        if opened.enter("same", MOST):
            with held.get_lock():
                held.value += 1
                worst.value = max(worst.value, held.value)
            with held.get_lock():
                held.value -= 1
            opened.leave("same")


def test_several_processes_never_pass_the_bound_together() -> None:
    """Four at once, two thousand turns each; in the end nothing is open."""
    lock, table = CONTEXT.Lock(), make_table(CONTEXT)
    held, worst = CONTEXT.Value("i", 0), CONTEXT.Value("i", 0)
    workers = [
        CONTEXT.Process(target=hammer, args=(lock, table, held, worst), daemon=True)
        for _ in range(4)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(timeout=300)
    assert [worker.exitcode for worker in workers] == [0] * 4
    assert 1 <= worst.value <= MOST
    opened = SharedOpenRequests(lock, table)
    assert [opened.enter("same", MOST) for _ in range(MOST + 1)] == [True] * MOST + [False]
