"""Sends jobs: a closed loop of so many clients, or an open loop with arrival times."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence

from loadtest.latency import Answer
from loadtest.workloads import Job

Send = Callable[[Job], Awaitable[Answer]]


async def closed_loop(send: Send, jobs: Sequence[Job], concurrency: int) -> list[Answer]:
    """Keep ``concurrency`` requests open until all jobs are done; answers in the jobs' order."""
    answers: list[Answer | None] = [None] * len(jobs)
    queue = iter(enumerate(jobs))

    async def client() -> None:
        for index, job in queue:
            answers[index] = await send(job)

    await asyncio.gather(*(client() for _ in range(min(concurrency, len(jobs)))))
    return [answer for answer in answers if answer is not None]


async def open_loop(send: Send, jobs: Sequence[Job], offsets: Sequence[float]) -> list[Answer]:
    """Send each job at its time, whatever became of the others; answers in the jobs' order.

    Raises:
        ValueError: not as many offsets as jobs.
    """
    if len(jobs) != len(offsets):
        raise ValueError(f"{len(jobs)} jobs need as many offsets, not {len(offsets)}")
    start = time.monotonic()

    async def later(job: Job, offset: float) -> Answer:
        await asyncio.sleep(max(0.0, start + offset - time.monotonic()))
        return await send(job)

    pairs = zip(jobs, offsets, strict=True)
    return list(await asyncio.gather(*(later(job, offset) for job, offset in pairs)))
