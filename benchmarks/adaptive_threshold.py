"""Adaptive θ_F against fixed ones under bursts of requests, without a model.

    python -m benchmarks.adaptive_threshold [--out FILE]

A real :class:`~vtoken.token_layer.TokenLayer` over a small pool. Simulated are admission (a prompt
must fit beside the headroom), decoding of one token per request and step, copies that are reported
with the next step, and preemption of the newest request when nothing else frees a block. In every
period a burst of requests arrives at once, then single ones until the next.
"""

from __future__ import annotations

import argparse
import json
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.pools import PlainPool
from vtoken.config import VTokenConfig
from vtoken.token_layer import TokenLayer

NUM_BLOCKS, BLOCK_SIZE = 600, 16


@dataclass(frozen=True)
class Load:
    """What arrives, all in tokens, steps and requests."""

    num_prompt_tokens: int
    num_output_tokens: int
    budget_tokens: int
    num_periods: int
    period_steps: int
    burst: int
    quiet_interval: int


LOADS = {
    "tuned": Load(768, 192, 256, 6, 600, 32, 60),
    "held_out": Load(1024, 384, 320, 5, 900, 24, 90),
}
"""``tuned``: the controller's constants were chosen on it; ``held_out``: run once, afterwards."""
CONFIGS: dict[str, dict[str, Any]] = {
    **{f"fixed {theta}": {"theta_f": theta} for theta in (0.05, 0.25, 0.5, 0.9)},
    "adaptive": {"theta_f": 0.25, "theta_f_mode": "adaptive"},
}


@dataclass(eq=False)
class Request:
    """One simulated request; ``done`` starts anew after a preemption."""

    req_id: str
    arrived: int
    seed: int
    done: int = 0


class Simulation:
    """The bursty load over one layer."""

    def __init__(self, settings: dict[str, Any], load: Load) -> None:
        self.load = load
        self.pool = PlainPool(NUM_BLOCKS, BLOCK_SIZE)
        config = VTokenConfig(
            policy="random", budget_tokens=load.budget_tokens, low_watermark_ratio=1.0, **settings
        )
        self.layer = TokenLayer(config, self.pool)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.waits: list[int] = []
        self.waste: list[float] = []
        self.num_preempted = 0
        self._sent: int | None = None
        self._num_arrived = 0

    def run(self) -> dict[str, Any]:
        """All periods, and until the last request has finished."""
        step, end = 0, self.load.num_periods * self.load.period_steps
        while step < end or self.waiting or self.running:
            if step < end:
                self._arrive(step)
            self._step(step)
            step += 1
        counter = self.layer.stats.counter
        return {
            "steps": step,
            "mean_wait_steps": round(float(np.mean(self.waits)), 1),
            "p90_wait_steps": round(float(np.quantile(self.waits, 0.9)), 1),
            "moved_tokens": int(counter("relocated_tokens_total")),
            "batches": int(counter("relocations_total", "committed")),
            "urgent": int(counter("urgent_relocations_total")),
            "preempted": self.num_preempted,
            "mean_waste_ratio": round(float(np.mean(self.waste)), 3),
        }

    def _arrive(self, step: int) -> None:
        within = step % self.load.period_steps
        num = self.load.burst if within == 0 else int(within % self.load.quiet_interval == 0)
        for _ in range(num):
            self._num_arrived += 1
            self.waiting.append(Request(f"r{self._num_arrived}", step, self._num_arrived))

    def _step(self, step: int) -> None:
        computed = []
        for request in list(self.running):
            if request in self.running and self._make_room(request):
                computed.append((request, 1))
        if self.waiting and self._fits():
            request = self.waiting.popleft()
            self.waits.append(step - request.arrived)
            num_prompt = self.load.num_prompt_tokens
            self.layer.admit(request.req_id, num_prompt, num_prompt, request.seed)
            self.pool.grow(request.req_id, num_prompt)
            self.running.append(request)
            computed.append((request, num_prompt))
        computed = [item for item in computed if item[0] in self.running]
        candidates = []
        for request, num_new in computed:
            kv = self.layer.requests[request.req_id]
            candidates.append((kv, request.done))
            self.layer.schedule_tokens(kv, request.done, request.done + num_new)
            request.done += num_new
        plans = self.layer.plan_relocations(candidates)
        urgent = [plan.ticket for plan in self.layer.reclamation.take_urgent()]
        for ticket in [*([self._sent] if self._sent else []), *urgent]:
            self.layer.settle(ticket, None)
        self._sent = plans[0].ticket if plans else None
        for request, _ in computed:
            self._update(request)
        self.waste.append(self.layer.occupancy.waste_ratio)

    def _fits(self) -> bool:
        needed = self.load.num_prompt_tokens // BLOCK_SIZE + self.layer.headroom_blocks
        return self.pool.num_free_blocks() >= needed

    def _make_room(self, request: Request) -> bool:
        while request.done % BLOCK_SIZE == 0 and not self.pool.num_free_blocks():
            if self.layer.reclaim_now():
                continue
            victim = self.running[-1]
            self.num_preempted += 1
            self._end(victim)
            victim.done = 0
            self.waiting.appendleft(victim)
            if victim is request:
                return False
        self.pool.grow(request.req_id, request.done + 1)
        return True

    def _update(self, request: Request) -> None:
        self.layer.evict_if_due(self.layer.requests[request.req_id], request.done)
        if request.done >= self.load.num_prompt_tokens + self.load.num_output_tokens:
            self._end(request)

    def _end(self, request: Request) -> None:
        self.layer.forget(request.req_id)
        self.pool.free([b for b in self.pool.new_blocks(request.req_id, 0).tolist() if b])
        self.pool._lists.pop(request.req_id)
        self.running.remove(request)


def main() -> None:
    """Run every configuration and print, or write, the figures."""
    parser = argparse.ArgumentParser(description="Adaptive θ_F under bursts, without a model.")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    result = {
        name: {label: Simulation(settings, load).run() for label, settings in CONFIGS.items()}
        for name, load in LOADS.items()
    }
    text = json.dumps(result, indent=1)
    print(text)
    if args.out:
        args.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
