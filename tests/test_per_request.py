"""Requests with options of their own beside others, in one token layer."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.core_models import ModelPool, make_layer, make_request, make_signals
from vtoken import receipts
from vtoken.config import VTokenConfig
from vtoken.observation import ATTENTION_HISTORY, ATTENTION_PREFILL, ATTENTION_SUM
from vtoken.policies.registry import POLICIES
from vtoken.receipts import MAX_RECEIPTS
from vtoken.request_kv import RequestKV
from vtoken.token_layer import TokenLayer

EVICTING = [name for name in POLICIES if POLICIES[name].evicts]
BY_TOKEN = [name for name in EVICTING if not POLICIES[name].whole_pages]
OPT_OUT = {"vtoken_evict": False}


def evict(layer: TokenLayer, kv: RequestKV, num_computed: int = 0) -> None:
    """Evict if due, with everything observed."""
    signals = make_signals(kv.table.live_ids())
    layer.evict_if_due(kv, num_computed or kv.num_tokens, signals)


def grow(layer: TokenLayer, pool: ModelPool, kv: RequestKV) -> None:
    """One more token, then evict if due."""
    num_tokens = kv.num_tokens + 1
    assert pool.grow(kv.req_id, num_tokens)
    layer.schedule_tokens(kv, num_tokens - 1, num_tokens)
    evict(layer, kv)


def test_each_request_gets_its_policy_and_budget() -> None:
    """Exact numbers, and each under its policy's name in the metrics."""
    layer, pool = make_layer(policy="streaming_llm", budget_tokens=8)
    wanted: dict[str, tuple[dict[str, Any], int]] = {
        "service": ({}, 8),
        "h2o": ({"vtoken_policy": "h2o", "vtoken_budget_tokens": 11}, 11),
        "random": ({"vtoken_policy": "random", "vtoken_keep_ratio": 0.7}, 14),
        "more": ({"vtoken_budget_tokens": 15}, 15),
        "tova": ({"vtoken_policy": "tova"}, 8),
        "none": (OPT_OUT, 20),
    }
    for req_id, (options, kept) in wanted.items():
        kv = make_request(layer, pool, req_id, num_tokens=20, options=options)
        evict(layer, kv)
        assert kv.table.num_live == kept, req_id
    counter = layer.stats.counter
    assert counter("evicted_tokens_total", "streaming_llm") == 12 + 5
    assert counter("evicted_tokens_total", "h2o") == 9
    assert counter("evicted_tokens_total", "random") == 6
    assert counter("evicted_tokens_total", "tova") == 12
    layer.verification.check_all()


def test_equal_policies_share_one_object() -> None:
    """Policies are stateless; arguments in another order are the same arguments."""
    layer, pool = make_layer()
    options = [
        {"vtoken_policy": "scissorhands", "vtoken_policy_args": text}
        for text in ('{"history_window": 16}', '{ "history_window":16 }', "{}")
    ]
    first, second, third = (
        layer.evictor.policy_of(make_request(layer, pool, str(i), num_tokens=4, options=o))
        for i, o in enumerate(options)
    )
    assert first is second
    assert first is not third
    assert first.args["history_window"] == 16


@pytest.mark.parametrize("policy", BY_TOKEN)
def test_protected_spans_survive(policy: str) -> None:
    """Sinks, recent and named tokens stay, and no other when the budget is smaller still."""
    layer, pool = make_layer(policy=policy, keep_ratio=0.01)
    options = {"vtoken_protect": "3:6,10:11,18:900"}
    kv = make_request(layer, pool, num_tokens=24, num_prompt_tokens=20, options=options)
    evict(layer, kv)
    assert kv.table.live_ids().tolist() == [0, 3, 4, 5, 10, 18, 19, 22, 23]


@pytest.mark.parametrize("policy", EVICTING)
@given(
    spans=st.lists(st.tuples(st.integers(0, 30), st.integers(1, 12)), min_size=1, max_size=4),
    num_prompt=st.integers(1, 24),
    budget=st.integers(4, 24),
    steps=st.integers(0, 12),
)
def test_no_policy_ever_evicts_a_protected_token(
    policy: str, spans: list[tuple[int, int]], num_prompt: int, budget: int, steps: int
) -> None:
    """Whatever the policy, the spans, the budget and the number of evictions."""
    layer, pool = make_layer(budget_tokens=50)
    text = ",".join(f"{start}:{start + length}" for start, length in spans)
    options = {
        "vtoken_policy": policy,
        "vtoken_budget_tokens": budget,
        "vtoken_protect": text,
    }
    kv = make_request(
        layer, pool, num_tokens=24, num_prompt_tokens=num_prompt, prefill_end=24, options=options
    )
    evict(layer, kv)
    for _ in range(steps):
        grow(layer, pool, kv)
    named = {i for start, length in spans for i in range(start, start + length)}
    kept = {i for i in named if i < num_prompt} | {0, kv.num_tokens - 1}
    live = set(kv.table.live_ids().tolist())
    assert kept <= live
    if policy in BY_TOKEN:
        assert len(live) == max(budget, len(kept | {kv.num_tokens - 2}))
    assert layer.stats.counter("policy_errors_total", policy) == 0
    layer.verification.check_all()


def test_patch_passes_requests_with_their_own_by() -> None:
    """The others follow at once; a request's own policy, budget and schedule stay."""
    layer, pool = make_layer(policy="streaming_llm", budget_tokens=16, evict_interval_tokens=4)
    own = {"vtoken_policy": "random", "vtoken_budget_tokens": 12}
    kvs = {
        name: make_request(layer, pool, name, num_tokens=20, options=options)
        for name, options in {
            "service": {},
            "own": own,
            "own policy": {"vtoken_policy": "random"},
            "own budget": {"vtoken_budget_tokens": 12},
            "out": OPT_OUT,
        }.items()
    }
    for kv in kvs.values():
        evict(layer, kv)
    live = kvs["own"].table.live_ids().tolist()
    layer.control.patch({"policy": "tova", "budget_tokens": 8})
    names = {name: layer.evictor.policy_of(kv).name for name, kv in kvs.items()}
    assert names == {
        "service": "tova",
        "own": "random",
        "own policy": "random",
        "own budget": "tova",
        "out": "none",
    }
    due = {name: kv.next_evict_at for name, kv in kvs.items()}
    assert due == {"service": 24, "own": 24, "own policy": 20, "own budget": 24, "out": 24}
    for kv in kvs.values():
        for _ in range(4):
            grow(layer, pool, kv)
    assert {name: kv.num_live for name, kv in kvs.items()} == {
        "service": 8,
        "own": 12,
        "own policy": 11,  # 8 at once, with the first of four tokens
        "own budget": 12,
        "out": 24,
    }
    assert set(live) - set(kvs["own"].table.live_ids().tolist())
    layer.verification.check_all()


def test_patch_of_protection_reaches_everybody() -> None:
    """Sinks beyond a request's own budget: it keeps them, nothing is refused or violated."""
    layer, pool = make_layer(budget_tokens=16)
    kv = make_request(layer, pool, num_tokens=20, options={"vtoken_budget_tokens": 4})
    layer.control.patch({"sink_tokens": 10})
    evict(layer, kv)
    assert kv.table.live_ids().tolist() == [*range(10), 18, 19]


def test_worker_observes_what_any_policy_in_use_needs() -> None:
    """The union over requests and service; it comes and goes with the requests."""
    layer, pool = make_layer(policy="streaming_llm")
    assert layer.observation() is None
    h2o = make_request(layer, pool, "h", num_tokens=20, options={"vtoken_policy": "h2o"})
    assert layer.observation().signals == POLICIES["h2o"].signals
    snap = make_request(layer, pool, "s", num_tokens=20, options={"vtoken_policy": "snapkv"})
    plain = make_request(layer, pool, "p", num_tokens=20)
    assert layer.observation().signals == POLICIES["h2o"].signals | POLICIES["snapkv"].signals
    assert layer.signals_of(h2o) == {ATTENTION_SUM}
    assert layer.signals_of(snap) == {ATTENTION_PREFILL}
    assert not layer.signals_of(plain)
    assert [layer.wants_signals(kv, 20) for kv in (h2o, snap, plain)] == [True, True, False]
    assert [layer.to_observe(kv, 20, 21) is None for kv in (h2o, snap, plain)] == [
        False,
        True,
        True,
    ]
    layer.control.patch({"policy": "scissorhands"})
    layer.forget("h")
    layer.forget("s")
    assert layer.observation().signals == {ATTENTION_HISTORY}
    layer.control.patch({"policy": "random"})
    assert layer.observation() is None


def test_rows_of_every_request_follow_while_somebody_observes() -> None:
    """Survivors are told for a policy without signals, too: a change may need its columns."""
    layer, pool = make_layer(policy="streaming_llm", budget_tokens=8)
    make_request(layer, pool, "h", num_tokens=4, options={"vtoken_policy": "h2o"})
    kv = make_request(layer, pool, "p", num_tokens=12)
    evict(layer, kv)
    assert pool.grow("p", 13)
    change = layer.schedule_tokens(kv, 12, 13)
    assert change is not None
    assert change.dropped is not None
    assert change.dropped.tolist() == [1, 2, 3, 4]


def test_policy_with_signals_evicts_at_the_end_of_its_own_prefill() -> None:
    """It is observed from its first step on: nothing to wait for."""
    layer, pool = make_layer(policy="streaming_llm", budget_tokens=8)
    kv = make_request(layer, pool, num_tokens=20, options={"vtoken_policy": "h2o"})
    assert layer.to_observe(kv, 0, 20) is not None
    assert layer.wants_signals(kv, 20)
    evict(layer, kv)
    assert kv.num_live == 8
    assert layer.stats.counter("evictions_postponed_total", "h2o") == 0


def receipt_options(**ours: Any) -> dict[str, Any]:
    """Options that ask for a receipt under the key ``k``."""
    return {"vtoken_receipt": "k", **{f"vtoken_{name}": v for name, v in ours.items()}}


def test_receipt_has_the_layers_numbers() -> None:
    """Tokens and blocks as counted, for a request that ended; it can be had once."""
    layer, pool = make_layer(policy="streaming_llm", budget_tokens=8)
    kv = make_request(layer, pool, num_tokens=20, options=receipt_options())
    evict(layer, kv)
    running = layer.receipt("k")
    layer.forget("a")
    expected = {
        "policy": "streaming_llm",
        "policy_version": 1,
        "num_sequences": 1,
        "evicted_tokens": layer.stats.counter("evicted_tokens_total", "streaming_llm"),
        "live_tokens": 8,
        "freed_blocks": layer.stats.counter("freed_blocks_total", "empty"),
        "work": {"evictions": 1, "relocations": 0, "stall_seconds": 0},
    }
    assert expected["evicted_tokens"] == 12
    assert expected["freed_blocks"] == 2
    assert running == layer.receipt("k") == expected
    assert layer.receipt("k")["num_sequences"] == 0


def test_receipt_leaves_out_tokens_in_flight() -> None:
    """Scheduled ahead of an end that nobody knew of: they are not of the answer."""
    layer, pool = make_layer(policy="streaming_llm", budget_tokens=8)
    evict(layer, make_request(layer, pool, num_tokens=20, options=receipt_options()))
    layer.forget("a", 1)
    found = layer.receipt("k")
    assert (found["evicted_tokens"], found["live_tokens"]) == (12, 7)


def test_receipt_bears_tokens_that_went_while_in_flight() -> None:
    """Six were computed when the request ended; of the others, under pressure, some had gone."""
    layer, pool = make_layer(policy="streaming_llm", budget_tokens=8)
    kv = make_request(layer, pool, num_tokens=20, options=receipt_options())
    evict(layer, kv)
    live = int((kv.table.live_ids() < 6).sum())
    layer.forget("a", 14)
    found = layer.receipt("k")
    assert (found["evicted_tokens"], found["live_tokens"]) == (6 - live, live)


def test_receipt_sums_sequences_and_replaces_earlier_lives() -> None:
    """A preempted request is counted once, as it was at its end."""
    layer, pool = make_layer(policy="streaming_llm", budget_tokens=8)
    options = receipt_options(policy="random", budget_tokens=10)
    for req_id, num_tokens in (("a", 20), ("b", 14), ("a", 22)):
        evict(layer, make_request(layer, pool, req_id, num_tokens=num_tokens, options=options))
        layer.forget(req_id)
        pool.release(req_id)
    found = layer.receipt("k")
    assert (found["policy"], found["num_sequences"]) == ("random", 2)
    assert (found["evicted_tokens"], found["live_tokens"]) == (12 + 4, 20)


def test_receipts_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those nobody fetched go, the oldest first; without a key there is none."""
    monkeypatch.setattr(receipts, "MAX_RECEIPTS", 2)
    assert MAX_RECEIPTS >= 100
    layer, pool = make_layer()
    for i, key in enumerate(("x", "y", True, "z")):
        make_request(layer, pool, str(i), num_tokens=4, options={"vtoken_receipt": key})
        layer.forget(str(i))
    found = {key: layer.receipt(key)["num_sequences"] for key in ("x", "y", "z")}
    assert found == {"x": 0, "y": 1, "z": 1}


def test_options_outlive_the_configuration() -> None:
    """No patch of the service can make a request's own settings invalid."""
    layer, pool = make_layer(budget_tokens=8)
    kv = make_request(layer, pool, num_tokens=20, options={"vtoken_budget_tokens": 4})
    for changes in ({"keep_ratio": 0.9}, {"recent_tokens": 6, "budget_tokens": 50}):
        layer.control.patch(changes)
        assert layer.evictor.target_of(kv, 20) == 4
    assert isinstance(layer.config, VTokenConfig)
