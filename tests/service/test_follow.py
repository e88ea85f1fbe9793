"""A process whose parent was killed ends by itself."""

from __future__ import annotations

import multiprocessing
import signal
import time
from pathlib import Path
from typing import Any

import psutil

from service import follow

CONTEXT = multiprocessing.get_context("spawn")


def leaf(seen: Path) -> None:
    """Takes the second SIGTERM for its end, and notes each."""
    told: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: told.append(number))
    follow.SECONDS_BETWEEN_SIGNALS = 0.01
    follow.follow_parent()
    seen.write_text("ready")
    while len(told) < 2:
        time.sleep(0.01)
    seen.write_text("ended")


def engine(seen: Path) -> None:
    """Would note a signal and go on; its main thread is busy for ever."""
    signal.signal(signal.SIGTERM, lambda *_: seen.write_text("signalled"))
    follow.leave_with_parent()
    seen.write_text("ready")
    while True:
        time.sleep(0.01)


def parent(target: Any, pids: Any, seen: Path) -> None:
    """Starts the other and waits for ever."""
    child = CONTEXT.Process(target=target, args=(seen,))
    child.start()
    pids.put(child.pid)
    child.join()


def outlive(target: Any, seen: Path) -> str:
    """What it has noted when it ends, which is after its parent was killed and not before."""
    pids = CONTEXT.Queue()
    middle = CONTEXT.Process(target=parent, args=(target, pids, seen))
    middle.start()
    process = psutil.Process(pids.get(timeout=300))
    while not seen.exists() or seen.read_text() != "ready":
        time.sleep(0.01)
    assert process.is_running()
    middle.kill()
    middle.join()
    gone, _ = psutil.wait_procs([process], timeout=300)
    assert gone
    return seen.read_text()


def test_child_of_a_killed_parent_is_told_until_it_ends(tmp_path: Path) -> None:
    """Not while the parent lives; SIGKILL leaves it no time to say anything."""
    assert outlive(leaf, tmp_path / "seen") == "ended"


def test_engine_of_a_killed_parent_is_gone_at_once(tmp_path: Path) -> None:
    """It is not asked: it would finish requests whose answers nobody reads."""
    assert outlive(engine, tmp_path / "seen") == "ready"
