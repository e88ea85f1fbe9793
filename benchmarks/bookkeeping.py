"""What the token layer costs the scheduler per engine step, from 64 to 1024 requests.

The code under test is the engine's own: :mod:`vtoken.integration.vllm.step` over a real
:class:`~vtoken.token_layer.TokenLayer`. Simulated are vLLM's scheduling (each request decodes one
token per step) and the worker (a relocation sent with one step is reported with the next).

Each case starts in the middle of a long decode: prompts of L tokens were cut to a budget of L/2
at random, relocation has brought F down to θ_F, and requests are spread evenly over the
positions in their block and over their eviction interval. From there every step evicts as many
tokens as it computes, and relocation must win back the blocks that decoding takes.

    scripts/bench_bookkeeping --out docs/evaluation/bookkeeping.json
"""

from __future__ import annotations

import argparse
import gc
import json
import time
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from benchmarks.pools import PlainPool, SimulatedPool, make_vllm_pool
from vtoken.config import VTokenConfig
from vtoken.integration.vllm.messages import StepMessage, StepReport
from vtoken.integration.vllm.step import evict_due, step_message
from vtoken.request_kv import RequestKV
from vtoken.table_store import TableStore
from vtoken.token_layer import TokenLayer
from vtoken.token_table import TokenTable

Milliseconds: TypeAlias = NDArray[np.float64]

BLOCK_SIZE = 16
PHASES = ("sync", "rows", "plan", "settle", "policy", "evict")
"""In which a step's time is split; each excludes the others that run inside it.

sync: new tokens registered; rows: what changes in the worker's rows; plan: eligibility, headroom,
plans; settle: commits; policy: the choice of victims itself; evict: all else of an eviction.
"""
OUTSIDE = "outside"
SETUP_SOURCE_BLOCKS = 16

QUICK_REQUESTS, QUICK_TOKENS = (8, 16), (256, 512)
ALL_REQUESTS, ALL_TOKENS = (64, 128, 256, 512, 1024), (4096, 16384)


@dataclass(frozen=True)
class Case:
    """One point of the curve.

    Attributes:
        num_requests: requests that decode, R.
        num_tokens: their length when measuring starts, L.
        pool: ``plain`` or ``vllm``.
        num_warmup_steps, num_steps: not measured and measured steps.
        interval: ``evict_interval_tokens``.
        aligned: all requests are due for eviction in the same step, the worst case.
    """

    num_requests: int
    num_tokens: int
    pool: str = "plain"
    num_warmup_steps: int = 160
    num_steps: int = 640
    interval: int = VTokenConfig.evict_interval_tokens
    aligned: bool = False


@dataclass(slots=True)
class SimulatedRequest:
    """The fields of vLLM's ``Request`` that the token layer reads."""

    req_id: str
    num_prompt_tokens: int
    num_computed_tokens: int = 0
    num_in_flight_tokens: int = 0
    running: bool = True


@dataclass
class Meter:
    """Splits the CPU time of a step over phases and counts operations.

    CPU time of this thread: what else runs on the machine does not count as ours.
    """

    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    operations: Counter[str] = field(default_factory=Counter)
    phase: str = OUTSIDE
    since: float = 0.0

    def switch(self, phase: str) -> str:
        """From now on time belongs to ``phase``; returns the phase before."""
        now = time.thread_time()
        self.seconds[self.phase] += now - self.since
        before, self.phase, self.since = self.phase, phase, now
        return before

    def take(self) -> dict[str, float]:
        """Seconds per phase since the last call."""
        taken, self.seconds = dict(self.seconds), defaultdict(float)
        return taken


class Simulation:
    """R requests in steady decode over one token layer."""

    def __init__(self, case: Case) -> None:
        """Build the state in which measuring starts; takes seconds for the large cases."""
        self.meter = Meter()
        config = VTokenConfig(
            policy="random",
            budget_tokens=case.num_tokens // 2,
            evict_interval_tokens=case.interval,
            max_source_blocks=SETUP_SOURCE_BLOCKS,
            low_watermark_ratio=1.0,  # as if the pool were always short of blocks
        )
        num_blocks = case.num_requests * (case.num_tokens // BLOCK_SIZE + 2) * 21 // 20
        self.pool = _make_pool(case.pool, num_blocks)
        self.layer = TokenLayer(config, self.pool)
        self.requests = {
            f"request-{i:04}": SimulatedRequest(f"request-{i:04}", case.num_tokens - i % BLOCK_SIZE)
            for i in range(case.num_requests)
        }
        self._sent: int | None = None
        self._prefill()
        self._spread(case.aligned)

    def step(self, num_new: Callable[[SimulatedRequest], int] = lambda request: 1) -> StepMessage:
        """One engine step, in which by default every request decodes one token.

        Returns:
            What the worker would get.
        """
        scheduled = {}
        for req_id, request in self.requests.items():
            scheduled[req_id] = num_new(request)
            request.num_computed_tokens += scheduled[req_id]
            self.pool.grow(req_id, request.num_computed_tokens)
        meter = self.meter
        meter.switch("sync")
        message = step_message(self.layer, self.requests, scheduled, self._admit)
        meter.switch("settle")
        if self._sent is not None:
            self.layer.settle(self._sent, None)
        meter.switch("evict")
        evict_due(self.layer, self.requests, scheduled, _is_running, message, StepReport())
        meter.switch(OUTSIDE)
        self._count(message)
        return message

    def _count(self, message: StepMessage) -> None:
        batch = message.relocation
        self._sent = batch.ticket if batch else None
        self.meter.operations["rows"] += len(message.rows)
        self.meter.operations["plans"] += len(batch.req_ids) if batch else 0
        self.meter.operations["moved_tokens"] += len(batch.src_slots) if batch else 0

    def _admit(self, request: SimulatedRequest) -> RequestKV:
        length = request.num_prompt_tokens
        return self.layer.admit(request.req_id, length, length, zlib.crc32(request.req_id.encode()))

    def _prefill(self) -> None:
        """Compute and cut the prompts, then relocate until F is at θ_F, in large plans."""
        self.step(lambda request: request.num_prompt_tokens)
        while self.layer.occupancy.waste_ratio > self.layer.config.theta_f:
            self.step(lambda request: 0)
        self.layer.control.patch({"max_source_blocks": VTokenConfig.max_source_blocks})

    def _spread(self, aligned: bool) -> None:
        interval = self.layer.config.evict_interval_tokens
        for i, kv in enumerate(self.layer.requests.values()):
            # Every 16 requests cover all places in a block (i % 16) and all due steps.
            due_in = interval if aligned else 1 + (5 * i + i // interval) % interval
            kv.next_evict_at = self.requests[kv.req_id].num_computed_tokens + due_in


def _is_running(request: SimulatedRequest) -> bool:
    return request.running


def _make_pool(kind: str, num_blocks: int) -> SimulatedPool:
    make = make_vllm_pool if kind == "vllm" else PlainPool
    return make(num_blocks, BLOCK_SIZE)


# -- instruments ---------------------------------------------------------------------------


@contextmanager
def instrumented(simulation: Simulation) -> Iterator[None]:
    """Let the meter see into a step, by wrapping what it calls."""
    meter, layer = simulation.meter, simulation.layer
    with ExitStack() as stack:
        timed: tuple[tuple[Any, str, str, str], ...] = (
            (RequestKV, "take_row_change", "rows", "sync"),
            (layer, "plan_relocations", "plan", "sync"),
            (layer.evictor.policy, "select_ranks", "policy", "evict"),
        )
        for owner, name, phase, only_in in timed:
            _wrap(stack, owner, name, _timed(meter, getattr(owner, name), phase, only_in))
        counted: tuple[tuple[Any, str, Callable[[Any], int] | None], ...] = (
            (TableStore, "mark_dead", len),
            (TokenTable, "live_ids", None),
            (simulation.pool, "new_blocks", None),
            (simulation.pool, "shared", len),
        )
        for owner, name, size in counted:
            _wrap(stack, owner, name, _counted(meter, getattr(owner, name), name, size))
        yield


def _wrap(stack: ExitStack, owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
    is_class = isinstance(owner, type)
    original = getattr(owner, name)
    setattr(owner, name, wrapper)
    undo = (lambda: setattr(owner, name, original)) if is_class else lambda: delattr(owner, name)
    stack.callback(undo)


def _timed(meter: Meter, call: Callable[..., Any], phase: str, only_in: str) -> Callable[..., Any]:
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if meter.phase != only_in:
            return call(*args, **kwargs)
        meter.switch(phase)
        try:
            return call(*args, **kwargs)
        finally:
            meter.switch(only_in)

    return wrapper


def _counted(
    meter: Meter, call: Callable[..., Any], name: str, size: Callable[[Any], int] | None
) -> Callable[..., Any]:
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        meter.operations[name] += size(args[-1]) if size else 1
        return call(*args, **kwargs)

    return wrapper


# -- measuring -----------------------------------------------------------------------------


def measure(case: Case) -> dict[str, Any]:
    """Run one case.

    Returns:
        The case, milliseconds of CPU time per step (median, mean, p99, max), operations per step,
        and F and the live tokens per request at the end. ``total`` comes from a window without
        instruments; the split over phases from a second one, and is a little more in sum.
    """
    simulation = Simulation(case)
    for _ in range(case.num_warmup_steps):
        simulation.step()
    gc.collect()
    gc.freeze()  # as vLLM does once it is up
    total = _run(simulation, case.num_steps)
    with instrumented(simulation):
        simulation.meter.operations.clear()
        split = _run(simulation, case.num_steps)
    gc.unfreeze()
    simulation.layer.verification.check_all()
    live = simulation.layer.occupancy.live_tokens
    operations = simulation.meter.operations
    return {
        "case": asdict(case),
        "milliseconds": {
            "total": _statistics(np.sum(list(total.values()), axis=0)),
            **{name: _statistics(split[name]) for name in PHASES},
        },
        "operations_per_step": {k: round(n / case.num_steps, 2) for k, n in operations.items()},
        "waste_ratio": round(simulation.layer.occupancy.waste_ratio, 4),
        "live_tokens_per_request": round(live / case.num_requests, 1),
    }


def _run(simulation: Simulation, num_steps: int) -> dict[str, Milliseconds]:
    """Milliseconds per phase; ``[num_steps]`` each."""
    simulation.meter.take()
    steps = []
    for _ in range(num_steps):
        simulation.step()
        steps.append(simulation.meter.take())
    return {name: np.array([1e3 * step.get(name, 0.0) for step in steps]) for name in PHASES}


def _statistics(values: Milliseconds) -> dict[str, float]:
    median, p99 = np.percentile(values, [50, 99])
    numbers = {"median": median, "mean": values.mean(), "p99": p99, "max": values.max()}
    return {name: round(float(number), 4) for name, number in numbers.items()}


def best(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of repeated measurements of one case the least disturbed: that with the lowest median."""
    return min(results, key=lambda result: float(result["milliseconds"]["total"]["median"]))


def cases(arguments: argparse.Namespace) -> list[Case]:
    """The cases that the command line asks for."""
    steps = {"num_warmup_steps": 16, "num_steps": 32} if arguments.quick else {}
    requests = arguments.requests or (QUICK_REQUESTS if arguments.quick else ALL_REQUESTS)
    tokens = arguments.tokens or (QUICK_TOKENS if arguments.quick else ALL_TOKENS)
    return [
        Case(r, n, pool, interval=arguments.interval, aligned=arguments.aligned, **steps)
        for pool in arguments.pools
        for n in tokens
        for r in requests
    ]


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print a table, and write the results if asked."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="tiny cases: does it run?")
    parser.add_argument("--requests", type=int, nargs="*", help="numbers of requests")
    parser.add_argument("--tokens", type=int, nargs="*", help="tokens per request")
    parser.add_argument("--pools", nargs="*", default=["plain"], choices=["plain", "vllm"])
    parser.add_argument("--interval", type=int, default=VTokenConfig.evict_interval_tokens)
    parser.add_argument("--aligned", action="store_true", help="evictions due in the same step")
    parser.add_argument("--repeats", type=int, default=1, help="the best of this many is kept")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    arguments = parser.parse_args(argv)
    columns = ("total", *PHASES)
    print(
        "pool   requests tokens |"
        + "".join(f"{name:>8}" for name in columns)
        + "|   mean    p99    max"
    )
    results = []
    for case in cases(arguments):
        result = best([measure(case) for _ in range(arguments.repeats)])
        results.append(result)
        ms = result["milliseconds"]
        line = "".join(f"{ms[name]['median']:8.3f}" for name in columns)
        tail = f"{ms['total']['mean']:7.3f} {ms['total']['p99']:6.2f} {ms['total']['max']:6.2f}"
        print(f"{case.pool:6} {case.num_requests:8} {case.num_tokens:6} |{line}|{tail}", flush=True)
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
