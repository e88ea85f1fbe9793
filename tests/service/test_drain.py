"""Waiting for open requests: to the last one, to the deadline, or to a second signal."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from service import drain as drain_module
from service.drain import CLOSE_SECONDS, Drain, DrainingShutdown


@pytest.fixture(autouse=True)
def _time_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """For requests that were cut off, on a slow machine, too."""
    monkeypatch.setattr(drain_module, "CUT_SECONDS", 300)


def test_nothing_open_is_nothing_to_wait_for() -> None:
    """And from then on nobody enters."""
    drain = Drain(60)
    assert drain.wait() == 0
    assert drain.is_draining
    assert not drain.enter(make_cut())


def test_wait_ends_with_the_last_request() -> None:
    """Leaving wakes the one who waits."""
    drain = Drain(60)
    first, second = make_cut(), make_cut()
    assert drain.enter(first)
    assert drain.enter(second)
    lost: list[int] = []
    thread = threading.Thread(target=lambda: lost.append(drain.wait()))
    thread.start()
    drain.leave(first)
    drain.leave(second)
    thread.join(timeout=30)
    assert lost == [0]


def test_deadline_cuts_off_those_that_are_left() -> None:
    """They are told, and the wait ends when they have ended."""
    drain, cut = Drain(0.02), make_cut()
    cut.side_effect = lambda: threading.Timer(0.01, drain.leave, [cut]).start()
    assert drain.enter(cut)
    assert drain.wait() == 1
    cut.assert_called_once()
    assert drain.num_open == 0


def make_cut() -> Mock:
    """Ends a request."""
    return Mock()


def make_client() -> SimpleNamespace:
    """An engine client that notes how it was shut down."""
    timeouts: list[float | None] = []
    return SimpleNamespace(
        timeouts=timeouts, hurry=Mock(), shutdown=lambda timeout=None: timeouts.append(timeout)
    )


def test_shutdown_waits_in_another_thread_and_gives_the_engine_time_to_close() -> None:
    """As vLLM's server calls it after a signal."""

    async def run() -> None:
        client, drain = make_client(), Drain(60)
        DrainingShutdown(client, drain, client.hurry)
        cut = make_cut()
        drain.enter(cut)
        stopping = asyncio.get_running_loop().run_in_executor(None, client.shutdown, 120)
        while not drain.is_draining:
            await asyncio.sleep(0.001)
        assert client.timeouts == []
        drain.leave(cut)
        await stopping
        client.hurry.assert_not_called()
        assert client.timeouts == [CLOSE_SECONDS]

    asyncio.run(run())


def test_second_signal_aborts_at_once() -> None:
    """The engine gets no time any more; the signal's number is kept for the exit code."""
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)

    async def run() -> None:
        client, drain = make_client(), Drain(3600)
        DrainingShutdown(client, drain, client.hurry)
        cut = make_cut()
        cut.side_effect = lambda: threading.Timer(0.01, drain.leave, [cut]).start()
        drain.enter(cut)
        stopping = asyncio.get_running_loop().run_in_executor(None, client.shutdown)
        while not drain.is_draining:
            await asyncio.sleep(0.001)
        while signal.getsignal(signal.SIGTERM) is before[0]:
            await asyncio.sleep(0.001)
        os.kill(os.getpid(), signal.SIGTERM)
        await stopping
        assert client.timeouts == [0]
        client.hurry.assert_called_once()
        assert drain.aborted_by == signal.SIGTERM

    try:
        asyncio.run(run())
    finally:
        signal.signal(signal.SIGTERM, before[0])
        signal.signal(signal.SIGINT, before[1])


def test_the_loops_own_thread_never_waits() -> None:
    """At the end of a server whose engine died, requests may be open for ever."""

    async def run() -> None:
        client, drain = make_client(), Drain(3600)
        DrainingShutdown(client, drain, client.hurry)
        drain.enter(make_cut())
        client.shutdown(timeout=3)
        assert client.timeouts == [3]

    asyncio.run(run())
