"""One run of one arm, and the order of runs: what every scenario is made of."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, TypeVar

from loadtest.client import Client
from loadtest.drive import closed_loop, open_loop
from loadtest.fleet import Arm, Fleet
from loadtest.latency import Answer
from loadtest.outcome import Outcome
from loadtest.probe import POLL_SECONDS, Metrics, Sample, Sampler
from loadtest.workloads import Job, Lengths

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

S = TypeVar("S", bound="DataclassInstance")

logger = logging.getLogger(__name__)

_IDLE_SECONDS = 120.0


@dataclass(frozen=True)
class Load:
    """How jobs are sent: ``concurrency`` clients in a closed loop, or ``offsets`` in seconds.

    Attributes:
        concurrency: requests open at once; 0: all of them.
        offsets: arrival times of an open loop; then ``concurrency`` does not count.
    """

    concurrency: int = 0
    offsets: tuple[float, ...] = ()


@dataclass(frozen=True)
class Run:
    """What one run showed.

    Attributes:
        arm: its name.
        seed: of its jobs.
        answers: in the order of the jobs.
        samples: of the engine, meanwhile.
        before, after: the two readings of ``/metrics``, with nothing running.
        is_off: whether the arm is stock vLLM.
    """

    arm: str
    seed: int
    answers: Sequence[Answer]
    samples: Sequence[Sample]
    before: Metrics
    after: Metrics
    is_off: bool

    def gained(self, name: str, **labels: str) -> float:
        """What a counter gained."""
        return self.after.total(name, **labels) - self.before.total(name, **labels)

    @property
    def failures(self) -> list[str]:
        """Reasons of the requests that failed."""
        return [answer.error for answer in self.answers if answer.error]


@dataclass
class Bench:
    """What a scenario is given to measure with.

    Attributes:
        fleet: the services.
        repeats: of each arm, or 0: as the scenario's size says.
        size: ``full``, ``quick`` or ``smoke``.
        poll_seconds: between two looks at the engine.
        overrides: fields of the scenario's size that were given on the command line.
        model: name of the folder that is served; empty for the embedded model.
        notes: sentences for the report; scenarios add to them.
        failures: reasons of requests that failed.
        outcome: what the scenario has measured so far.
    """

    fleet: Fleet
    repeats: int = 0
    size: str = "full"
    poll_seconds: float = POLL_SECONDS
    overrides: Mapping[str, Any] = field(default_factory=dict)
    model: str = ""
    notes: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    outcome: Outcome | None = None

    def begin(self, outcome: Outcome) -> Outcome:
        """The outcome to fill, known here from now on: an error later does not lose it."""
        self.outcome = outcome
        return outcome

    def sized(self, sizes: Mapping[str, S]) -> S:
        """The scenario's size with the overrides put in.

        Raises:
            ValueError: the scenario's size has no such field.
        """
        size = sizes[self.size]
        known = {f.name for f in fields(size)}
        if unknown := self.overrides.keys() - known:
            raise ValueError(f"no {', '.join(sorted(unknown))} here: {', '.join(sorted(known))}")
        values = {n: _alike(getattr(size, n), value) for n, value in self.overrides.items()}
        return replace(size, **values)

    async def run(
        self, arm: Arm, jobs: Sequence[Job], load: Load, seed: int, *, watch: bool = True
    ) -> Run:
        """Send the jobs to the arm's service and look at it meanwhile.

        Args:
            arm: the configuration.
            jobs: to send.
            load: how.
            seed: of the jobs.
            watch: whether the engine is looked at while it works. Looking takes time, not the same
                in mode ``off``: for a comparison of speeds with that, do not.

        Raises:
            RuntimeError: more than a tenth of the requests failed.
        """
        client = await self.fleet.client(arm)
        if not arm.is_off:
            jobs = [_with_receipt(job) for job in jobs]
        async with self._between_readings(client, arm, watch=watch) as run:
            if load.offsets:
                answers = await open_loop(_sender(client), jobs, load.offsets)
            else:
                limit = load.concurrency or len(jobs)
                answers = await closed_loop(_sender(client), jobs, limit)
            run["answers"] = answers
        result = Run(arm=arm.name, seed=seed, is_off=arm.is_off, **run)
        self.failures += [f"{arm.name}: {reason}" for reason in result.failures]
        if len(result.failures) > len(jobs) // 10:
            raise RuntimeError(f"{arm.name}: {len(result.failures)} failed: {result.failures[0]}")
        return result

    @asynccontextmanager
    async def _between_readings(
        self, client: Client, arm: Arm, *, watch: bool
    ) -> AsyncIterator[dict[str, Any]]:
        """Readings before and after, and samples in between, into the dictionary it gives."""
        await wait_idle(client)
        run: dict[str, Any] = {"before": Metrics(await client.metrics_text())}
        sampler = Sampler(client, is_off=arm.is_off, seconds=self.poll_seconds)
        started = time.monotonic()
        async with sampler if watch else contextlib.nullcontext():
            yield run
        await wait_idle(client)
        await asyncio.sleep(self.fleet.settle_seconds(arm))
        run |= {"samples": sampler.samples, "after": Metrics(await client.metrics_text())}
        logger.info(
            "%s: %.1f s, %d samples", arm.name, time.monotonic() - started, len(run["samples"])
        )


async def wait_idle(client: Client) -> None:
    """Until nothing runs or waits.

    Raises:
        TimeoutError: something still does after two minutes.
    """
    async with asyncio.timeout(_IDLE_SECONDS):
        while True:
            metrics = Metrics(await client.metrics_text())
            names = ("vllm:num_requests_running", "vllm:num_requests_waiting")
            if not sum(metrics.total(name) for name in names):
                return
            await asyncio.sleep(0.1)


def abba(names: Sequence[str], repeats: int) -> Iterator[tuple[int, str]]:
    """Repeat number and name, in an order that cancels linear drift: A B, B A, A B, …

    Repeat ``-1`` comes first, once for each name: the warm-up, whose results are discarded.
    """
    yield from ((-1, name) for name in names)
    for repeat in range(repeats):
        for name in names if repeat % 2 == 0 else reversed(names):
            yield repeat, name


def _alike(model: Any, value: Any) -> Any:
    """A value from JSON in the type of the one it replaces."""
    if isinstance(model, Lengths):
        return Lengths(*value)
    if isinstance(model, dict):
        return {name: _alike((), part) for name, part in value.items()}
    return tuple(value) if isinstance(model, tuple) else value


def _sender(client: Client) -> Any:
    async def send(job: Job) -> Answer:
        return await client.stream(**job.body())

    return send


def _with_receipt(job: Job) -> Job:
    wanted: Mapping[str, Any] = {**job.extra.get("vllm_xargs", {}), "vtoken_receipt": True}
    return replace(job, extra={**job.extra, "vllm_xargs": dict(wanted)})
