"""Watching the processes of a server: real ones, which do what API processes and engines do."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from types import ModuleType
from typing import Any

import pytest

CONTEXT = multiprocessing.get_context("spawn")


@pytest.fixture(scope="module")
def supervisor() -> ModuleType:
    """The module, imported here: it imports vLLM, which takes seconds and warns."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from service import supervisor
    return supervisor


@pytest.fixture(autouse=True)
def _own_signals() -> Iterator[None]:
    """The test's process has its handlers back afterwards."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


def serve(ready: Any, code: int = 0, signals: int = 1, log: Any = None) -> None:
    """Until it was told to end so many times; ``log`` gets the number each time."""
    told = threading.Semaphore(0)
    signal.signal(signal.SIGTERM, lambda *_: told.release())
    ready.set()
    for number in range(signals):
        while not told.acquire(timeout=0.01):
            pass
        if log is not None:
            log.put(number)
    sys.exit(code)


def start(**options: Any) -> BaseProcess:
    """One that serves."""
    ready = CONTEXT.Event()
    process = CONTEXT.Process(target=serve, args=(ready,), kwargs=options, daemon=True)
    process.start()
    assert ready.wait(300)
    return process


@pytest.fixture
def fleet(supervisor: ModuleType) -> Iterator[Any]:
    """Makes fleets, and leaves no process."""
    made: list[BaseProcess] = []

    def make(*api: BaseProcess) -> Any:
        engine = start()
        made.extend([engine, *api])
        return supervisor.Fleet(api, [engine])

    yield make
    for process in made:
        process.kill()
        process.join()


def watch(
    supervisor: ModuleType,
    fleet: Any,
    *events: Callable[[], object],
    drain_seconds: float = 60.0,
    announce: Callable[[], None] = lambda: None,
) -> int:
    """The exit code, while ``events`` happen, once it watches: it takes the signals by then."""

    def happen() -> None:
        for event in events:
            event()

    thread = threading.Thread(target=happen, daemon=True)

    def ready() -> None:
        announce()
        thread.start()

    code: int = supervisor.Watch(fleet, drain_seconds).until_stopped(lambda: True, ready)
    thread.join()
    return code


def was_told(log: Any) -> Callable[[], object]:
    """Waits until the process of this log has heeded a signal: two at once would be one."""
    return lambda: log.get(timeout=300)


def has_ended(process: BaseProcess) -> Callable[[], object]:
    """Waits for its end: on its way out a process has no handler any more."""
    return lambda: connection.wait([process.sentinel], 300)


def send(number: int) -> Callable[[], None]:
    """A signal to the supervisor."""
    return lambda: os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_stops_all_and_is_success(supervisor: ModuleType, fleet: Any, number: int) -> None:
    """Each API process is told once and ends by itself; the engine is left to be closed."""
    both, said = fleet(start(), start()), []
    code = watch(supervisor, both, send(number), announce=lambda: said.append(1))
    assert code == 0
    assert [process.exitcode for process in both.api] == [0, 0]
    assert both.engines[0].is_alive()
    assert both.close_seconds > 0
    assert said == [1], "the ready line is there once"


def test_second_signal_ends_what_is_open(supervisor: ModuleType, fleet: Any) -> None:
    """A process that still waits for its requests is told again; the code names the signal."""
    log = CONTEXT.Queue()
    both = fleet(start(), start(signals=2, code=143, log=log))
    terminate = send(signal.SIGTERM)
    between = has_ended(both.api[0]), was_told(log)
    assert watch(supervisor, both, terminate, *between, terminate) == 143
    assert [process.exitcode for process in both.api] == [0, 143]
    assert both.close_seconds == 0


def test_dead_process_stops_the_others_and_is_failure(
    supervisor: ModuleType, fleet: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """They are told once, and so may finish what they have; half a server does not go on."""
    log = CONTEXT.Queue()
    both = fleet(start(), start(log=log))
    with caplog.at_level(logging.ERROR):
        assert watch(supervisor, both, both.api[0].kill) == 1
    assert [process.exitcode for process in both.api] == [-signal.SIGKILL, 0]
    assert log.get(timeout=300) == 0
    assert log.empty()
    assert f"{both.api[0].name} died with exit code -9; the server stops" in caplog.text


def test_process_that_leaves_unasked_is_failure_too(supervisor: ModuleType, fleet: Any) -> None:
    """Also with code 0: it was to serve until told."""
    both = fleet(start(), start())
    assert watch(supervisor, both, both.api[1].terminate) == 1


def test_dead_engine_ends_what_can_never_finish(
    supervisor: ModuleType, fleet: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """API processes are told again and again, so none waits for answers that cannot come."""
    both = fleet(start(signals=2), start(signals=3))
    with caplog.at_level(logging.ERROR):
        assert watch(supervisor, both, both.engines[0].kill) == 1
    assert f"{both.engines[0].name} died with exit code -9" in caplog.text


def test_engine_that_dies_while_stopping_is_failure(supervisor: ModuleType, fleet: Any) -> None:
    """Requests that were to be finished are lost."""
    log = CONTEXT.Queue()
    both = fleet(start(signals=3, log=log), start())
    events = send(signal.SIGTERM), was_told(log), both.engines[0].kill
    assert watch(supervisor, both, *events) == 1


def test_bad_end_is_failure(supervisor: ModuleType, fleet: Any) -> None:
    """A process that breaks while it stops has lost something."""
    assert watch(supervisor, fleet(start(code=3), start()), send(signal.SIGTERM)) == 1


def test_process_that_does_not_end_is_killed(
    supervisor: ModuleType, fleet: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Past the drain's time and some more."""
    for name in ("CUT_SECONDS", "HURRY_SECONDS", "CLOSE_SECONDS"):
        monkeypatch.setattr(supervisor, name, 0)
    both = fleet(start(), start(signals=99))
    assert watch(supervisor, both, send(signal.SIGTERM), drain_seconds=0.1) == 1
    assert both.api[1].exitcode == -signal.SIGKILL
