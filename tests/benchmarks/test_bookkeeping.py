"""Bookkeeping at scale: the benchmark runs, work per step is bounded, deferral changes nothing."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.bookkeeping import PHASES, Case, SimulatedRequest, Simulation, main, measure
from tests.engine_model import EngineModel, drive
from vtoken.integration.vllm.messages import StepMessage
from vtoken.reclamation import MAX_PLANS_PER_STEP

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


def test_a_step_writes_few_tables() -> None:
    """Each request is written twice per block, evicted from and sent once per interval."""
    ops = operations(32, 1024)
    assert ops["evict_tokens"] == 32 / INTERVAL
    assert ops["sync_new_tokens"] <= 3 * 32 / INTERVAL
    assert ops["rows"] <= 32 / INTERVAL + ops["plans"]


def test_operations_grow_linearly_with_requests_and_not_with_length() -> None:
    """Twice the requests: at most twice the operations. Twice the length: no more."""
    base, more, longer = operations(32, 1024), operations(64, 1024), operations(32, 2048)
    for name in ("sync_new_tokens", "evict_tokens", "live_ids", "rows"):
        assert more[name] <= 2.1 * base[name], name
        assert longer[name] <= 1.1 * base[name], name


def test_a_plan_asks_the_pool_about_few_blocks() -> None:
    """References are looked up for the emptiest blocks only, however long the requests are."""
    simulation = Simulation(Case(8, 2048))
    asked: list[int] = []
    shared = simulation.pool.shared

    def counting(block_ids: np.ndarray) -> Any:
        asked.append(len(block_ids))
        return shared(block_ids)

    simulation.pool.shared = counting  # type: ignore[method-assign]
    simulation.layer.patch({"theta_f": 0.1})
    simulation.step()
    assert simulation.meter.operations["plans"] > 0
    assert max(asked) <= simulation.layer.config.max_source_blocks


def test_plans_of_one_step_are_bounded() -> None:
    """However many requests are wasteful, one step plans for some, and the next goes on."""
    simulation = Simulation(Case(MAX_PLANS_PER_STEP + 8, 1024))
    simulation.layer.patch({"theta_f": 0.1})
    seen: set[str] = set()
    for _ in range(2):
        batch = simulation.step().relocation
        assert batch is not None
        assert len(batch.req_ids) <= MAX_PLANS_PER_STEP
        seen.update(batch.req_ids)
    assert len(seen) == MAX_PLANS_PER_STEP + 8


# -- deferred against eager writing --------------------------------------------------------


def as_lists(message: StepMessage) -> list[Any]:
    """A message as comparable data."""
    rows = {req_id: row.tolist() for req_id, row in message.rows.items()}
    batch = message.relocation
    if batch is None:
        return [rows]
    return [rows, batch.req_ids, batch.src_slots.tolist(), batch.dst_slots.tolist()]


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


def write_all(simulation: Simulation) -> None:
    """What eager bookkeeping would have done."""
    for kv in simulation.layer.requests.values():
        kv.write_announced()


@pytest.mark.parametrize("seed", range(4))
def test_deferred_writing_equals_eager_writing(seed: int) -> None:
    """The same messages and the same F in every step, the same tables at the end."""
    deferred, eager = Simulation(Case(9, 160)), Simulation(Case(9, 160))
    rng = random.Random(seed)
    for _ in range(300):
        plan = {req_id: rng.choice((0, 1, 1, 1, 1, 2, 20)) for req_id in deferred.requests}

        def num_new(request: SimulatedRequest, plan: dict[str, int] = plan) -> int:
            return plan[request.req_id] if request.num_computed_tokens < 700 else 0

        messages = [as_lists(simulation.step(num_new)) for simulation in (deferred, eager)]
        assert messages[0] == messages[1]
        write_all(eager)
        for name in ("live_tokens", "retained_blocks", "waste_ratio"):
            assert getattr(deferred.layer.occupancy, name) == getattr(eager.layer.occupancy, name)
        if rng.random() < 0.02:
            deferred.layer.check_all()
    assert state_of(deferred) == state_of(eager)
    deferred.layer.check_all()


def test_waste_ratio_counts_tokens_that_are_not_written_yet() -> None:
    """F is exact while the table is behind, without anybody writing it."""
    simulation = Simulation(Case(4, 256))
    simulation.step()
    occupancy = simulation.layer.occupancy
    behind = [
        kv for kv in simulation.layer.requests.values() if kv.num_tokens > kv._table.num_tokens
    ]
    assert behind
    live = sum(kv.num_live for kv in simulation.layer.requests.values())
    assert occupancy.live_tokens == live
    before = occupancy.waste_ratio
    write_all(simulation)
    assert occupancy.waste_ratio == before
    assert live == sum(kv.table.num_live for kv in simulation.layer.requests.values())


class RarelyChecked(EngineModel):
    """Compares tables now and then only, since looking at a table writes it."""

    def check(self) -> None:
        """Every 97th change; contents that the worker reads are compared in every step."""
        if self.counts.operations % 97:
            self.counts.operations += 1
        else:
            super().check()


@pytest.mark.parametrize("seed", range(3))
def test_deferral_survives_everything_that_can_happen(seed: int) -> None:
    """Async steps, preemption, sharing, urgent plans: with tables behind for many steps."""
    model = RarelyChecked({"policy": "random", "seed": seed})
    drive(model, random.Random(seed), 12_000)
    assert model.counts.committed > 20
