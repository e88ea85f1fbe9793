"""How many requests are open at once, and when they are sent."""

from __future__ import annotations

import asyncio

import pytest

from loadtest.drive import closed_loop, open_loop
from loadtest.latency import Answer
from loadtest.workloads import Job

JOBS = [Job((n,), n) for n in range(9)]


class Recorder:
    """Answers after a few turns of the event loop; knows how many were open at most."""

    def __init__(self) -> None:
        self.open = 0
        self.most = 0
        self.sent: list[int] = []

    async def __call__(self, job: Job) -> Answer:
        self.open += 1
        self.most = max(self.most, self.open)
        self.sent.append(job.max_tokens)
        for _ in range(1 + job.max_tokens % 3):
            await asyncio.sleep(0)
        self.open -= 1
        return Answer(0.0, 0.0, num_output_tokens=job.max_tokens)


@pytest.mark.parametrize("concurrency", [1, 4, 9, 20])
def test_closed_loop_keeps_so_many_open(concurrency):
    """Never more, each job once, answers in the order of the jobs."""
    send = Recorder()
    answers = asyncio.run(closed_loop(send, JOBS, concurrency))
    assert send.most == min(concurrency, len(JOBS))
    assert sorted(send.sent) == list(range(9))
    assert [a.num_output_tokens for a in answers] == list(range(9))


def test_open_loop_waits_for_nobody():
    """All that are due are sent although none has been answered."""
    send = Recorder()
    answers = asyncio.run(open_loop(send, JOBS, [0.0] * 9))
    assert send.most == 9
    assert [a.num_output_tokens for a in answers] == list(range(9))


def test_open_loop_sends_in_the_order_of_the_offsets():
    """Later offsets are sent later."""
    send = Recorder()
    asyncio.run(open_loop(send, JOBS[:3], [0.4, 0.2, 0.0]))
    assert send.sent == [2, 1, 0]


def test_every_job_needs_its_offset():
    """A missing one is the caller's fault."""
    with pytest.raises(ValueError, match="9 jobs need as many offsets, not 1"):
        asyncio.run(open_loop(Recorder(), JOBS, [0.0]))
