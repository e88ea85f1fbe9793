"""The worker core: order of joins, reports that do not depend on timing, verification."""

import dataclasses

import numpy as np
import pytest
import torch

from vtoken.copy_engine.base import CopyEngine
from vtoken.copy_engine.cpu import CpuCopyEngine
from vtoken.errors import TokenTableError
from vtoken.integration.vllm.messages import EMPTY_ROW, RelocationBatch, StepMessage
from vtoken.integration.vllm.slot_rows import SlotRows
from vtoken.integration.vllm.worker_core import WorkerCore, moved_row
from vtoken.kv_pool import KVPool
from vtoken.kv_view import SplitKV
from vtoken.types import CopyResult

BLOCKS, HEADS, SIZE, DIM = 12, 2, 4, 8


def slots(*numbers):
    return np.array(numbers, np.int32)


def make_batch(ticket=1, src=(1, 2), dst=(20, 21), req_ids=("a",), bounds=(0, 2), **flags):
    return RelocationBatch(ticket, req_ids, bounds, slots(*src), slots(*dst), **flags)


class LazyEngine(CopyEngine):
    """Copies nothing until it is waited for, so that a missing wait is visible."""

    def __init__(self, pool):
        super().__init__(pool.num_slots)
        self.pool, self.todo, self.results, self.broken = pool, [], [], False

    def _start(self, ticket, src_slots, dst_slots):
        self.todo.append((ticket, src_slots, dst_slots))

    def wait_before_read(self):
        for ticket, src, dst in self.todo:
            if not self.broken:
                self.pool.copy(*(torch.from_numpy(s.astype(np.int64)) for s in (src, dst)))
            self.results.append(CopyResult(ticket, None, 0.0, 0.0, 0))
        self.todo = []

    def poll(self):
        results, self.results = tuple(self.results), []
        return results

    def close(self):
        pass


@pytest.fixture
def pool():
    return KVPool([SplitKV.from_cache(x) for x in torch.randn(2, BLOCKS, HEADS, SIZE, 2 * DIM)])


def make_core(pool, engine=None, ranks=None):
    from vtoken.kv_view import SlotGeometry

    rows = SlotRows(4, 40, SlotGeometry(SIZE, HEADS, DIM))
    return WorkerCore(rows, engine or LazyEngine(pool), pool, ranks=ranks)


def run_step(core, message=None, req_ids=(), num_new=(), write=(), ended=(), new=(), join=False):
    """One step as the runner drives it; a step without requests has no forward."""
    core.begin_step(message or StepMessage(), join_now=join or not req_ids)
    core.update_rows(ended, new)
    result = None
    if req_ids:
        result = core.append(req_ids, np.array(num_new, np.int32), np.array(write, np.int64))
    core.after_forward()
    return result, core.report()


def start_request(core, req_id="a", num_tokens=6):
    message = StepMessage(rows={req_id: EMPTY_ROW})
    run_step(core, message, [req_id], [num_tokens], range(num_tokens), new=[req_id])


def test_append_returns_rows_and_lengths_in_batch_order(pool):
    """The attention gets the batch in the runner's order, new tokens counted."""
    core = make_core(pool)
    message = StepMessage(rows={"a": slots(5, 9), "b": EMPTY_ROW})
    (rows, lens), _ = run_step(core, message, ["b", "a"], [3, 1], [30, 31, 32, 10], new=["a", "b"])
    assert lens.tolist() == [3, 3]
    assert rows.tolist() == core.rows.rows(["b", "a"]).tolist()
    assert core.rows.canonical("a").tolist() == [5, 9, 10]


def test_new_or_resumed_request_without_row_is_refused(pool):
    """A stale row from before a preemption must not be mistaken for the new one."""
    core = make_core(pool)
    start_request(core)
    with pytest.raises(TokenTableError, match=r"1 new or resumed requests .* first 'a'"):
        run_step(core, StepMessage(), ["a"], [1], [7], new=["a"])


def test_id_that_ends_and_starts_in_one_step_gets_the_new_row(pool):
    """Aborted and submitted again under the same id: the new row wins."""
    core = make_core(pool)
    start_request(core)
    run_step(core, StepMessage(rows={"a": slots(40)}), ["a"], [1], [41], ended=["a"], new=["a"])
    assert core.rows.canonical("a").tolist() == [40, 41]


def test_relocation_is_reported_with_the_next_step(pool):
    """Plan of step N, report of step N + 1, exactly once."""
    core = make_core(pool)
    start_request(core)
    _, report = run_step(core, StepMessage(relocation=make_batch()), ["a"], [1], [6])
    assert report.copies == ()
    _, report = run_step(core, None, ["a"], [1], [7])
    assert [c.ticket for c in report.copies] == [1]
    _, report = run_step(core, None, ["a"], [1], [8])
    assert report.copies == ()


def test_report_does_not_depend_on_how_fast_a_copy_was(pool):
    """Even a copy that is done at once waits for the join of the next step."""
    core = make_core(pool, CpuCopyEngine(pool))
    start_request(core)
    _, report = run_step(core, StepMessage(relocation=make_batch()), ["a"], [1], [6])
    assert report.copies == ()
    _, report = run_step(core, None, ["a"], [1], [7])
    assert [c.error for c in report.copies] == [None]
    core.close()


def test_step_without_tokens_settles_what_is_outstanding(pool):
    """The engine drains: a 0-token step joins and reports."""
    core = make_core(pool)
    start_request(core)
    run_step(core, StepMessage(relocation=make_batch()), ["a"], [1], [6])
    _, report = run_step(core, ended=["a"])
    assert [c.ticket for c in report.copies] == [1]


def test_join_comes_before_blocks_are_rewritten(pool):
    """With join_now the copies are complete before the caller zeroes or copies blocks."""
    engine = LazyEngine(pool)
    core = make_core(pool, engine)
    start_request(core)
    run_step(core, StepMessage(relocation=make_batch()), ["a"], [1], [6])
    assert engine.todo
    core.begin_step(StepMessage(), join_now=True)
    assert not engine.todo


def test_refused_batch_fails_its_plan_and_nothing_else(pool):
    """A broken batch is reported in its turn as failed; the engine lives on."""
    core = make_core(pool)
    start_request(core)
    overlap = make_batch(ticket=4, src=(1, 2), dst=(2, 21))
    _, report = run_step(core, StepMessage(relocation=overlap), ["a"], [1], [6])
    assert report.copies == ()
    _, report = run_step(core, StepMessage(relocation=make_batch(ticket=5)), ["a"], [1], [7])
    (failed,) = report.copies
    assert failed.ticket == 4
    assert "source and destination at once" in failed.error
    _, report = run_step(core, None, ["a"], [1], [8])
    assert [(c.ticket, c.error) for c in report.copies] == [(5, None)]


@pytest.mark.parametrize(("verify_rows", "num_tokens"), [(False, 2), (True, 7)])
def test_verified_relocation_keeps_its_digest(pool, verify_rows, num_tokens):
    """I1 over moved tokens, or over the whole row with the moves applied."""
    core = make_core(pool)
    start_request(core)
    batch = make_batch(verify=True, verify_rows=verify_rows)
    run_step(core, StepMessage(relocation=batch), ["a"], [1], [6])
    _, report = run_step(core, None, ["a"], [1], [7])
    (check,) = report.verified
    assert (check.req_id, check.num_tokens) == ("a", num_tokens)
    assert check.digest_before == check.digest_after


def test_lost_copy_changes_the_digest(pool):
    """An engine that only pretends to copy is caught."""
    engine = LazyEngine(pool)
    engine.broken = True
    core = make_core(pool, engine)
    start_request(core)
    run_step(core, StepMessage(relocation=make_batch(verify=True)), ["a"], [1], [6])
    _, report = run_step(core, None, ["a"], [1], [7])
    assert report.verified[0].digest_before != report.verified[0].digest_after


def test_failed_copy_is_no_violation(pool):
    """Its destinations hold garbage, as every failed copy's: it is rolled back, not hashed."""

    class Failing(LazyEngine):
        def poll(self):
            return tuple(dataclasses.replace(r, error="boom") for r in super().poll())

    core = make_core(pool, Failing(pool))
    start_request(core)
    run_step(core, StepMessage(relocation=make_batch(verify=True)), ["a"], [1], [6])
    _, report = run_step(core, None, ["a"], [1], [7])
    assert [c.error for c in report.copies] == ["boom"]
    assert report.verified == ()


def test_relocation_of_an_aborted_request_still_settles(pool):
    """Abort between plan and report: the copy is joined and verified all the same."""
    core = make_core(pool)
    start_request(core)
    batch = make_batch(verify=True, verify_rows=True)
    run_step(core, StepMessage(relocation=batch), ["a"], [1], [6])
    _, report = run_step(core, ended=["a"])
    assert [c.ticket for c in report.copies] == [1]
    assert report.verified[0].digest_before == report.verified[0].digest_after
    assert "a" not in core.rows


def test_report_rows_names_the_rows_of_this_step(pool):
    """Only scheduled requests, new tokens included, canonical slots."""
    core = make_core(pool)
    start_request(core, "a", 3)
    message = StepMessage(rows={"b": slots(30)}, report_rows=True)
    _, report = run_step(core, message, ["b"], [1], [31], new=["b"])
    assert {req_id: row.tolist() for req_id, row in report.rows.items()} == {"b": [30, 31]}
    _, report = run_step(core, StepMessage(report_rows=True))
    assert report.rows == {}


def test_moved_row_keeps_the_logical_order():
    """Destinations take the places of their sources."""
    assert moved_row(slots(9, 3, 7, 1), slots(7, 9), slots(40, 41)).tolist() == [41, 3, 40, 1]


@pytest.mark.parametrize("row", [(), (1, 2)])
def test_moving_a_token_that_is_not_live_is_an_error(row):
    """A plan that names a dead or foreign slot does not match the row."""
    with pytest.raises(TokenTableError, match="not in the row"):
        moved_row(slots(*row), slots(9), slots(40))


class CountingRanks:
    """Two ranks that agree, and how often they exchanged reports."""

    def __init__(self):
        self.num_gathers = 0

    def gather(self, report):
        self.num_gathers += 1
        return [report, report]


def test_ranks_exchange_reports_only_when_there_are_results(pool):
    """A step without a joined batch costs no communication; one with a batch, one exchange."""
    ranks = CountingRanks()
    core = make_core(pool, ranks=ranks)
    start_request(core)
    run_step(core, StepMessage(relocation=make_batch()), ["a"], [1], [6])
    assert ranks.num_gathers == 0
    _, report = run_step(core, None, ["a"], [1], [7])
    assert ranks.num_gathers == 1
    assert [copy.ticket for copy in report.copies] == [1]
    run_step(core, None, ["a"], [1], [8])
    assert ranks.num_gathers == 1
