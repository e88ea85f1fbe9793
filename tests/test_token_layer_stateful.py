"""The token layer inside a simulated engine, everything compared after every change."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from tests.core_models import ModelPool
from tests.engine_model import (
    PATCHES,
    RARE,
    EngineModel,
    act,
    assert_busy,
    drive,
    drive_sharing,
)
from vtoken.commits import Commits
from vtoken.documents import Documents
from vtoken.errors import VTokenError
from vtoken.eviction import Evictor, Victims
from vtoken.reclamation import ReclamationManager
from vtoken.request_kv import RelocationPlan, RequestKV
from vtoken.token_table import TokenTable

OPERATIONS_PER_SEED = 13_000
POOLS = ((36, 4), (60, 4), (28, 4), (90, 2), (44, 3), (20, 8), (18, 16), (48, 4))
"""Blocks and block size of each seed; small enough to run dry again and again."""


def make_model(seed: int) -> EngineModel:
    """A model that checks every plan online, too."""
    num_blocks, block_size = POOLS[seed % len(POOLS)]
    config = {"policy": "random", "verify": "full", "seed": seed}
    return EngineModel(config, num_blocks, block_size)


@pytest.mark.parametrize("seed", range(8))
def test_layer_equals_naive_model_after_every_change(seed: int) -> None:
    """Tables, F, pool and content stay right through everything that can happen (>= 1e5 ops)."""
    model = make_model(seed)
    drive(model, random.Random(seed), OPERATIONS_PER_SEED)
    assert_busy(model.counts, ("shared",) if seed in (4, 5) else RARE)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(100, 120))
def test_layer_equals_naive_model_for_a_million_changes(seed: int) -> None:
    """The same with ten times as many changes and other seeds."""
    model = make_model(seed)
    drive(model, random.Random(seed), 50_000)
    assert_busy(model.counts, RARE)


def test_naive_and_lazy_evict_the_same_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without pressure on the pool the modes differ in blocks only, never in decisions."""
    monkeypatch.setattr(ModelPool, "cache_full_blocks", lambda *_: None)
    logs, held, committed = [], [], []
    for mode in ("naive", "lazy"):
        rng = random.Random(5)
        model = EngineModel({"mode": mode, "policy": "random", "verify": "full"}, num_blocks=300)
        block_steps = 0
        for _ in range(2500):
            act(model, rng, deque())
            block_steps += model.layer.occupancy.retained_blocks
        model.drain()
        logs.append(model.eviction_log)
        held.append(block_steps)
        committed.append(model.counts.committed)
    assert logs[0] == logs[1]
    assert len(logs[0]) > 200
    assert committed[0] == 0 < committed[1]
    assert held[1] < held[0]


@pytest.mark.parametrize(("num_blocks", "block_size", "budget"), [(60, 16, 12), (40, 8, 12)])
def test_holders_of_shared_blocks_let_go_together(
    num_blocks: int, block_size: int, budget: int
) -> None:
    """Copy-on-write with mostly shared prompts: no byte of anybody changes, nothing leaks."""
    config = {"policy": "random", "verify": "full", "budget_tokens": budget}
    model = EngineModel(
        {**config, "relocate_shared": True, "relocate_into_cached": True},
        num_blocks,
        block_size,
        prompt_tokens=(5 * block_size, 7 * block_size),
        shared_tokens=(0, 4 * block_size, 5 * block_size),
        options_ratio=0,
    )
    drive_sharing(model, random.Random(7), 7000)
    assert model.counts.shared >= 5
    assert model.counts.rolled_back
    assert model.counts.failed


class TokenLayerMachine(RuleBasedStateMachine):
    """The same model driven by hypothesis, for short and shrunk counterexamples."""

    def __init__(self) -> None:
        super().__init__()
        self.model = EngineModel({"policy": "streaming_llm", "verify": "full"}, num_blocks=20)

    @rule(
        num_prompt=st.integers(1, 30),
        num_output=st.integers(1, 20),
        family=st.integers(1, 2),
        num_shared=st.sampled_from((0, 9, 24)),
    )
    def add_request(self, num_prompt: int, num_output: int, family: int, num_shared: int) -> None:
        """A client sends a request."""
        self.model.add_request(num_prompt, num_output, family, num_shared)

    @rule(chunk=st.integers(1, 12), skip=st.integers(0, 9), num_admit=st.integers(0, 2))
    def schedule(self, chunk: int, skip: int, num_admit: int) -> None:
        """The scheduler sends a step."""
        self.model.schedule(chunk, skip, num_admit)

    @rule(fate=st.sampled_from(("right", "fails", "damaged")), hold_reports=st.booleans())
    def execute(self, fate: str, hold_reports: bool) -> None:
        """The worker runs a step."""
        self.model.execute(fate, hold_reports)

    @rule()
    def copy(self) -> None:
        """The copies in the worker's hands happen."""
        self.model.copy()

    @rule()
    def process_output(self) -> None:
        """The scheduler receives an output."""
        self.model.process_output()

    @rule(index=st.integers(0, 9))
    def abort(self, index: int) -> None:
        """A client leaves."""
        self.model.abort(index)

    @rule()
    def abandon(self) -> None:
        """The prefix cache is reset."""
        self.model.abandon()

    @rule(index=st.integers(0, 9))
    def preempt(self, index: int) -> None:
        """A request loses its blocks."""
        self.model.preempt(index)

    @rule(
        change=st.sampled_from([(name, value) for name, values in PATCHES for value in values]),
        for_new_only=st.booleans(),
    )
    def patch(self, change: tuple[str, Any], for_new_only: bool) -> None:
        """An operator changes the configuration, of all requests or of later ones."""
        self.model.patch(dict([change]), for_new_only=for_new_only)

    def teardown(self) -> None:
        """Everything can end at any moment, and leaves nothing."""
        self.model.drain()


TestTokenLayerMachine = TokenLayerMachine.TestCase
TestTokenLayerMachine.settings = settings(
    max_examples=150,
    stateful_step_count=60,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)


# -- the comparison itself can fail --------------------------------------------------------


def _no_copy(model: EngineModel, monkeypatch: pytest.MonkeyPatch) -> None:
    model.skip_copies = True


def _urgent_after_forward(model: EngineModel, monkeypatch: pytest.MonkeyPatch) -> None:
    model.urgent_late = True


def _caching_goes_on(model: EngineModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ModelPool, "stop_caching", lambda self, req_id: None)


def _early_free(model: EngineModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def request_gone(self: ReclamationManager, kv: RequestKV) -> None:
        if kv.plan is not None:
            self._pool.free(kv.plan.dst_blocks.tolist())
            for plans in self._in_flight.values():
                if kv.plan in plans:
                    plans.remove(kv.plan)

    monkeypatch.setattr(ReclamationManager, "request_gone", request_gone)


def _sources_freed_in_flight(model: EngineModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def free_emptied(self: Evictor, victims: Victims, places: np.ndarray) -> None:
        plan, victims.kv.plan = victims.kv.plan, None
        original(self, victims, places)
        victims.kv.plan = plan

    original = Evictor._free_emptied
    monkeypatch.setattr(Evictor, "_free_emptied", free_emptied)


def _shared_blocks_move(model: EngineModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ModelPool, "shared", lambda self, ids: np.zeros(len(ids), bool))


def _one_holder_lets_go(model: EngineModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def alone(self: ModelPool, ids: np.ndarray) -> np.ndarray:
        return np.ones(len(ids), np.int64)

    model.patch({"relocate_shared": True})
    monkeypatch.setattr(ModelPool, "references", alone)


def _rows_not_refreshed(model: EngineModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def apply(self: Commits, kv: RequestKV, plan: RelocationPlan) -> int:
        stale = kv.row_stale
        num_tokens = original(self, kv, plan)
        kv.row_stale = stale
        return num_tokens

    original = Commits._apply
    monkeypatch.setattr(Commits, "_apply", apply)


def _columns_of_the_first_death_only(model: EngineModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def drop_columns(self: RequestKV, columns: np.ndarray) -> None:
        self.dropped = columns if self.dropped is None else self.dropped

    monkeypatch.setattr(RequestKV, "drop_columns", drop_columns)


def _columns_lost_by_a_relocation(model: EngineModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def send_row(self: RequestKV) -> None:
        original(self)
        self.dropped = None

    original = RequestKV.send_row
    monkeypatch.setattr(RequestKV, "send_row", send_row)


def _dead_tokens_move_too(model: EngineModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TokenTable, "is_live", lambda self, ids: np.ones(len(ids), bool))


def _nobody_keeps_a_document(model: EngineModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Documents, "of", lambda self, generation: self.current)


@pytest.mark.parametrize(
    "damage",
    [
        _no_copy,
        _urgent_after_forward,
        _caching_goes_on,
        _early_free,
        _sources_freed_in_flight,
        _shared_blocks_move,
        _one_holder_lets_go,
        _rows_not_refreshed,
        _columns_of_the_first_death_only,
        _columns_lost_by_a_relocation,
        _dead_tokens_move_too,
        _nobody_keeps_a_document,
    ],
)
def test_comparison_finds_damage(
    damage: Callable[[EngineModel, pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer with one rule removed does not get through a run."""
    model = EngineModel({"policy": "random"})
    damage(model, monkeypatch)
    with pytest.raises((AssertionError, VTokenError, IndexError, KeyError)):
        drive(model, random.Random(3), OPERATIONS_PER_SEED)
