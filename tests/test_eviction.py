"""Evictor: who is due, how many go, what is freed, and what happens if a policy breaks."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.core_models import make_layer, make_request, make_signals
from vtoken.errors import ConfigError
from vtoken.policies.base import EvictionPolicy, LiveView
from vtoken.policies.registry import POLICIES
from vtoken.request_kv import RequestKV
from vtoken.token_layer import TokenLayer

EVICTING = [name for name in POLICIES if POLICIES[name].evicts]
BY_TOKEN = [name for name in EVICTING if not POLICIES[name].whole_pages]
OBSERVING = [name for name in EVICTING if POLICIES[name].signals]


def evict(layer: TokenLayer, kv: RequestKV, num_computed: int) -> None:
    """Evict if due, with everything observed."""
    layer.evict_if_due(kv, num_computed, make_signals(kv.table.live_ids()))


@pytest.mark.parametrize("policy", BY_TOKEN)
@pytest.mark.parametrize("num_tokens", [8, 9, 30])
def test_evict_leaves_exactly_the_budget(policy: str, num_tokens: int) -> None:
    """Above the budget exactly the excess dies, below it nobody."""
    layer, pool = make_layer(policy=policy, budget_tokens=8)
    kv = make_request(layer, pool, num_tokens=num_tokens)
    evict(layer, kv, num_tokens)
    assert kv.table.num_live == 8
    assert kv.num_evicted == num_tokens - 8
    assert layer.stats.counter("evicted_tokens_total", policy) == num_tokens - 8
    layer.verification.check_all()


@pytest.mark.parametrize("policy", BY_TOKEN)
def test_evict_spares_sinks_and_recent(policy: str) -> None:
    """With a budget below the protected number every unprotected token goes, and no other."""
    layer, pool = make_layer(policy=policy, keep_ratio=0.01, sink_tokens=3, recent_tokens=5)
    kv = make_request(layer, pool, num_tokens=20)
    evict(layer, kv, 20)
    assert kv.table.live_ids().tolist() == [0, 1, 2, 15, 16, 17, 18, 19]


@pytest.mark.parametrize("policy", [name for name in EVICTING if name not in BY_TOKEN])
def test_whole_page_policy_never_leaves_a_hole(policy: str) -> None:
    """Pages with a protected token stay, the others go as wholes, and less than a page waits."""
    layer, pool = make_layer(policy=policy, budget_tokens=8)
    kv = make_request(layer, pool, num_tokens=23)  # 15 too many: three pages of 4
    evict(layer, kv, 23)
    assert kv.num_evicted == 12
    assert {0, 1, 2, 3, 20, 21, 22} <= set(kv.table.live_ids().tolist())
    assert kv.blocks.num_live.tolist().count(0) == 3
    assert kv.blocks.retained == kv.ideal_blocks == 3


@pytest.mark.parametrize("policy", OBSERVING)
def test_eviction_without_observations_is_postponed(policy: str) -> None:
    """Nothing, not enough names, or other tokens: one interval later, and counted."""
    layer, pool = make_layer(policy=policy, budget_tokens=8, evict_interval_tokens=5)
    kv = make_request(layer, pool, num_tokens=20)
    live = kv.table.live_ids()
    for i, signals in enumerate((None, make_signals(live, ["key"]), make_signals(live[:-1])), 1):
        kv.next_evict_at = 20
        layer.evict_if_due(kv, 20, signals)
        assert (kv.num_evicted, kv.next_evict_at) == (0, 25)
        assert layer.stats.counter("evictions_postponed_total", policy) == i
    assert pool.uncached == set()


@pytest.mark.parametrize("policy", [n for n in OBSERVING if n in BY_TOKEN])
def test_unobserved_tokens_do_not_die_first(policy: str) -> None:
    """Tokens that no query has seen are spared, as many as the budget then allows for."""
    layer, pool = make_layer(policy=policy, budget_tokens=8)
    kv = make_request(layer, pool, num_tokens=20)
    layer.evict_if_due(kv, 20, make_signals(kv.table.live_ids(), num_observed=6))
    assert kv.table.live_ids().tolist() == [0, *range(6, 20)]


def test_wants_signals_only_when_they_would_be_used() -> None:
    """Due, above the budget, and a policy that looks at them."""
    layer, pool = make_layer(policy="h2o", budget_tokens=8, evict_interval_tokens=100)
    kv = make_request(layer, pool, num_tokens=20, prefill_end=20)
    assert not layer.wants_signals(kv, 19)
    assert layer.wants_signals(kv, 20)
    evict(layer, kv, 20)
    assert kv.table.num_live == 8
    assert not layer.wants_signals(kv, 20)
    layer.control.patch({"policy": "random"})
    assert not layer.wants_signals(kv, 1000)


def test_patch_to_an_observing_policy_waits_one_interval() -> None:
    """The new policy first looks, then evicts."""
    layer, pool = make_layer(policy="random", budget_tokens=8, evict_interval_tokens=4)
    kv = make_request(layer, pool, num_tokens=20)
    layer.control.patch({"policy": "h2o"})
    assert kv.next_evict_at == 24
    assert layer.stats.counter("evictions_postponed_total", "h2o") == 1


def test_evict_keep_ratio_rounds_up() -> None:
    """⌈21 · 0.5⌉ = 11 tokens stay."""
    layer, pool = make_layer(policy="random", keep_ratio=0.5)
    kv = make_request(layer, pool, num_tokens=21)
    layer.evict_if_due(kv, 21)
    assert kv.table.num_live == 11


def test_evict_does_nothing_when_all_is_protected() -> None:
    """Protection beats the budget."""
    layer, pool = make_layer(policy="random", keep_ratio=0.1, recent_tokens=50)
    kv = make_request(layer, pool, num_tokens=20)
    layer.evict_if_due(kv, 20)
    assert kv.table.num_live == 20


def test_evict_waits_for_the_end_of_prefill() -> None:
    """Chunks of a prefill are not evicted from, however long they are; its end is."""
    layer, pool = make_layer(budget_tokens=8)
    kv = make_request(layer, pool, num_tokens=20, prefill_end=24)
    layer.evict_if_due(kv, 20)
    assert kv.table.num_live == 20
    assert pool.grow("a", 24)
    layer.schedule_tokens(kv, 20, 24)
    layer.evict_if_due(kv, 24)
    assert kv.table.num_live == 8


def test_evict_comes_every_interval() -> None:
    """After the first eviction the next one is due after ``evict_interval_tokens`` tokens."""
    layer, pool = make_layer(budget_tokens=8, evict_interval_tokens=3)
    kv = make_request(layer, pool, num_tokens=10)
    layer.evict_if_due(kv, 10)
    live = []
    for num_tokens in range(11, 18):
        assert pool.grow("a", num_tokens)
        layer.schedule_tokens(kv, num_tokens - 1, num_tokens)
        layer.evict_if_due(kv, num_tokens)
        live.append(kv.table.num_live)
    assert live == [9, 10, 8, 9, 10, 8, 9]


def test_evict_interval_runs_under_policy_none_too() -> None:
    """``none`` keeps everything and the schedule moves on."""
    layer, pool = make_layer(policy="none", evict_interval_tokens=5)
    kv = make_request(layer, pool, num_tokens=20)
    layer.evict_if_due(kv, 20)
    assert (kv.table.num_live, kv.next_evict_at) == (20, 25)
    assert layer.stats.counter("evicted_tokens_total", "none") == 0


def test_evict_looks_at_computed_tokens_only() -> None:
    """Tokens scheduled ahead (async) are no victims and do not count."""
    layer, pool = make_layer(policy="streaming_llm", budget_tokens=8)
    kv = make_request(layer, pool, num_tokens=12, prefill_end=12)
    assert pool.grow("a", 14)
    layer.schedule_tokens(kv, 12, 14)
    layer.evict_if_due(kv, 12)
    assert kv.table.live_ids().tolist() == [0, 5, 6, 7, 8, 9, 10, 11, 12, 13]


def test_patch_makes_running_requests_due_at_once() -> None:
    """A smaller budget takes effect at the next step, not at the end of the interval."""
    layer, pool = make_layer(budget_tokens=16, evict_interval_tokens=1000)
    kv = make_request(layer, pool, num_tokens=20)
    layer.evict_if_due(kv, 20)
    layer.control.patch({"budget_tokens": 8, "policy": "random"})
    layer.evict_if_due(kv, 20)
    assert kv.table.num_live == 8
    assert layer.stats.counter("evicted_tokens_total", "random") == 8
    assert (layer.policy_version, layer.stats.counter("policy_changes_total")) == (2, 1)


@pytest.mark.parametrize(
    "changes",
    [
        {"policy": "no_such"},
        {"policy": ["random"]},
        {"policy": "random", "policy_args": {"x": 1}},
        {"policy": "random", "policy_args": {"seed": 1}},
        {"policy": "random", "theta_f": 7},
    ],
)
def test_refused_patch_changes_nothing(changes: dict[str, Any]) -> None:
    """A patch is a ConfigError and no change, or it is a change."""
    layer, _ = make_layer(policy="streaming_llm")
    config, policy = layer.config, layer.evictor.policy
    with pytest.raises(ConfigError):
        layer.control.patch(changes)
    assert layer.config is config
    assert layer.evictor.policy is policy
    assert (layer.policy_version, layer.stats.counter("policy_changes_total")) == (1, 0)


def test_empty_blocks_go_back_at_once() -> None:
    """A closed block without live token is free after the eviction, in every mode."""
    for mode in ("naive", "lazy"):
        layer, pool = make_layer(mode=mode, policy="streaming_llm", budget_tokens=8)
        kv = make_request(layer, pool, num_tokens=20)
        free = pool.num_free_blocks()
        layer.evict_if_due(kv, 20)  # 0 and 13 … 19 stay
        assert pool.num_free_blocks() == free + 2
        assert kv.blocks.ids.tolist() == pool.lists["a"]
        assert [block != 0 for block in pool.lists["a"]] == [True, False, False, True, True]
        assert layer.stats.counter("freed_blocks_total", "empty") == 2
        pool.check_integrity()
        layer.verification.check_all()


def test_tail_block_is_never_freed() -> None:
    """The block of the next token stays although it has no live token yet."""
    layer, pool = make_layer(policy="streaming_llm", budget_tokens=8)
    kv = make_request(layer, pool, num_tokens=16)
    assert pool.grow("a", 17)
    kv.blocks.extend(pool.new_blocks("a", 4))
    layer.evict_if_due(kv, 16)
    assert kv.blocks.ids[4] == pool.lists["a"][4] != 0


def test_shared_prefix_block_loses_one_reference_only() -> None:
    """What one holder evicts the other still reads."""
    layer, pool = make_layer(policy="streaming_llm", budget_tokens=8)
    first = make_request(layer, pool, "a", num_tokens=16)
    pool.cache_full_blocks("a", ["h0", "h1", "h2", "h3"])
    second = make_request(layer, pool, "b", num_tokens=20, hashes=["h0", "h1"])
    shared = first.blocks.ids[:2].tolist()
    assert second.blocks.ids[:2].tolist() == shared
    layer.evict_if_due(first, 16)
    assert [pool.ref[block] for block in shared] == [2, 1]
    assert second.table.num_live == 20
    layer.verification.check_all()
    pool.check_integrity()


def test_first_eviction_stops_prefix_caching() -> None:
    """K/V computed after an eviction must not be found by others; before it, it may."""
    layer, pool = make_layer(budget_tokens=8, evict_interval_tokens=1)
    kv = make_request(layer, pool, num_tokens=8)
    layer.evict_if_due(kv, 8)
    assert pool.uncached == set()
    assert pool.grow("a", 9)
    layer.schedule_tokens(kv, 8, 9)
    layer.evict_if_due(kv, 9)
    assert pool.uncached == {"a"}


def test_eviction_is_told_to_the_worker_once() -> None:
    """The next step names the columns that die, the one after nothing."""
    layer, pool = make_layer(policy="streaming_llm", budget_tokens=8, evict_interval_tokens=99)
    kv = make_request(layer, pool, num_tokens=12)
    layer.evict_if_due(kv, 12)
    assert pool.grow("a", 14)
    change = layer.schedule_tokens(kv, 12, 13)
    assert change is not None
    assert change.dropped is not None
    assert (change.slots, change.dropped.tolist()) == (None, [1, 2, 3, 4])
    assert layer.schedule_tokens(kv, 13, 14) is None


def test_listener_sees_request_length_and_victims() -> None:
    """The eviction log gets what the dense oracle needs."""
    layer, pool = make_layer(policy="streaming_llm", budget_tokens=8)
    seen = []
    layer.evictor.listener = lambda kv, n, victims: seen.append((kv.req_id, n, victims.tolist()))
    layer.evict_if_due(make_request(layer, pool, num_tokens=10), 10)
    assert seen == [("a", 10, [1, 2])]


class _Broken(EvictionPolicy):
    """Fails in the way it was told to."""

    name = "broken"
    summary = "For tests."

    def __init__(self, answer: Any) -> None:
        super().__init__()
        self.answer = answer

    def select_victims(self, view: LiveView, num_victims: int, protected: np.ndarray) -> Any:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@pytest.mark.parametrize(
    "answer",
    [
        RuntimeError("boom"),
        [0, 1],
        [18, 19],
        [5],
        [6, 5],
        None,
        np.array([5, 6, 5, *range(9, 18)], np.uint64),
    ],
)
def test_broken_policy_is_contained_and_counted(
    answer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """The engine goes on, the request keeps its tokens, and somebody can see it."""
    layer, pool = make_layer(budget_tokens=8)
    kv = make_request(layer, pool, num_tokens=20)
    broken = replace(layer.evictor.documents.current, policy=_Broken(answer))
    layer.evictor.documents.current = broken
    with caplog.at_level(logging.ERROR):
        layer.evict_if_due(kv, 20)
    assert kv.table.num_live == 20
    assert layer.stats.counter("policy_errors_total", "broken") == 1
    assert "broken" in caplog.text
    assert "a" in caplog.text
    layer.verification.check_all()
