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


def parent(pids: Any, seen: Path) -> None:
    """Starts the other and waits for ever."""
    child = CONTEXT.Process(target=leaf, args=(seen,))
    child.start()
    pids.put(child.pid)
    child.join()


def test_child_of_a_killed_parent_is_told_until_it_ends(tmp_path: Path) -> None:
    """Not while the parent lives; SIGKILL leaves it no time to say anything."""
    pids, seen = CONTEXT.Queue(), tmp_path / "seen"
    middle = CONTEXT.Process(target=parent, args=(pids, seen))
    middle.start()
    process = psutil.Process(pids.get(timeout=60))
    while not seen.exists() or seen.read_text() != "ready":
        time.sleep(0.01)
    assert process.is_running()
    middle.kill()
    middle.join()
    psutil.wait_procs([process], timeout=60)
    assert seen.read_text() == "ended"
