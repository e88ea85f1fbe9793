"""The paged observer reports what the CPU's observer does, step by step; scores precede copies."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
import torch

from tests.integration import test_observer
from tests.integration.peak_memory import PeakMemory
from vtoken.gpu_scores.mass import mass_by_index
from vtoken.integration.vllm import observer_gpu
from vtoken.integration.vllm.device_rows import DeviceSlotRows
from vtoken.integration.vllm.gpu_core import TokenPages
from vtoken.integration.vllm.observer import Observer
from vtoken.integration.vllm.observer_gpu import (
    LogitScale,
    PagedObserver,
    column_bytes,
    observation_bytes,
)
from vtoken.integration.vllm.query_capture import QueryCapture
from vtoken.integration.vllm.ranks import TensorParallelRanks
from vtoken.integration.vllm.slot_rows import SlotRows
from vtoken.kv_pages import PagedKV
from vtoken.observation import ATTENTION_SUM, KEY_NORM, SIGNALS, ObservationSpec, Observe

LAYERS, SAMPLED = test_observer.LAYERS, test_observer.SAMPLED
SIZE, DIM, HEADS = test_observer.SIZE, test_observer.DIM, test_observer.HEADS
SCALES = {LAYERS[i]: LogitScale(test_observer.SCALE) for i in SAMPLED}
CPU = torch.device("cpu")


def make_capture(num_tokens: int = 64) -> QueryCapture:
    """Of the sampled layers."""
    names = [LAYERS[i] for i in SAMPLED]
    return QueryCapture(names, (num_tokens, HEADS, DIM), torch.float32, CPU)


class TwinRows(SlotRows):
    """Rows of the CPU, and beside them those of the device."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.twin = DeviceSlotRows(len(self.table), 80, TokenPages(SIZE), CPU)

    def set_row(self, req_id: str, slots: Any) -> None:
        super().set_row(req_id, slots)
        self.twin.set_row(req_id, slots)

    def drop_columns(self, dropped: Any) -> None:
        super().drop_columns(dropped)
        self.twin.drop_columns(dropped)

    def drop(self, req_ids: Any) -> None:
        super().drop(req_ids)
        self.twin.drop(req_ids)

    def append(self, rows: Any, num_new: Any, write_slots: Any) -> None:
        super().append(rows, num_new, write_slots)
        self.twin.append(rows, num_new, torch.from_numpy(write_slots))


class TwinObserver(Observer):
    """Observes through both, compares their reports, and returns one of them."""

    def __init__(self, rows: TwinRows, views: Any) -> None:
        super().__init__(rows, views)
        self.views = views
        num_slots = views[LAYERS[0]].num_slots
        shape = (len(LAYERS), num_slots, test_observer.KV_HEADS, 1, 2 * DIM)
        self.caches = torch.zeros(shape)
        paged = {n: PagedKV.from_cache(c) for n, c in zip(LAYERS, self.caches, strict=True)}
        self.capture = make_capture()
        self.twin = PagedObserver(rows.twin, paged, self.capture, SCALES, mass_by_index)
        self.num_compared = 0

    def update_rows(self, message: Any, started: Any) -> None:
        super().update_rows(message, started)
        self.twin.update_rows(message, started)

    def begin(self, observe: Any, req_ids: Any, num_new: Any) -> None:
        super().begin(observe, req_ids, num_new)
        self.twin.begin(observe, req_ids, num_new)
        assert self.capture.wanted == (self.step is not None)
        if self.step is not None:
            self.step.observe = self._both(self.step.observe)

    def _both(self, observe: Any) -> Any:
        def both(name: str, query: Any, cache: Any, **kwargs: Any) -> None:
            observe(name, query, cache, **kwargs)
            self.capture.take(name, query)

        return both

    def end(self, wanted: Any, own: Any = {}) -> Any:  # noqa: B006
        kernel = next(iter(self.views.values())).geometry.kernel_slots
        slots = kernel(np.arange(self.caches.shape[1]))
        for cache, view in zip(self.caches, self.views.values(), strict=True):
            cache[:, :, 0] = torch.cat([view.key[slots], view.value[slots]], -1)
        self.twin.forward_done()
        assert not self.capture.wanted
        reports, twins = super().end(wanted, own), self.twin.end(wanted, own)
        assert reports.keys() == twins.keys()
        for req_id, report in reports.items():
            assert report.num_observed == twins[req_id].num_observed
            for name, values in report.values.items():
                self.num_compared += 1
                np.testing.assert_allclose(values, twins[req_id].values[name], atol=1e-5)
        return reports


@pytest.fixture
def twins(monkeypatch):
    """Let the CPU observer's tests drive both."""
    made = []

    def make(rows: Any, views: Any) -> TwinObserver:
        made.append(TwinObserver(rows, views))
        return made[-1]

    monkeypatch.setattr(test_observer, "SlotRows", TwinRows)
    monkeypatch.setattr(test_observer, "Observer", make)
    return made


def test_random_life_of_requests_gives_the_same_reports(twins):
    """All signals, through chunks, decodes, evictions, moves, reordering and reused rows."""
    test_observer.test_observer_follows_a_random_life_of_requests()
    assert twins[0].num_compared > 500


def test_signals_that_come_and_go_give_the_same_reports(twins):
    """Signals that join or leave while requests run."""
    test_observer.test_a_signal_that_joins_starts_from_zero()
    test_observer.test_a_signal_that_leaves_takes_no_other_along()
    assert all(twin.num_compared for twin in twins)


def make_observer(scorer: Any = mass_by_index) -> tuple[PagedObserver, DeviceSlotRows]:
    """An observer of one request with three tokens in slots 5, 6 and 7."""
    rows = DeviceSlotRows(2, 16, TokenPages(SIZE), CPU)
    caches = torch.randn(len(LAYERS), 32, test_observer.KV_HEADS, 1, 2 * DIM)
    paged = {n: PagedKV.from_cache(c) for n, c in zip(LAYERS, caches, strict=True)}
    observer = PagedObserver(rows, paged, make_capture(), SCALES, scorer)
    rows.set_row("a", np.array([5, 6], np.int32))
    rows.append(rows.rows(["a"]), np.array([1], np.int32), torch.tensor([7]))
    observer.configure(ObservationSpec(SIGNALS, SAMPLED))
    return observer, rows


def test_scores_are_queued_before_the_relocations_of_the_step():
    """By ``forward_done``, which the worker core calls first; ``end`` queues none."""
    calls = []

    def scorer(*args: Any) -> torch.Tensor:
        calls.append("score")
        return mass_by_index(*args)

    observer, _ = make_observer(scorer)
    observer.begin({"a": Observe(1, False)}, ["a"], np.array([1], np.int32))
    observer.forward_done()
    assert calls == ["score"] * len(SAMPLED)
    observer.end(())
    observer.forward_done()
    assert calls == ["score"] * len(SAMPLED)


def make_crowd(lens: list[int], scorer: Any) -> PagedObserver:
    """An observer of requests ``r0``, ``r1``, … with so many live tokens, in a tiny cache."""
    rows = DeviceSlotRows(len(lens), max(lens), TokenPages(SIZE), CPU)
    caches = torch.randn(len(LAYERS), 64, test_observer.KV_HEADS, 1, 2 * DIM)
    paged = {n: PagedKV.from_cache(c) for n, c in zip(LAYERS, caches, strict=True)}
    observer = PagedObserver(rows, paged, make_capture(len(lens)), SCALES, scorer)
    for i, length in enumerate(lens):
        rows.set_row(f"r{i}", np.arange(length - 1, dtype=np.int32) % 64)
    observer.configure(ObservationSpec(SIGNALS, SAMPLED))
    num_new = np.ones(len(lens), np.int32)
    names = [f"r{i}" for i in range(len(lens))]
    rows.append(rows.rows(names), num_new, torch.zeros(len(lens), dtype=torch.int64))
    observer.begin(dict.fromkeys(names, Observe(1, False)), names, num_new)
    return observer


def test_one_long_request_does_not_stretch_many_short_ones(monkeypatch):
    """A part stays below the limit, with everything that is alive at once."""
    limit = 600_000
    monkeypatch.setattr(observer_gpu, "WORK_BYTES", limit)
    shapes = []

    def scorer(*args: Any) -> torch.Tensor:
        observed = args[2]
        shapes.append((*observed.lens.shape, observed.width))
        return torch.ones(shapes[-1])

    observer = make_crowd([9] * 40 + [10_000] + [12] * 39, scorer)
    with PeakMemory() as peak:
        observer.forward_done()
    assert set(shapes) == {(79, 1, 12), (1, 1, 10_000)}
    assert len(shapes) == 2 * len(SAMPLED)
    assert limit / 3 < peak.num_bytes < limit


def test_a_window_above_the_limit_gives_the_same_scores(twins, monkeypatch):
    """Its queries are scored in pieces; the CPU's twin sees them at once."""
    monkeypatch.setattr(observer_gpu, "WORK_BYTES", 400)
    test_observer.test_observer_follows_a_random_life_of_requests()
    assert twins[0].num_compared > 500


class Neighbour:
    """vLLM's coordinator of a group of two: what the other rank sent, in order, is known."""

    world_size = 2

    def __init__(self, others: list[torch.Tensor] | None = None) -> None:
        self.others, self.sent = others, []

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        self.sent.append(tensor.clone())
        other = tensor if self.others is None else self.others[len(self.sent) - 1]
        return tensor + other


def reports_of(kv_heads: slice, group: Neighbour | None = None) -> dict[str, Any]:
    """What a rank with these KV heads reports of one step of three requests."""
    torch.manual_seed(5)
    shape = (len(LAYERS), 3, test_observer.KV_HEADS, HEADS // test_observer.KV_HEADS, DIM)
    query = torch.randn(shape)[:, :, kv_heads].flatten(2, 3)
    caches = torch.randn(len(LAYERS), 64, test_observer.KV_HEADS, 1, 2 * DIM)[:, :, kv_heads]
    paged = {n: PagedKV.from_cache(c) for n, c in zip(LAYERS, caches, strict=True)}
    capture = QueryCapture(SCALES, query.shape[1:], torch.float32, CPU)
    rows = DeviceSlotRows(3, 40, TokenPages(SIZE), CPU)
    ranks = None if group is None else TensorParallelRanks(group)
    observer = PagedObserver(rows, paged, capture, SCALES, mass_by_index, ranks)
    observer.configure(ObservationSpec(SIGNALS, SAMPLED))
    names, num_new = ["a", "b", "c"], np.ones(3, np.int32)
    for name, length in zip(names, (9, 30, 11), strict=True):
        rows.set_row(name, np.arange(length, dtype=np.int32) * 2)
    rows.append(rows.rows(names), num_new, torch.tensor([61, 62, 63]))
    observer.begin(dict.fromkeys(names, Observe(1, True)), names, num_new)
    for i in SAMPLED:
        capture.take(LAYERS[i], query[i])
    observer.forward_done()
    return observer.end(names)


def test_ranks_exchange_each_part_and_report_the_mean_over_all_heads(monkeypatch):
    """Two parts and the signals of three requests; what is sent is not changed afterwards."""
    monkeypatch.setattr(observer_gpu, "WORK_BYTES", 2 * 12 * column_bytes(HEADS).of(1))
    first = Neighbour()
    reports_of(slice(0, 1), first)
    assert [len(flat) for flat in first.sent[:2]] == [2 * 12, 31]
    second = Neighbour(first.sent)
    reports = reports_of(slice(1, 2), second)
    assert [len(flat) for flat in second.sent] == [len(flat) for flat in first.sent]
    for name, whole in reports_of(slice(None)).items():
        assert reports[name].num_observed == whole.num_observed
        for signal, values in whole.values.items():
            np.testing.assert_allclose(reports[name].values[signal], values, atol=1e-6)


def test_observation_takes_more_the_more_is_observed():
    """Accumulators of each signal, and the work, unless nothing is ever observed."""
    rows, width = 4, 100
    none, key, one, all_of_them = (
        observation_bytes(frozenset(signals), rows, width, HEADS)
        for signals in ((), {KEY_NORM}, {KEY_NORM, ATTENTION_SUM}, SIGNALS)
    )
    assert (none, key) == (0, observer_gpu.WORK_BYTES)
    assert one - key == rows * width * 4
    assert all_of_them - key == rows * width * 20


def test_a_single_query_over_a_huge_row_is_kept_back_as_it_is():
    """It cannot be cut."""
    width = observer_gpu.WORK_BYTES // 8
    found = observation_bytes(frozenset({KEY_NORM}), 1, width, HEADS)
    assert found == width * column_bytes(HEADS).of(1) > observer_gpu.WORK_BYTES


def test_unobserved_steps_arm_nothing_and_queue_nothing():
    """The layers' copies are skipped, no kernel runs."""
    observer, _ = make_observer(lambda *args: pytest.fail("was scored"))
    observer.begin({}, ["a"], np.array([1], np.int32))
    assert not observer._capture.wanted
    observer.forward_done()
    assert observer.end(()) == {}


def test_sampled_layers_stay_those_of_the_capture(caplog):
    """Graphs were captured with them: another choice is logged, not obeyed."""
    observer, _ = make_observer()
    with caplog.at_level(logging.WARNING):
        observer.configure(ObservationSpec(SIGNALS, (1,)))
    assert list(observer._sampled) == [LAYERS[i] for i in SAMPLED]
    assert "score_layers cannot change on GPUs" in caplog.text
