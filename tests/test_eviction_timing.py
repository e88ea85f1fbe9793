"""When eviction happens: between prefill chunks, only under pressure, and early."""

from __future__ import annotations

from typing import Any

import pytest

from tests.core_models import ModelPool, make_config, make_layer, make_request, make_signals
from vtoken.observation import ATTENTION_SUM, Observe, queries_to_observe
from vtoken.request_kv import RequestKV
from vtoken.token_layer import TokenLayer

NUM_BLOCKS = 32


def make_prefill(**fields: Any) -> tuple[TokenLayer, ModelPool, RequestKV]:
    """20 of 40 prompt tokens are computed, budget 8."""
    layer, pool = make_layer(ModelPool(NUM_BLOCKS), policy="streaming_llm", **fields)
    return layer, pool, make_request(layer, pool, num_tokens=20, prefill_end=40)


# -- between chunks ------------------------------------------------------------------------


def test_prefill_is_left_alone_by_default() -> None:
    """A prompt is whole until it is complete."""
    layer, _, kv = make_prefill()
    layer.evict_if_due(kv, 20)
    assert kv.num_evicted == 0


def test_chunk_is_followed_by_eviction() -> None:
    """The budget holds after each chunk, and whole blocks go back."""
    layer, pool, kv = make_prefill(evict_during_prefill=True)
    layer.evict_if_due(kv, 20)
    assert kv.table.live_ids().tolist() == [0, *range(13, 20)]
    assert pool.lists["a"][1:3] == [0, 0]
    assert pool.grow("a", 40)
    layer.schedule_tokens(kv, 20, 40)
    layer.evict_if_due(kv, 40)
    assert kv.table.live_ids().tolist() == [0, *range(33, 40)]
    layer.verification.check_all()


@pytest.mark.parametrize(("before", "after", "num_evicted"), [(False, True, 12), (True, False, 0)])
def test_change_reaches_prefills_that_run(before: bool, after: bool, num_evicted: int) -> None:
    """From the next step on, in both directions."""
    layer, _, kv = make_prefill(evict_during_prefill=before)
    layer.control.patch({"evict_during_prefill": after})
    layer.evict_if_due(kv, 20)
    assert kv.num_evicted == num_evicted


@pytest.mark.parametrize(
    ("during_prefill", "next_at", "may_evict", "chunk", "expected"),
    [
        (True, 0, True, (0, 50), Observe(16, True)),  # due: the chunk's last window
        (True, 0, True, (40, 50), Observe(10, True)),  # a chunk shorter than the window
        (True, 60, True, (0, 50), None),  # not due yet
        (True, 0, False, (0, 50), None),  # due, but the pool is ample
        (False, 0, True, (0, 50), None),  # the default
        (True, 0, True, (0, 95), Observe(16, True)),  # reaches into the last window
        (True, 120, True, (0, 95), Observe(11, True)),  # as without the option
        (True, 0, True, (95, 100), Observe(5, True)),
    ],
)
def test_last_queries_of_a_chunk_are_observed_where_eviction_follows(
    during_prefill: bool,
    next_at: int,
    may_evict: bool,
    chunk: tuple[int, int],
    expected: Observe | None,
) -> None:
    """A policy with scores sees those of the chunk before it evicts from it."""
    config = make_config(evict_during_prefill=during_prefill)
    signals = frozenset({ATTENTION_SUM})
    found = queries_to_observe(signals, config, *chunk, 100, next_at, may_evict)
    assert found == expected


# -- only under pressure -------------------------------------------------------------------


def fill(pool: ModelPool, num_free: int) -> None:
    """Somebody else takes blocks."""
    pool.allocate(pool.num_free_blocks() - num_free)


def test_ample_pool_keeps_every_token_and_the_request_due() -> None:
    """As soon as the pool is tight, the eviction that was due happens."""
    layer, pool = make_layer(ModelPool(NUM_BLOCKS), policy="streaming_llm", evict_free_ratio=0.25)
    kv = make_request(layer, pool, num_tokens=20)
    fill(pool, 9)
    layer.evict_if_due(kv, 20)
    assert (kv.num_evicted, kv.next_evict_at) == (0, 20)
    fill(pool, 8)
    layer.evict_if_due(kv, 20)
    assert kv.num_evicted == 12


def test_signals_are_asked_for_only_under_pressure() -> None:
    """Nothing is observed for an eviction that will not happen; then one step is enough."""
    layer, pool = make_layer(
        ModelPool(NUM_BLOCKS), policy="h2o", evict_free_ratio=0.25, score_interval_steps=8
    )
    kv = make_request(layer, pool, num_tokens=20)
    assert not layer.wants_signals(kv, 20)
    assert layer.to_observe(kv, 20, 21) is None
    fill(pool, 8)
    layer.evict_if_due(kv, 20)  # tight only since the step was scheduled: no signals came
    assert (kv.num_evicted, kv.next_evict_at) == (0, 20)
    assert layer.stats.counter("evictions_postponed_total", "h2o") == 0
    assert layer.wants_signals(kv, 20)
    assert layer.to_observe(kv, 20, 21) == Observe(1, False)
    layer.evict_if_due(kv, 20, make_signals(kv.table.live_ids()))
    assert kv.num_evicted == 12


# -- early ---------------------------------------------------------------------------------


def make_pressed(**fields: Any) -> tuple[TokenLayer, ModelPool, RequestKV]:
    """Twice the budget, packed, not due for long, and no block is free."""
    config = {"policy": "streaming_llm", "evict_interval_tokens": 100, **fields}
    layer, pool = make_layer(ModelPool(NUM_BLOCKS), **config)
    kv = make_request(layer, pool, num_tokens=16)
    kv.next_evict_at = 100
    fill(pool, 0)
    return layer, pool, kv


@pytest.mark.parametrize("mode", ["naive", "lazy"])
def test_request_over_budget_evicts_early_rather_than_preempt(mode: str) -> None:
    """Packing gains nothing, so tokens above the budget go before they are due."""
    layer, pool, kv = make_pressed(mode=mode, evict_free_ratio=0.0)
    assert layer.reclaim_now()
    assert pool.num_free_blocks() > 0
    assert kv.table.num_live == 8
    assert kv.next_evict_at == 116
    for _ in range(3):  # may still pack what is left, in mode lazy
        layer.reclaim_now()
    assert kv.table.num_live == 8, "at its budget nothing more goes"
    layer.verification.check_all()


@pytest.mark.parametrize(
    "fields",
    [
        {"evict_free_ratio": 1.0},  # outputs must not depend on the load
        {"evict_free_ratio": 0.0, "policy": "none"},
        {"evict_free_ratio": 0.0, "policy": "h2o"},  # no signals are at hand
    ],
)
def test_nothing_goes_early_otherwise(fields: dict[str, Any]) -> None:
    """Then only a preemption helps."""
    layer, _, kv = make_pressed(**fields)
    assert not layer.reclaim_now()
    assert (kv.num_evicted, kv.next_evict_at) == (0, 100)


@pytest.mark.parametrize(("during_prefill", "num_live"), [(False, 20), (True, 8)])
def test_unfinished_prefill_goes_early_only_if_it_may_evict(
    during_prefill: bool, num_live: int
) -> None:
    """The option for prefills covers early eviction, too."""
    layer, pool, kv = make_prefill(evict_during_prefill=during_prefill, evict_free_ratio=0.0)
    fill(pool, 0)
    assert layer.reclaim_now() == during_prefill
    assert kv.table.num_live == num_live


def make_scored(
    policy: str = "h2o", num_tokens: int = 23
) -> tuple[TokenLayer, ModelPool, RequestKV]:
    """Cut to 8 of 20 tokens by scores, then more tokens came; no block is free."""
    layer, pool = make_layer(
        ModelPool(NUM_BLOCKS), policy=policy, evict_free_ratio=0.99, evict_interval_tokens=100
    )
    kv = make_request(layer, pool, num_tokens=20)
    fill(pool, 8)
    names = sorted(layer.evictor.policy.signals)
    layer.evict_if_due(kv, 20, make_signals(kv.table.live_ids(), names))
    assert pool.grow("a", num_tokens)
    layer.schedule_tokens(kv, 20, num_tokens)
    fill(pool, 0)
    return layer, pool, kv


@pytest.mark.parametrize("policy", ["h2o", "tova", "scissorhands", "snapkv", "rkv", "knorm"])
def test_last_known_scores_choose_what_goes_early(policy: str) -> None:
    """Down to the budget, among the tokens that the last eviction had scores of."""
    layer, _, kv = make_scored(policy)
    known = set(kv.table.live_ids().tolist()) - {20, 21, 22}
    layer.reclaim_now()
    left = set(kv.table.live_ids().tolist())
    assert len(left) == 8
    assert {20, 21, 22} <= left <= known | {20, 21, 22}
    assert kv.next_evict_at == 123
    layer.verification.check_all()


def test_tokens_without_a_score_do_not_go_early() -> None:
    """Rather fewer victims than one that nobody has looked at."""
    layer, _, kv = make_scored(num_tokens=35)
    layer.reclaim_now()
    left = kv.table.live_ids().tolist()
    assert left == [0, *range(20, 35)]  # the sink, and what came later


def test_scores_of_another_policy_are_not_used_early() -> None:
    """After a switch a request stays as it is until it was observed."""
    layer, _, kv = make_scored()
    layer.control.patch({"policy": "scissorhands"})
    num_live = kv.num_live
    layer.reclaim_now()
    assert kv.num_live == num_live


def test_no_scores_are_kept_where_nothing_goes_early() -> None:
    """They would be memory for nothing."""
    layer, pool = make_layer(policy="h2o")
    kv = make_request(layer, pool, num_tokens=20)
    layer.evict_if_due(kv, 20, make_signals(kv.table.live_ids()))
    assert kv.num_evicted
    assert kv.last_signals is None
