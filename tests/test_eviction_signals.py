"""Eviction by scores: grace for unobserved tokens, postponement, and columns that survive."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.core_models import ModelPool, make_config, make_signals
from vtoken.observation import ATTENTION_SUM, RequestSignals
from vtoken.policies.random import RandomPolicy
from vtoken.request_kv import RequestKV
from vtoken.token_layer import TokenLayer

PROMPT = 40
SETTINGS = {
    "policy": "h2o",
    "budget_tokens": 20,
    "sink_tokens": 2,
    "recent_tokens": 3,
    "evict_interval_tokens": 4,
}


def make_layer(**changes: Any) -> tuple[TokenLayer, RequestKV]:
    """A layer with one request whose prompt was just computed."""
    pool = ModelPool(64)
    layer = TokenLayer(make_config(**{**SETTINGS, **changes}), pool)
    pool.start_request("r")
    assert pool.grow("r", 100)
    kv = layer.admit("r", PROMPT, PROMPT, 7)
    layer.schedule_tokens(kv, 0, PROMPT)
    return layer, kv


def signals_of(kv: RequestKV, num_observed: int = -1, **values: Any) -> RequestSignals:
    """Random signals for the live tokens, or the given ones."""
    made = make_signals(kv.table.live_ids(), num_observed=num_observed)
    arrays = {name: np.array(v, np.float32) for name, v in values.items()}
    return RequestSignals(made.token_ids, made.num_observed, {**made.values, **arrays})


def live(kv: RequestKV) -> list[int]:
    """Live ids."""
    ids: list[int] = kv.table.live_ids().tolist()
    return ids


def test_unobserved_token_does_not_die_first() -> None:
    """Tokens behind the last observed one have score zero, and stay."""
    layer, kv = make_layer()
    scores = np.r_[np.linspace(5, 4, 30), np.zeros(10)]
    layer.evict_if_due(kv, PROMPT, signals_of(kv, 30, attention_sum=scores))
    assert len(live(kv)) == 20
    assert live(kv)[-10:] == list(range(30, 40))


def test_grace_yields_no_more_victims_than_there_are() -> None:
    """With few observed tokens the request stays over its budget for now."""
    layer, kv = make_layer()
    layer.evict_if_due(kv, PROMPT, signals_of(kv, 6))
    assert live(kv) == [0, 1, *range(6, 40)]


@pytest.mark.parametrize("case", ["none", "nothing observed", "other signals", "other tokens"])
def test_eviction_without_observations_is_postponed_and_counted(case: str) -> None:
    """Nothing is evicted blindly; one interval later it is tried again."""
    layer, kv = make_layer()
    signals = {
        "none": None,
        "nothing observed": signals_of(kv, 0),
        "other signals": make_signals(kv.table.live_ids(), ["key_norm"]),
        "other tokens": make_signals(np.arange(5)),
    }[case]
    layer.evict_if_due(kv, PROMPT, signals)
    assert len(live(kv)) == PROMPT
    assert layer.stats.counter("evictions_postponed_total", "h2o") == 1
    assert kv.next_evict_at == PROMPT + 4
    layer.schedule_tokens(kv, PROMPT, PROMPT + 4)
    layer.evict_if_due(kv, PROMPT + 4, signals_of(kv))
    assert len(live(kv)) == 20


def test_generated_tokens_of_a_prefill_policy_can_be_evicted() -> None:
    """Nobody observes them, so they are not spared for want of a score: the budget holds."""
    layer, kv = make_layer(policy="snapkv")
    for length in range(PROMPT, PROMPT + 44, 4):
        layer.schedule_tokens(kv, length - 4, length)
        layer.evict_if_due(kv, length, signals_of(kv, sum(i < PROMPT for i in live(kv))))
        assert len(live(kv)) == 20
    assert min(live(kv)[2:]) > PROMPT


def test_prefill_policy_on_a_running_request_looks_at_decode_first() -> None:
    """Until its first eviction; then the window is complete and decode is left alone."""
    layer, kv = make_layer(policy="streaming_llm")
    layer.control.patch({"policy": "snapkv"})
    due = PROMPT + 4
    assert layer.to_observe(kv, due - 1, due) == (1, True)
    layer.schedule_tokens(kv, PROMPT, due)
    layer.evict_if_due(kv, due, signals_of(kv))
    assert len(live(kv)) == 20
    assert layer.to_observe(kv, due + 3, due + 4) is None


def test_key_signals_need_no_observation() -> None:
    """A policy of keys alone evicts although no query was looked at."""
    layer, kv = make_layer(policy="knorm")
    layer.evict_if_due(kv, PROMPT, signals_of(kv, 40))
    assert len(live(kv)) == 20
    assert layer.stats.counter("evictions_postponed_total", "knorm") == 0


@pytest.mark.parametrize(
    ("before", "after", "postponed"),
    [("streaming_llm", "h2o", 1), ("h2o", "rkv", 0), ("h2o", "tova", 1), ("h2o", "knorm", 0)],
)
def test_switch_to_a_policy_with_new_signals_waits_one_interval(
    before: str, after: str, postponed: int
) -> None:
    """Only where the old policy did not have the attention observed."""
    layer, kv = make_layer(policy=before)
    layer.evict_if_due(kv, PROMPT, signals_of(kv))
    layer.control.patch({"policy": after, "budget_tokens": 15})
    assert layer.stats.counter("evictions_postponed_total", after) == postponed
    layer.evict_if_due(kv, PROMPT, signals_of(kv))
    assert len(live(kv)) == (20 if postponed else 15)


def test_switch_during_prefill_waits_for_nothing() -> None:
    """The window at the end of the prefill will be observed for the new policy."""
    pool = ModelPool(64)
    layer = TokenLayer(make_config(**{**SETTINGS, "policy": "streaming_llm"}), pool)
    pool.start_request("r")
    assert pool.grow("r", 100)
    kv = layer.admit("r", PROMPT, PROMPT, 7)
    layer.schedule_tokens(kv, 0, 20)
    layer.control.patch({"policy": "h2o"})
    assert kv.next_evict_at == PROMPT
    assert layer.stats.counter("evictions_postponed_total", "h2o") == 0


def test_whole_pages_never_leaves_a_partial_page() -> None:
    """Victims are rounded down to pages; the rest stays over the budget until a page is full."""
    layer, kv = make_layer(policy="paged_eviction", budget_tokens=21)
    layer.evict_if_due(kv, PROMPT, signals_of(kv))
    assert len(live(kv)) == 24  # 40 - 16: 19 would be due, pages have 4
    per_page = np.bincount(np.array(live(kv)) // 4, minlength=10)
    assert set(per_page.tolist()) == {0, 4}


def test_columns_name_the_dead_of_the_workers_row() -> None:
    """Composed over evictions between two steps, and absent when only places changed."""
    layer, kv = make_layer()
    assert layer.schedule_tokens(kv, PROMPT, PROMPT + 1) is None
    row_before = live(kv)
    layer.evict_if_due(kv, PROMPT + 1, signals_of(kv))
    layer.control.patch({"budget_tokens": 12})
    layer.evict_if_due(kv, PROMPT + 1, signals_of(kv))
    change = layer.schedule_tokens(kv, PROMPT + 1, PROMPT + 2)
    assert change is not None
    assert change.dropped is not None
    assert change.slots is None
    assert np.delete(row_before, change.dropped).tolist() == live(kv)[:-1]
    kv.send_row()  # as after a relocation
    change = layer.schedule_tokens(kv, PROMPT + 2, PROMPT + 3)
    assert change is not None
    assert change.dropped is None
    assert change.slots is not None


def test_columns_know_that_a_token_in_flight_died_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under pressure a token may go while it is computed; the worker's row is then without it."""
    victims = [np.array([20, 21]), np.array([5])]
    monkeypatch.setattr(RandomPolicy, "select_victims", lambda *_: victims.pop(0))
    early = {"evict_free_ratio": 0.9, "evict_during_prefill": True}
    layer, kv = make_layer(policy="random", budget_tokens=None, keep_ratio=0.94, **early)
    layer.evictor.evict_early(kv)
    assert 20 not in live(kv)
    change = layer.schedule_tokens(kv, PROMPT, PROMPT + 1)
    assert change is not None
    assert (change.slots, change.dropped.tolist()) == (None, [20, 21])  # type: ignore[union-attr]
    row = live(kv)
    layer.control.patch({"recent_tokens": 2})  # due at once
    layer.evict_if_due(kv, 18)  # the output of an earlier step
    change = layer.schedule_tokens(kv, PROMPT + 1, PROMPT + 2)
    assert change is not None
    assert change.dropped is not None
    assert np.delete(row, change.dropped).tolist() == live(kv)[:-1] == [t for t in row if t != 5]


def test_without_scores_nothing_is_observed() -> None:
    """A policy that looks at nothing pays for nothing."""
    layer, kv = make_layer(policy="streaming_llm")
    layer.evict_if_due(kv, PROMPT)
    assert layer.observation() is None
    assert layer.to_observe(kv, PROMPT, PROMPT + 4) is None
    assert not layer.wants_signals(kv, 10**6)


def test_signals_are_wanted_only_for_evictions_that_will_happen() -> None:
    """Due, over budget, and with a policy that looks."""
    layer, kv = make_layer()
    assert layer.wants_signals(kv, PROMPT)
    assert not layer.wants_signals(kv, PROMPT - 1)
    assert not make_layer(budget_tokens=40)[0].wants_signals(kv, PROMPT)
    assert layer.observation().signals == {ATTENTION_SUM}  # type: ignore[union-attr]
