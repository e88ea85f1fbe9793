"""The CUDA engine keeps the contract, and streams wait for each other in the right order."""

import importlib.util
import logging
from pathlib import Path

import pytest
import torch

from vtoken.copy_engine.cuda import CudaCopyEngine, choose_mover
from vtoken.kv_pages import PagedKV
from vtoken.paged_pool import PagedPool, move_by_index


def _neighbour(name):
    # Test files are imported one by one (importlib mode), so a neighbour is loaded by path.
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


contract, fakes = _neighbour("contract"), _neighbour("fake_streams")
slots = contract.slots


def make_paged_pool(mover=move_by_index):
    """A paged pool with random contents, of the contract's size."""
    shape = (3, contract.BLOCKS, contract.HEADS, contract.SIZE, 2 * contract.DIM)
    backing = torch.randn(shape).to(torch.bfloat16)
    return PagedPool([PagedKV.from_cache(layer) for layer in backing], mover)


class TestCudaCopyEngine(contract.CopyEngineContract):
    """The shared contract, over the paged pool and recorded streams."""

    @pytest.fixture
    def pool(self):
        return make_paged_pool()

    def make_engine(self, pool):
        return CudaCopyEngine(pool, fakes.FakeStreams())


def make_engine(failing=False):
    """An engine and the streams it uses."""
    streams = fakes.FakeStreams()
    pool = fakes.RecordingPool(make_paged_pool(), streams, failing)
    return CudaCopyEngine(pool, streams), streams


def test_copies_run_between_the_forward_and_the_next_one():
    """Forward event → copies → relocation event → the compute stream waits."""
    engine, streams = make_engine()
    streams.log.append(("forward", "compute", 0))
    engine.submit(1, slots(1, 2), slots(20, 21))
    engine.wait_before_read()
    streams.log.append(("forward", "compute", 1))
    assert streams.log == [
        ("forward", "compute", 0),
        ("record", "compute", "event 0"),
        ("wait", "relocation", "event 0"),
        ("record", "relocation", "event 1"),
        ("upload", "relocation", (2, 2)),
        ("copy", "relocation", 2),
        ("record", "relocation", "event 2"),
        ("record", "compute", "event 3"),
        ("wait", "compute", "event 2"),
        ("record", "compute", "event 4"),
        ("forward", "compute", 1),
    ]


def test_every_batch_is_waited_for_whatever_became_of_its_requests():
    """The engine knows no requests: two batches, nobody asks for the results, both are joined."""
    engine, streams = make_engine()
    engine.submit(1, slots(1), slots(20))
    engine.submit(2, slots(2), slots(21))
    done = [entry[2] for i, entry in enumerate(streams.log) if streams.log[i - 1][0] == "copy"]
    engine.wait_before_read()
    waits = [entry[2] for entry in streams.log if entry[:2] == ("wait", "compute")]
    assert waits == done
    assert len(waits) == 2


def test_a_batch_is_waited_for_once():
    """Joining again queues nothing."""
    engine, streams = make_engine()
    engine.submit(1, slots(1), slots(20))
    engine.wait_before_read()
    length = len(streams.log)
    engine.wait_before_read()
    assert len(streams.log) == length


def test_close_orders_what_is_outstanding():
    """The cache may be freed or reused behind it on the compute stream."""
    engine, streams = make_engine()
    engine.submit(1, slots(1), slots(20))
    engine.close()
    assert ("wait", "compute", "event 2") in streams.log


def test_failed_launch_becomes_a_result_and_is_still_waited_for(caplog):
    """Part of it may have been queued; the engine goes on."""
    engine, streams = make_engine(failing=True)
    with caplog.at_level(logging.CRITICAL):
        engine.submit(1, slots(1), slots(20))
    engine.wait_before_read()
    (result,) = engine.poll()
    assert result.error == "RuntimeError: an illegal memory access was encountered"
    assert result.num_bytes == 0
    assert ("wait", "compute", "event 2") in streams.log
    assert streams.current is streams.compute()


def test_times_are_read_once_they_happened_and_travel_with_a_later_result():
    """The first result has none; the second carries the first batch's, from its events."""
    engine, _ = make_engine()
    engine.submit(1, slots(1), slots(20))
    engine.wait_before_read()
    (first,) = engine.poll()
    assert (first.copy_seconds, first.stall_seconds) == (0.0, 0.0)
    engine.submit(2, slots(2), slots(21))
    engine.wait_before_read()
    (second,) = engine.poll()
    # In the recording, time is the place in the log: see the order above.
    assert (second.copy_seconds, second.stall_seconds) == (0.003, 0.002)


def test_times_that_did_not_happen_yet_are_not_waited_for():
    """While the device lags behind, results carry zeros; afterwards each time comes once."""
    engine, streams = make_engine()
    results = []
    for ticket in range(6):
        engine.submit(ticket, slots(ticket), slots(30 + ticket))
        engine.wait_before_read()
        for event in streams.events:
            event.happened = ticket >= 2
        results += engine.poll()
    assert [result.copy_seconds > 0 for result in results] == [False] * 3 + [True] * 3


def test_the_mover_without_cuda_is_torchs():
    """On a CPU, Triton or not, copies are torch's."""
    assert choose_mover(torch.device("cpu")) is move_by_index
