"""The CPU engine keeps the contract; failures and stalls of its thread are visible."""

import importlib.util
import logging
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from vtoken.copy_engine import cpu
from vtoken.copy_engine.cpu import CpuCopyEngine

# Test files are imported one by one (importlib mode), so a neighbour is loaded by path.
_spec = importlib.util.spec_from_file_location(
    "copy_engine_contract", Path(__file__).with_name("contract.py")
)
contract = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(contract)
make_pool, slots = contract.make_pool, contract.slots


class TestCpuCopyEngine(contract.CopyEngineContract):
    """The shared contract."""

    def make_engine(self, pool):
        return CpuCopyEngine(pool)


class GatedPool:
    """A pool whose copies wait for a signal, then succeed or fail."""

    num_slots = contract.NUM_SLOTS

    def __init__(self, failing=()):
        self.begun, self.gate = threading.Event(), threading.Event()
        self.failing = failing
        self.num_copies = 0

    def copy(self, src_slots, dst_slots):
        self.begun.set()
        assert self.gate.wait(300)
        self.num_copies += 1
        if self.num_copies in self.failing:
            raise RuntimeError("disk on fire\nand more")
        return 10 * len(src_slots)


def test_failed_copy_becomes_a_result_and_the_engine_goes_on(caplog):
    """One batch fails; the next is still copied and the process lives."""
    pool = GatedPool(failing={1})
    pool.gate.set()
    engine = CpuCopyEngine(pool)
    with caplog.at_level(logging.CRITICAL):
        engine.submit(1, slots(1), slots(20))
        engine.submit(2, slots(2), slots(21))
        engine.wait_before_read()
    failed, copied = engine.poll()
    assert failed.error == "RuntimeError: disk on fire"
    assert (failed.ticket, failed.num_bytes) == (1, 0)
    assert (copied.ticket, copied.error, copied.num_bytes) == (2, None, 10)
    engine.close()


def test_submit_returns_while_the_copy_runs():
    """Submitting never waits for the copy, nor for earlier ones."""
    pool = GatedPool()
    engine = CpuCopyEngine(pool)
    engine.submit(1, slots(1), slots(20))
    engine.submit(2, slots(2), slots(21))
    assert pool.num_copies == 0
    pool.gate.set()
    engine.close()
    assert pool.num_copies == 2


def test_stall_is_the_time_the_wait_was_blocked(monkeypatch):
    """A wait for an unfinished copy is measured as stall, the copy from its own beginning."""
    now = [10.0]
    monkeypatch.setattr(cpu, "time", SimpleNamespace(monotonic=lambda: now[0]))
    pool = GatedPool()
    engine = CpuCopyEngine(pool)
    engine.submit(1, slots(1), slots(20))
    assert pool.begun.wait(300)
    now[0] += 2
    done = engine._outstanding[0].done
    wait = done.wait

    def blocked():
        now[0] += 3
        pool.gate.set()
        return wait()

    monkeypatch.setattr(done, "wait", blocked)
    engine.wait_before_read()
    (result,) = engine.poll()
    assert (result.copy_seconds, result.stall_seconds) == (5, 3)
    engine.close()


def test_finished_copy_costs_no_stall():
    """A copy that ended before the wait stalls nobody, whatever it took itself."""
    pool = GatedPool()
    engine = CpuCopyEngine(pool)
    engine.submit(1, slots(1), slots(20))
    batch = engine._outstanding[0]
    pool.gate.set()
    assert batch.done.wait(300)
    engine.wait_before_read()
    assert engine.poll()[0].stall_seconds == 0
    engine.close()


def test_copies_run_on_one_daemon_thread():
    """The thread is named for stack dumps and cannot keep a dying process alive."""
    engine = CpuCopyEngine(make_pool())
    (thread,) = [t for t in threading.enumerate() if t.name == "vtoken-copy"]
    assert thread.daemon
    engine.close()
    assert not thread.is_alive()


@pytest.mark.parametrize("num_waits", [1, 3])
def test_repeated_waits_report_each_batch_once(num_waits):
    """Joining twice, as a 0-token step and its successor do, reports once."""
    engine = CpuCopyEngine(make_pool())
    engine.submit(1, slots(1), slots(20))
    for _ in range(num_waits):
        engine.wait_before_read()
    assert len(engine.poll()) == 1
    engine.close()
