"""The watchdog against livelock: frees deferred and preemption at once."""

from __future__ import annotations

import random
from collections.abc import Collection
from typing import Any

import pytest

from tests.engine_model import EngineModel
from vtoken.token_layer import TokenLayer

NUM_BLOCKS = 24
NUM_STORM_STEPS = 240
MAX_HELD_STEPS = 3
MAX_IDLE_STEPS = MAX_HELD_STEPS + 1
MAX_FINISH_STEPS = 400
"""Six requests of at most 80 tokens, one after the other: 6 * (40 / 8 + 40), and reserve."""

CONFIGS: tuple[dict[str, Any], ...] = (
    {"policy": "random"},
    {"policy": "streaming_llm", "evict_during_prefill": True, "evict_free_ratio": 0.2},
    {"policy": "random", "evict_free_ratio": 0.0, "max_source_blocks": 2},
)


class Watchdog:
    """Drives whole engine steps and fails if one of them works without bound or for nothing."""

    def __init__(self, config: dict[str, Any], seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.model = EngineModel({**config, "seed": seed}, NUM_BLOCKS)
        self._random = random.Random(seed)
        self._num_idle = 0
        self._num_reclaims = 0
        self.most_reclaims = 0
        self.num_steps = 0
        reclaim_now = TokenLayer.reclaim_now

        def counted(layer: TokenLayer, granted: Collection[str]) -> bool:
            self._num_reclaims += 1
            # Each success frees a block, each failure preempts one of at most six requests.
            assert self._num_reclaims <= NUM_BLOCKS + 6, "one step reclaims without end"
            return reclaim_now(layer, granted)

        monkeypatch.setattr(TokenLayer, "reclaim_now", counted)

    def step(self, hold_reports: bool) -> None:
        """One step of the engine; something must be computed, or a report be on its way."""
        model = self.model
        self._num_reclaims = 0
        model.schedule(chunk=8, skip=-1, num_admit=2)
        self.most_reclaims = max(self.most_reclaims, self._num_reclaims)
        self._num_idle = 0 if model.steps[-1].entries else self._num_idle + 1
        assert self._num_idle <= MAX_IDLE_STEPS, f"{self._num_idle} steps without a token"
        model.execute(hold_reports=hold_reports)
        model.process_output()
        self.num_steps += 1

    def storm(self) -> None:
        """Requests keep coming; copies are reported late; the newest request is preempted."""
        for i in range(NUM_STORM_STEPS):
            self.model.add_request(
                self._random.randint(10, 40), self._random.randint(10, 40), i % 2 + 1, 9
            )
            self.step(hold_reports=i % (MAX_HELD_STEPS + 1) != 0)
            if i % 3 == 2:
                self.model.preempt(len(self.model.running) - 1)

    def finish(self) -> None:
        """Without new requests the rest ends in bounded time."""
        start = self.num_steps
        while self.model.running or self.model.waiting:
            self.step(hold_reports=self.num_steps % (MAX_HELD_STEPS + 1) != 0)
            assert self.num_steps - start <= MAX_FINISH_STEPS, "requests never finish"
        self.model.drain()


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("seed", [1, 2])
def test_every_step_makes_progress_with_bounded_work(
    config: dict[str, Any], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Frees deferred and preemption at once: each step computes, and everything ends."""
    watchdog = Watchdog(config, seed, monkeypatch)
    watchdog.storm()
    assert watchdog.model.counts.finished >= 10
    watchdog.finish()
    counts = watchdog.model.counts
    assert watchdog.most_reclaims >= 1, "the pool must run dry"
    assert counts.preempted >= NUM_STORM_STEPS // 3
    assert counts.urgent + counts.early + counts.early_evictions >= 3, counts
    assert counts.rolled_back >= 3, "preemption must hit plans in flight"


def test_watchdog_sees_reports_that_never_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """Destinations of orphaned plans stay taken, until nobody can be scheduled."""
    watchdog = Watchdog(CONFIGS[0], 2, monkeypatch)
    monkeypatch.setattr(EngineModel, "_take_reports", lambda self: [])
    with pytest.raises(AssertionError, match="steps without a token"):
        watchdog.storm()
