"""What the API processes of one server hold in common, seen from several of them."""

from __future__ import annotations

import multiprocessing
from argparse import Namespace
from pathlib import Path

from service.admission import QueueEstimate
from service.pulse import Pulse
from service.refusals import REASONS, Refusals
from service.shared import Shared, make_shared, shared_of


def serve(args: Namespace, index: int) -> None:
    """What a process does with its part."""
    shared = shared_of(args)
    assert shared is not None
    shared.index = index
    assert shared.is_first == (index == 0)
    shared.started.add()
    shared.sent.add(10 * (index + 1))
    Refusals(shared.refused).count("draining")
    assert shared.open_requests().enter("key", 9)


def test_processes_count_together(tmp_path: Path) -> None:
    """Spawned with the arguments, as vLLM spawns them; the supervisor sees the sums."""
    shared = make_shared(2, tmp_path)
    context = multiprocessing.get_context("spawn")
    args = Namespace(vtoken_shared=shared)
    workers = [context.Process(target=serve, args=(args, index), daemon=True) for index in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(timeout=300)
    assert [worker.exitcode for worker in workers] == [0, 0]
    assert (shared.started.total(), shared.sent.total()) == (2, 30)
    assert Refusals(shared.refused).totals() == {**dict.fromkeys(REASONS, 0), "draining": 2}
    opened = shared.open_requests()
    assert not opened.enter("key", 2)
    assert opened.enter("key", 3)


def test_a_server_with_one_process_shares_nothing() -> None:
    """Nor does vLLM's render-only server, which has no arguments of ours."""
    assert shared_of(Namespace()) is None
    assert shared_of(None) is None


def view(shared: Shared, index: int) -> QueueEstimate:
    """The queue as one process knows it."""
    shared.index = index
    return QueueEstimate(shared.sent)


def test_queue_is_estimated_from_what_all_processes_sent(tmp_path: Path) -> None:
    """The engine's queue is everybody's: each comes to the same wait, whoever sent the requests."""
    shared = make_shared(2, tmp_path)
    queues = [view(shared, index) for index in range(2)]
    for second, waiting in enumerate([0, 36, 32, 28]):
        if second == 1:
            queues[0].sent(30)
            queues[1].sent(10)
        for queue in queues:
            queue.note(Pulse(running=4, waiting=waiting, steps=second), float(second))
    assert [queue.wait_seconds() for queue in queues] == [29 / 4, 29 / 4]
    queues[0].sent(8)
    assert queues[1].wait_seconds() == 37 / 4, "a burst at the other process counts at once"
