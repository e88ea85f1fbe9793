"""TokenLayer: tracking, rows, gauges; its dynamics are in ``test_token_layer_stateful``."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.core_models import kill, make_layer, make_request
from vtoken.errors import ConfigError, InvariantViolationError
from vtoken.stats import METRICS


def test_first_step_sends_the_prefix_as_row() -> None:
    """A new request's row holds what the prefix cache brought, in logical order."""
    layer, pool = make_layer()
    make_request(layer, pool, "a", num_tokens=12)
    pool.cache_full_blocks("a", ["h0", "h1"])
    assert pool.start_request("b", ["h0", "h1"]) == 2
    assert pool.grow("b", 11)
    kv = layer.admit("b", 11, 11, 0)
    change = layer.schedule_tokens(kv, 8, 11)
    assert change is not None
    assert change.slots is not None
    assert change.slots.tolist() == [b * 4 + i for b in pool.lists["a"][:2] for i in range(4)]
    assert kv.table.num_tokens == 11
    layer.verification.check_all()


def test_later_steps_send_no_row() -> None:
    """Growth alone is the worker's business."""
    layer, pool = make_layer()
    kv = make_request(layer, pool, num_tokens=3)
    for num_tokens in range(4, 12):
        assert pool.grow("a", num_tokens)
        assert layer.schedule_tokens(kv, num_tokens - 1, num_tokens) is None
    assert kv.blocks.ids.tolist() == pool.lists["a"]


def test_row_is_not_touched_by_later_changes() -> None:
    """The worker of another step may still read it."""
    layer, pool = make_layer(budget_tokens=8)
    kv = make_request(layer, pool, num_tokens=12)
    layer.evict_if_due(kv, 12)
    kv.send_row()
    assert pool.grow("a", 13)
    change = layer.schedule_tokens(kv, 12, 13)
    assert change is not None
    assert change.slots is not None
    assert change.dropped is not None
    before = change.slots.tolist(), change.dropped.tolist()
    kill(layer, kv, [11])
    assert (change.slots.tolist(), change.dropped.tolist()) == before


def test_admitting_twice_is_our_own_mistake() -> None:
    """An internal invariant, hence an assertion."""
    layer, pool = make_layer()
    make_request(layer, pool)
    with pytest.raises(AssertionError, match="request a is already tracked"):
        layer.admit("a", 1, 1, 0)


def test_forget_takes_everything_out_and_observes() -> None:
    """Table and totals are gone, the histograms know what it held and lost."""
    layer, pool = make_layer(policy="streaming_llm", budget_tokens=8)
    layer.evict_if_due(make_request(layer, pool, num_tokens=20), 20)
    layer.forget("a")
    layer.forget("a")
    layer.forget("never seen")
    assert layer.requests == {}
    assert (layer.occupancy.live_tokens, layer.occupancy.retained_blocks) == (0, 0)
    histograms = layer.snapshot()["stats"]["histograms"]
    assert histograms["request_retained_blocks"]["sum"] == 3
    assert histograms["request_evicted_tokens"]["sum"] == 12
    assert sum(histograms["request_retained_blocks"]["counts"]) == 1


def test_pool_state_counts_what_is_there() -> None:
    """Every gauge of the layer, once by hand."""
    layer, pool = make_layer(policy="none", headroom_blocks=3)
    kv = make_request(layer, pool, num_tokens=17)
    kill(layer, kv, [token for token in range(1, 16) if token % 4])
    layer.plan_relocations([(kv, 17)])
    assert layer.pool_state() == {
        "waste_ratio": 0.75,
        "low_utilization_block_ratio": 1.0,
        "live_tokens": 5,
        "dead_tokens": 12,
        "retained_blocks": 5,
        "ideal_blocks": 2,
        "free_blocks": 26,
        "total_blocks": 32,
        "headroom_blocks": 3,
        "in_flight_relocations": 1,
        "effective_theta_f": 0.0,
        "relocation_disabled": 0.0,
    }


def test_pool_state_covers_every_gauge() -> None:
    """No gauge stays at its initial zero for want of a source."""
    layer, _ = make_layer()
    gauges = {m.name for m in METRICS.values() if m.kind == "gauge" and not m.labels}
    assert set(layer.pool_state()) == gauges


def test_snapshot_counts_blocks_by_utilization() -> None:
    """Every held block in the range of its share of live tokens, announced ones included."""
    layer, pool = make_layer(policy="none")
    kv = make_request(layer, pool, num_tokens=17)
    kill(layer, kv, [1, 2, 3, 4, 5])
    rows = layer.snapshot()["stats"]["gauges"]["blocks_by_utilization"]
    found = {label: num for (label,), num in rows if num}
    assert found == {"0.25": 2, "0.5": 1, "1": 2}


@pytest.mark.parametrize(("mode", "headroom"), [("naive", 0), ("lazy", 4)])
def test_headroom_exists_in_lazy_only(mode: str, headroom: int) -> None:
    """Without relocation nothing is kept back."""
    layer, _ = make_layer(mode=mode)
    assert layer.pool_state()["headroom_blocks"] == headroom


def test_snapshot_is_json() -> None:
    """It crosses to the API process as plain data."""
    layer, pool = make_layer()
    layer.evict_if_due(make_request(layer, pool, num_tokens=20), 20)
    snapshot = layer.snapshot()
    assert json.loads(json.dumps(snapshot)) == snapshot
    assert snapshot["policy_version"] == 1
    assert snapshot["config"] == layer.config.to_dict()


@pytest.mark.parametrize(
    ("call", "invariant"),
    [
        (lambda layer, kv: layer.settle(1, None), "I2"),
        (lambda layer, kv: layer.plan_relocations([(kv, 17)]), "I4"),
    ],
)
def test_online_checks_stop_a_broken_layer(
    call: Any, invariant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With ``verify=full`` a violation is counted and raised where it happens."""
    layer, pool = make_layer(policy="none", verify="full")
    kv = make_request(layer, pool, num_tokens=17)
    kill(layer, kv, [token for token in range(1, 16) if token % 4])
    if invariant == "I2":
        layer.plan_relocations([(kv, 17)])
        assert kv.plan is not None
        kv.table._slot[16] = kv.plan.dst_blocks[0] * kv.block_size + 1
        monkeypatch.setattr(type(kv.table), "apply_moves", lambda *_: None)
    else:
        monkeypatch.setattr(pool, "allocate", lambda n: pool.__class__.allocate(pool, 4))
    with pytest.raises(InvariantViolationError, match=invariant):
        call(layer, kv)
    assert layer.stats.counter("invariant_violations_total", invariant) == 1


def test_headroom_must_leave_something_of_the_pool() -> None:
    """A headroom as large as the pool is refused, at start and live, with the bound."""
    layer, pool = make_layer()
    for attempt in (
        lambda: make_layer(headroom_blocks=pool.num_total_blocks),
        lambda: layer.control.patch({"headroom_blocks": pool.num_total_blocks}),
    ):
        with pytest.raises(ConfigError, match=f"headroom_blocks < {pool.num_total_blocks}"):
            attempt()


def test_change_may_skip_versions_but_not_go_back() -> None:
    """Other engines may have had more changes; the history has what there was."""
    layer, _ = make_layer()
    layer.control.change(layer.config.patched({"theta_f": 0.1}), version=7)
    assert layer.policy_version == 7
    assert layer.control.history.find().version == 1
    layer.control.change(layer.config.patched({"theta_f": 0.2}), version=3)
    assert layer.policy_version == 8
    assert [change.version for change in layer.control.history] == [8, 7, 1]
    assert layer.control.history.find().version == 7
