"""Bookkeeping at scale: the benchmark runs, work per step is bounded, and doing it for all requests
at once changes nothing."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.bookkeeping import PHASES, Case, SimulatedRequest, Simulation, main, measure
from vtoken.integration.vllm.messages import StepMessage
from vtoken.live_index import LiveIndex
from vtoken.occupancy import BlockOccupancy
from vtoken.policies.random import RandomPolicy
from vtoken.reservations import MAX_PLANS_PER_STEP
from vtoken.table_store import TableStore

INTERVAL = Case(1, 1).interval
STEPS = {"num_warmup_steps": 32, "num_steps": 64}


def test_quick_mode_writes_every_number(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command runs through and its file holds median, mean, p99 and max of every phase."""
    out = tmp_path / "deep" / "results.json"
    main(["--quick", "--requests", "4", "8", "--out", str(out)])
    results = json.loads(out.read_text())
    assert [(r["case"]["num_requests"], r["case"]["num_tokens"]) for r in results] == [
        (4, 256),
        (8, 256),
        (4, 512),
        (8, 512),
    ]
    for result in results:
        assert result["milliseconds"].keys() == {"total", *PHASES}
        for numbers in result["milliseconds"].values():
            assert numbers.keys() == {"median", "mean", "p99", "max"}
    assert len(capsys.readouterr().out.splitlines()) == 1 + len(results)


def operations(num_requests: int, num_tokens: int) -> dict[str, float]:
    result: dict[str, float] = measure(Case(num_requests, num_tokens, **STEPS))[
        "operations_per_step"
    ]
    return result


def test_a_step_looks_at_few_tokens() -> None:
    """Every step evicts as many tokens as it computes; nobody lists a request's live tokens or
    sends its row but for a relocation."""
    ops = operations(32, 2048)
    assert ops["mark_dead"] == 32
    assert ops["new_blocks"] == 32 / INTERVAL
    assert ops.get("rows", 0) <= ops["plans"]
    assert ops.get("live_ids", 0) <= ops["plans"]


def test_operations_grow_linearly_with_requests_and_not_with_length() -> None:
    """Twice the requests: twice the operations. Twice the length: no more."""
    base, more, longer = operations(32, 2048), operations(64, 2048), operations(32, 4096)
    for name in ("mark_dead", "new_blocks"):
        assert more[name] == 2 * base[name], name
        assert longer[name] == base[name], name


@pytest.mark.parametrize("num_requests", [16, 48])
def test_numpy_is_called_as_often_for_many_requests_as_for_few(
    num_requests: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All requests that are due in a step are evicted from in one call."""
    simulation = Simulation(Case(num_requests, 2048))
    calls: Counter[str] = Counter()
    for owner, name in (
        (TableStore, "mark_dead"),
        (LiveIndex, "token"),
        (RandomPolicy, "select_ranks"),
        (BlockOccupancy, "add_one_token"),
        (BlockOccupancy, "remove_tokens"),
    ):
        count_calls(monkeypatch, owner, name, calls)
    for _ in range(INTERVAL):
        simulation.step()
    assert set(calls.values()) == {INTERVAL}
    assert len(calls) == 5


def count_calls(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str, calls: Counter[str]
) -> None:
    original = getattr(owner, name)

    def counting(*args: Any) -> Any:
        calls[name] += 1
        return original(*args)

    monkeypatch.setattr(owner, name, counting)


def test_a_plan_asks_the_pool_about_few_blocks() -> None:
    """References are looked up for the emptiest blocks only, however long the requests are."""
    simulation = Simulation(Case(8, 2048))
    asked: list[int] = []
    shared = simulation.pool.shared

    def counting(block_ids: np.ndarray) -> Any:
        asked.append(len(block_ids))
        return shared(block_ids)

    simulation.pool.shared = counting  # type: ignore[method-assign]
    simulation.layer.control.patch({"theta_f": 0.1})
    simulation.step()
    assert simulation.meter.operations["plans"] > 0
    assert max(asked) <= simulation.layer.config.max_source_blocks


def test_plans_of_one_step_are_bounded() -> None:
    """However many requests are wasteful, one step plans for some, and the next goes on."""
    simulation = Simulation(Case(MAX_PLANS_PER_STEP + 8, 1024))
    simulation.layer.control.patch({"theta_f": 0.1})
    seen: set[str] = set()
    for _ in range(2):
        batch = simulation.step().relocation
        assert batch is not None
        assert len(batch.req_ids) <= MAX_PLANS_PER_STEP
        seen.update(batch.req_ids)
    assert len(seen) == MAX_PLANS_PER_STEP + 8


# -- all at once against one by one ---------------------------------------------------------


def as_lists(message: StepMessage) -> list[Any]:
    """A message as comparable data."""
    rows = {req_id: row.tolist() for req_id, row in message.rows.items()}
    dropped = {req_id: columns.tolist() for req_id, columns in message.dropped.items()}
    batch = message.relocation
    if batch is None:
        return [rows, dropped]
    return [rows, dropped, batch.req_ids, batch.src_slots.tolist(), batch.dst_slots.tolist()]


def state_of(simulation: Simulation) -> list[Any]:
    """Everything the token layer knows."""
    layer = simulation.layer
    requests = [
        (
            kv.req_id,
            kv.table.live_ids().tolist(),
            kv.table.live_slots().tolist(),
            kv.table.num_live,
            kv.blocks.ids.tolist(),
            kv.blocks.num_live.tolist(),
            kv.next_evict_at,
        )
        for kv in layer.requests.values()
    ]
    return [requests, layer.pool_state(), layer.occupancy.blocks_by_live_tokens().tolist()]


def one_by_one(simulation: Simulation) -> None:
    """Have the layer do for each request alone what it does for all."""
    layer = simulation.layer
    schedule_step, evict_due = layer.schedule_step, layer.evict_due

    def schedule_each(num_scheduled: Any, lengths: Any) -> Any:
        changes = {}
        for (req_id, num_new), length in zip(num_scheduled.items(), lengths, strict=True):
            changes |= schedule_step({req_id: num_new}, np.array([length]))
        return changes

    def evict_each(step: Any) -> None:
        for due in step:
            evict_due([due])

    layer.schedule_step = schedule_each  # type: ignore[method-assign]
    layer.evict_due = evict_each  # type: ignore[method-assign]


@pytest.mark.parametrize("policy", ["random", "streaming_llm"])
@pytest.mark.parametrize("seed", range(2))
def test_all_at_once_equals_one_by_one(policy: str, seed: int) -> None:
    """The same messages and the same F in every step, the same tables at the end."""
    together, alone = Simulation(Case(9, 160)), Simulation(Case(9, 160))
    one_by_one(alone)
    for simulation in (together, alone):
        simulation.layer.control.patch({"policy": policy})
    rng = random.Random(seed)
    for _ in range(300):
        plan = {req_id: rng.choice((0, 1, 1, 1, 1, 2, 20)) for req_id in together.requests}

        def num_new(request: SimulatedRequest, plan: dict[str, int] = plan) -> int:
            return plan[request.req_id] if request.num_computed_tokens < 700 else 0

        messages = [as_lists(simulation.step(num_new)) for simulation in (together, alone)]
        assert messages[0] == messages[1]
        for name in ("live_tokens", "retained_blocks", "waste_ratio"):
            assert getattr(together.layer.occupancy, name) == getattr(alone.layer.occupancy, name)
        if rng.random() < 0.02:
            together.layer.verification.check_all()
    assert state_of(together) == state_of(alone)
    together.layer.verification.check_all()
