"""The observer against a model that keeps every score by token, in float64."""

from __future__ import annotations

import random
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch

from tests.test_scores import reference_mass
from vtoken.integration.vllm.messages import StepMessage
from vtoken.integration.vllm.observer import Observer, default_layers
from vtoken.integration.vllm.slot_rows import SlotRows
from vtoken.kv_view import SplitKV
from vtoken.observation import SIGNALS, ObservationSpec, Observe

BLOCKS, SIZE, DIM, HEADS, KV_HEADS = 60, 4, 8, 6, 2
LAYERS = ("l0", "l1", "l2")
SAMPLED = (0, 2)
SPEC = ObservationSpec(SIGNALS, SAMPLED)
SCALE = 0.5


class Worker:
    """Slot rows and an observer over random caches, driven as the worker core drives them.

    Attributes:
        tokens: per request the (slot, score state) of its live tokens, in order.
    """

    def __init__(self, spec: ObservationSpec | None = SPEC) -> None:
        torch.manual_seed(3)
        caches = torch.randn(len(LAYERS), BLOCKS, KV_HEADS, SIZE, 2 * DIM)
        caches[:, 0] = float("nan")  # stale columns lead here
        self.views = dict(zip(LAYERS, map(SplitKV.from_cache, caches), strict=True))
        geometry = self.views["l0"].geometry
        self.rows = SlotRows(4, 80, geometry)
        self.observer = Observer(self.rows, self.views)
        self.spec = spec
        self.tokens: dict[str, list[dict[str, Any]]] = {}
        self.dropped: dict[str, list[int]] = {}
        self.moved: set[str] = set()
        self.free = list(range(SIZE, BLOCKS * SIZE))
        random.Random(1).shuffle(self.free)

    def evict(self, req_id: str, columns: list[int]) -> None:
        """These columns die; the worker hears of it with the next step."""
        tokens = self.tokens[req_id]
        self.dropped[req_id] = sorted(columns)
        self.free += [tokens[c]["slot"] for c in columns]
        self.tokens[req_id] = [token for c, token in enumerate(tokens) if c not in columns]

    def move(self, req_id: str) -> None:
        """All tokens change place: a whole row, as after a relocation."""
        self.moved.add(req_id)
        for token in self.tokens[req_id]:
            new = self.free.pop()
            for view in self.views.values():
                view.key[self.kernel(new)] = view.key[self.kernel(token["slot"])]
                view.value[self.kernel(new)] = view.value[self.kernel(token["slot"])]
            self.free.append(token["slot"])
            token["slot"] = new

    def kernel(self, slot: int) -> int:
        """Its kernel slot."""
        return int(self.views["l0"].geometry.kernel_slots(np.array([slot]))[0])

    def step(
        self,
        batch: dict[str, int],
        observe: dict[str, Observe],
        *,
        ended: tuple[str, ...] = (),
        want: tuple[str, ...] = (),
        own: Mapping[str, frozenset[str]] = MappingProxyType({}),
    ) -> dict[str, Any]:
        """New tokens per request; returns the report and accounts for it in the model."""
        for req_id in ended:
            self.free += [token["slot"] for token in self.tokens.pop(req_id)]
        started = [req_id for req_id in batch if req_id not in self.tokens]
        whole = [*started, *(self.moved & batch.keys())]
        for req_id in started:
            self.tokens[req_id] = []
        message = StepMessage(
            rows={r: np.array([t["slot"] for t in self.tokens[r]], np.int32) for r in whole},
            observation=self.spec,
            dropped={r: np.array(self.dropped.pop(r)) for r in batch if r in self.dropped},
            observe=observe,
        )
        self.rows.drop(ended)
        for req_id, slots in message.rows.items():
            self.rows.set_row(req_id, slots)
        self.rows.drop_columns({r: c for r, c in message.dropped.items() if r not in whole})
        self.moved -= batch.keys()
        self.observer.update_rows(message, started)
        writes = [self.free.pop() for _ in range(sum(batch.values()))]
        num_new = np.array(list(batch.values()), np.int32)
        self.rows.append(self.rows.rows(list(batch)), num_new, np.array(writes, np.int64))
        fresh = iter(writes)
        for req_id, num in batch.items():
            new = [{"slot": next(fresh), "sum": 0.0, "prefill": 0.0, "last": 0.0, "history": 0}]
            new += [{**new[0], "slot": next(fresh)} for _ in range(num - 1)]
            self.tokens[req_id] += new
        self.observer.begin(observe, list(batch), num_new)
        query = torch.randn(len(LAYERS), len(writes), HEADS, DIM)
        if self.observer.step is not None:
            for name, q in zip(LAYERS, query, strict=True):
                self.observer.step.observe(name, q, self.views[name], scale=SCALE, soft_cap=0.0)
        self._account(batch, observe, query.numpy())
        return self.observer.end(want, own)

    def _account(
        self, batch: dict[str, int], observe: dict[str, Observe], query: np.ndarray
    ) -> None:
        ends = dict(zip(batch, np.cumsum(list(batch.values())), strict=True))
        for req_id, (num_queries, in_prefill) in observe.items():
            tokens = self.tokens[req_id]
            for back in range(num_queries)[::-1]:
                length = len(tokens) - back
                place = ends[req_id] - 1 - back
                masses = [self._mass(i, query[i, place], tokens[:length]) for i in SAMPLED]
                mass = np.mean(masses, axis=0)
                for token, m in zip(tokens, [*mass, *[0.0] * back], strict=True):
                    token["sum"] += m
                    token["prefill"] += m * in_prefill
                    token["last"] = m
                    token["history"] = (token["history"] << 1 | int(m > 1 / length)) % 2**64
            for token in tokens:
                token["seen"] = True
                if in_prefill:
                    token["seen in prefill"] = True

    def _mass(self, layer: int, query: np.ndarray, tokens: list[dict[str, Any]]) -> np.ndarray:
        view = self.views[LAYERS[layer]]
        key = view.key[[self.kernel(t["slot"]) for t in tokens]].numpy().transpose(1, 0, 2)
        return reference_mass(query, key, len(tokens), SCALE, 0.0)

    def check(self, report: dict[str, Any]) -> None:
        """Every reported value equals the model's."""
        for req_id, signals in report.items():
            tokens = self.tokens[req_id]
            seen = [sum(name in t for t in tokens) for name in ("seen", "seen in prefill")]
            assert signals.num_observed == min(seen)
            for name, key in (("sum", "sum"), ("prefill", "prefill"), ("last", "last")):
                expected = [t[key] for t in tokens]
                np.testing.assert_allclose(
                    signals.values[f"attention_{name}"], expected, atol=2e-5, err_msg=req_id
                )
            assert signals.values["attention_history"].tolist() == [t["history"] for t in tokens]


def test_observer_follows_a_random_life_of_requests() -> None:
    """Chunks, decodes, evictions, moves, reordering, ends and reused rows: scores stay right."""
    rng, worker = random.Random(7), Worker()
    num_checked = evicted = moved = 0
    for _ in range(160):
        names = [f"r{i}" for i in range(4)]
        rng.shuffle(names)
        ended = tuple(r for r in list(worker.tokens) if rng.random() < 0.03)
        batch: dict[str, int] = {}
        observe: dict[str, Observe] = {}
        for req_id in names:
            alive = req_id in worker.tokens and req_id not in ended
            if alive and len(worker.tokens[req_id]) > 12 and rng.random() < 0.4:
                columns = rng.sample(range(len(worker.tokens[req_id])), 5)
                if req_id not in worker.dropped:
                    worker.evict(req_id, columns)
                    evicted += 1
            if alive and rng.random() < 0.1:
                worker.move(req_id)
                moved += 1
            if rng.random() < 0.8:
                batch[req_id] = 1 if alive and rng.random() < 0.8 else rng.randint(1, 7)
                if rng.random() < 0.5:
                    observe[req_id] = Observe(rng.randint(1, batch[req_id]), rng.random() < 0.3)
        if not batch:
            continue
        for req_id in ended:
            worker.dropped.pop(req_id, None)
            worker.moved.discard(req_id)
        report = worker.step(batch, observe, ended=ended, want=tuple(batch))
        worker.check(report)
        num_checked += len(report)
    assert min(num_checked, evicted, moved) > 20, (num_checked, evicted, moved)


def test_without_a_specification_nothing_is_kept() -> None:
    """No step observer, no buffer, no report: the layers' None check is all that is left."""
    worker = Worker(spec=None)
    assert worker.step({"a": 5}, {}, want=("a",)) == {}
    assert worker.observer.step is None
    assert not worker.observer._signals._buffers


def test_key_signals_alone_need_no_buffers_and_count_as_observed() -> None:
    """Every live token has a key, the newest included."""
    worker = Worker(ObservationSpec(frozenset({"key_norm"}), SAMPLED))
    report = worker.step({"a": 5}, {}, want=("a",))["a"]
    assert not worker.observer._signals._buffers
    assert report.num_observed == 5
    slots = [worker.kernel(t["slot"]) for t in worker.tokens["a"]]
    norms = [worker.views[LAYERS[i]].key[slots].norm(dim=-1).mean(1) for i in SAMPLED]
    torch.testing.assert_close(torch.from_numpy(report.values["key_norm"]), sum(norms) / 2)


def test_a_signal_that_joins_starts_from_zero() -> None:
    """Another signal's observations are not mistaken for its own; the old one goes on."""
    old, new = frozenset({"attention_sum"}), frozenset({"attention_last"})
    worker = Worker(ObservationSpec(old, SAMPLED))
    worker.step({"a": 6}, {"a": Observe(2, True)})
    worker.spec = ObservationSpec(old | new, SAMPLED)
    for names, num_observed in ((old, 6), (new, 0), (old | new, 0)):
        report = worker.step({"a": 1}, {}, want=("a",), own={"a": names})["a"]
        assert (report.num_observed, report.values.keys()) == (num_observed, names)
        if names == new:
            assert not report.values["attention_last"].any()
    worker.step({"a": 1}, {"a": Observe(1, False)})
    worker.evict("a", [1, 4])
    report = worker.step({"a": 1}, {"a": Observe(1, False)}, want=("a",))["a"]
    assert report.num_observed == len(worker.tokens["a"])
    for name in ("sum", "last"):
        expected = [token[name] for token in worker.tokens["a"]]
        np.testing.assert_allclose(report.values["attention_" + name], expected, atol=1e-6)


def test_a_signal_that_leaves_takes_no_other_along() -> None:
    """Requests with a policy of their own come and go without cost to the others' scores."""
    worker = Worker(ObservationSpec(frozenset({"attention_sum", "key_norm"}), SAMPLED))
    worker.step({"a": 6}, {"a": Observe(2, True)})
    worker.spec = ObservationSpec(frozenset({"attention_sum"}), SAMPLED)
    worker.step({"a": 1}, {})
    worker.spec = ObservationSpec(frozenset({"attention_sum", "attention_history"}), SAMPLED)
    report = worker.step({"a": 1}, {}, want=("a",), own={"a": frozenset({"attention_sum"})})["a"]
    assert report.num_observed == 6
    expected = [token["sum"] for token in worker.tokens["a"]]
    np.testing.assert_allclose(report.values["attention_sum"], expected, atol=1e-6)


@pytest.mark.parametrize("num_layers", [1, 2, 3, 4, 5, 16, 30, 80])
def test_default_layers_are_distinct_and_exist(num_layers: int) -> None:
    """As many as the model has, at most four."""
    layers = default_layers(num_layers)
    assert len(set(layers)) == min(4, num_layers)
    assert set(layers) <= set(range(num_layers))
