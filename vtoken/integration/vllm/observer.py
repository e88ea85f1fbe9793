"""Observes attention in the worker: queries of sampled layers over live slots.

Order within one step: ``update_rows`` after the slot rows were set, ``begin`` once the batch is
known, then each sampled layer calls ``step.observe`` from its forward, and ``end`` accumulates.
Without a policy that needs scores there are no buffers, and ``step`` is None.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from vtoken.integration.vllm.cache_signals import cache_signals
from vtoken.integration.vllm.messages import SignalReport, StepMessage
from vtoken.integration.vllm.observation_parts import ObservedRequests, packed
from vtoken.integration.vllm.ranks import OneRank, Ranks
from vtoken.integration.vllm.slot_rows import SlotRows
from vtoken.kv_view import SlotGeometry, SplitKV
from vtoken.observation import ATTENTION_SIGNALS, ObservationSpec, Observe
from vtoken.scores import attention_mass
from vtoken.signal_rows import SignalRows

NUM_DEFAULT_LAYERS = 4

_GATHER_BYTES = 64 * 2**20
"""Most bytes that the gathered keys of one group of decodes may take, as float32."""


class LayerObserver(Protocol):
    """What an attention layer tells about its queries."""

    def observe(
        self,
        layer_name: str,
        query: torch.Tensor,
        cache: SplitKV,
        *,
        scale: float,
        soft_cap: float,
    ) -> None:
        """``query`` ``[num_tokens, num_heads, head_size]`` of this step; K is in the cache."""
        ...  # pragma: no cover


def default_layers(num_layers: int) -> tuple[int, ...]:
    """Up to four layers, evenly spread, without the ends: 30 layers give 3, 11, 18, 26."""
    num = min(NUM_DEFAULT_LAYERS, num_layers)
    return tuple((2 * i + 1) * num_layers // (2 * num) for i in range(num))


class Observer:
    """Signals of all requests of one worker.

    Attributes:
        step: where sampled layers report in this step; None if nothing is observed in it.
    """

    def __init__(
        self, rows: SlotRows, layers: Mapping[str, SplitKV], ranks: Ranks | None = None
    ) -> None:
        """Start without a specification: nothing is observed.

        Args:
            rows: the worker's slot rows.
            layers: views of the cache by layer name, in the order of the model.
            ranks: that hold the other heads; None: this worker has all of them.
        """
        self.step: StepObserver | None = None
        self._ranks = ranks or OneRank()
        self._rows = rows
        self._layers = layers
        self._spec: ObservationSpec | None = None
        self._signals = SignalRows(frozenset(), 0, 0)
        self._sampled: dict[str, SplitKV] = {}

    def update_rows(self, message: StepMessage, started: Iterable[str]) -> None:
        """Follow the rows of the message: drop what died, clear what starts."""
        if message.observation != self._spec:
            self.configure(message.observation)
        if not self._signals.signals:
            return
        for req_id in started:
            self._signals.clear(self._row(req_id))
        for req_id, columns in message.dropped.items():
            self._signals.drop(self._row(req_id), columns)

    def begin(
        self, observe: Mapping[str, Observe], req_ids: Sequence[str], num_new: NDArray[np.int32]
    ) -> None:
        """Prepare the step's observations; the new tokens are in the rows already.

        Args:
            observe: what to observe.
            req_ids, num_new: the batch, ``[num_reqs]``.
        """
        self.step = None
        if not observe or not self._signals.signals:
            return
        requests = self._observed(observe, req_ids, num_new)
        geometry = next(iter(self._sampled.values())).geometry
        groups = [
            make_group(geometry, self._rows.table, part) for part in _parts(requests, geometry)
        ]
        self.step = StepObserver(frozenset(self._sampled), groups)

    def _observed(
        self, observe: Mapping[str, Observe], req_ids: Sequence[str], num_new: NDArray[np.int32]
    ) -> ObservedRequests:
        """The observed requests of a batch, in its order."""
        places = [i for i, req_id in enumerate(req_ids) if req_id in observe]
        chosen = [req_ids[i] for i in places]
        ends = np.cumsum(num_new)[places]
        rows = self._rows.rows(chosen)
        return ObservedRequests(
            rows=rows,
            lens=self._rows.lens(rows),
            ends=ends.astype(np.int64),
            num_queries=np.array([observe[r].num_queries for r in chosen], np.int64),
            in_prefill=np.array([observe[r].in_prefill for r in chosen], np.bool_),
        )

    def forward_done(self) -> None:
        """Between the forward and the relocations of its step; see :class:`PagedObserver`."""

    def end(
        self, wanted: Iterable[str], own: Mapping[str, frozenset[str]] = MappingProxyType({})
    ) -> dict[str, SignalReport]:
        """After the forward: accumulate what was observed, and read out what is wanted.

        Args:
            wanted: requests to report.
            own: signals of those that need less than everything.
        """
        step, self.step = self.step, None
        if step is not None:
            self._accumulate(step.groups)
        if self._spec is None:
            return {}
        everything = self._spec.signals
        return {req_id: self._report(req_id, own.get(req_id, everything)) for req_id in wanted}

    def _accumulate(self, groups: Sequence[ObservedMass]) -> None:
        """Account for masses, summed over the sampled layers; they are overwritten."""
        # Before anything nonlinear (the history compares with the mean mass) happens to them.
        masses = self._ranks.mean([group.mass for group in groups])
        for group, mass in zip(groups, masses, strict=True):
            mean = mass.div_(len(self._sampled))
            self._signals.add(group.rows, mean, group.lens, group.in_prefill)

    def configure(self, spec: ObservationSpec | None) -> None:
        """Keep buffers for these signals only.

        What was accumulated of a signal that stays is kept: policies of single requests come
        and go, and must not cost others their scores.
        """
        self._spec = spec
        signals = frozenset() if spec is None else spec.signals
        table, before = self._rows.table, self._signals
        num_rows, width = table.shape if signals & ATTENTION_SIGNALS else (0, 0)
        self._signals = SignalRows(signals, num_rows, width, table.device, before)
        names = list(self._layers)
        layers = (spec and spec.layers) or default_layers(len(names))
        self._sampled = {names[i]: self._layers[names[i]] for i in layers}

    def _row(self, req_id: str) -> int:
        return int(self._rows.rows([req_id])[0])

    def _report(self, req_id: str, names: frozenset[str]) -> SignalReport:
        row = self._row(req_id)
        length = int(self._rows.lens(np.array([row]))[0])
        accumulated = names & self._signals.signals
        values = dict(self._signals.read(row, length, accumulated))
        values |= self._cache_signals(req_id, names - ATTENTION_SIGNALS)
        observed = self._signals.observed(row, accumulated) if accumulated else length
        return SignalReport(observed, values)

    def _cache_signals(self, req_id: str, names: frozenset[str]) -> dict[str, NDArray[Any]]:
        """Signals that need nothing but K and V: mean over sampled layers and ranks."""
        if not names:
            return {}
        totals = dict.fromkeys(names, torch.zeros(()))
        slots = self._slots(req_id)
        for view in self._sampled.values():
            keys, values = partial(self._keys, view), partial(self._values, view)
            numbers = view.key.shape[1] * view.key.shape[-1]
            for name, signal in cache_signals(names, slots, keys, values, numbers).items():
                totals[name] = totals[name] + signal
        means = self._ranks.mean([totals[name] / len(self._sampled) for name in sorted(totals)])
        return {name: mean.cpu().numpy() for name, mean in zip(sorted(totals), means, strict=True)}

    def _slots(self, req_id: str) -> torch.Tensor:
        """Canonical slots of the live tokens, int64 ``[n]``, where the cache is."""
        slots = self._rows.canonical(req_id).astype(np.int64)
        return torch.from_numpy(slots).to(self._rows.table.device)

    def _keys(self, view: Any, slots: torch.Tensor) -> torch.Tensor:
        """Keys of ``slots``, ``[num_kv_heads, n, head_size]``."""
        keys: torch.Tensor = view.rows[_head_rows(view, slots)]
        return keys

    def _values(self, view: Any, slots: torch.Tensor) -> torch.Tensor:
        """Values of ``slots``, shaped likewise."""
        values: torch.Tensor = view.rows[_head_rows(view, slots) + view.geometry.block_size]
        return values


def _head_rows(view: SplitKV, slots: torch.Tensor) -> torch.Tensor:
    """Rows of the keys, ``[num_kv_heads, n]``."""
    return view.geometry.key_rows(slots).view(len(slots), -1).T


def _parts(requests: ObservedRequests, geometry: SlotGeometry) -> list[ObservedRequests]:
    """Single queries together, as far as their padded keys fit; longer windows one by one."""
    single = np.flatnonzero(requests.num_queries == 1)
    parts = [requests.take(np.array([i])) for i in np.flatnonzero(requests.num_queries > 1)]
    per_token = geometry.num_kv_heads * geometry.head_size * 4
    together = packed(requests.lens[single], per_token, _GATHER_BYTES)
    return parts + [requests.take(single[index]) for index in together]


@dataclass(frozen=True, eq=False, kw_only=True)
class ObservedMass:
    """Requests with equally many observed queries, padded to the longest.

    Attributes:
        rows: int64 ``[n]`` slot rows, on the host as the next two.
        lens: int64 ``[n, q]`` live tokens that each query reads.
        in_prefill: bool ``[n]``.
        mass: float32 ``[n, q, width]``, summed over the sampled layers.
    """

    rows: torch.Tensor
    lens: torch.Tensor
    in_prefill: torch.Tensor
    mass: torch.Tensor


@dataclass(frozen=True, eq=False, kw_only=True)
class QueryGroup(ObservedMass):
    """A group whose mass the sampled layers write.

    Attributes:
        queries: int64 ``[n * q]`` places among the step's tokens.
        key_rows: int64 ``[n * num_kv_heads * width]`` rows of the cache's ``[rows, D]`` view.
    """

    queries: torch.Tensor
    key_rows: torch.Tensor


def make_group(
    geometry: SlotGeometry, table: torch.Tensor, requests: ObservedRequests
) -> QueryGroup:
    """Index tensors of one group, shared by all sampled layers."""
    num_queries, width = int(requests.num_queries[0]), int(requests.lens.max())
    back = np.arange(num_queries)[::-1]  # query j comes before so many of its request
    lens = torch.from_numpy(requests.lens[:, None] - back)
    rows = torch.from_numpy(requests.rows)
    slots = table[rows, :width].long()  # behind a row's end: stale, and masked by ``lens``
    heads = torch.arange(geometry.num_kv_heads) * (2 * geometry.block_size)
    return QueryGroup(
        rows=rows,
        queries=torch.from_numpy((requests.ends[:, None] - 1 - back).reshape(-1)),
        lens=lens,
        key_rows=(slots[:, None, :] + heads[:, None]).reshape(-1),
        in_prefill=torch.from_numpy(requests.in_prefill),
        mass=torch.zeros(len(rows), num_queries, width),
    )


class StepObserver:
    """Takes the queries of the sampled layers in one step."""

    def __init__(self, layers: frozenset[str], groups: Sequence[QueryGroup]) -> None:
        self.groups = groups
        self._layers = layers

    def observe(
        self,
        layer_name: str,
        query: torch.Tensor,
        cache: SplitKV,
        *,
        scale: float,
        soft_cap: float,
    ) -> None:
        """See :meth:`LayerObserver.observe`; layers that are not sampled are ignored."""
        if layer_name not in self._layers:
            return
        geometry = cache.geometry
        for group in self.groups:
            n, num_queries, width = group.mass.shape
            key = cache.rows.index_select(0, group.key_rows)
            mass = attention_mass(
                query.index_select(0, group.queries).view(n, num_queries, -1, geometry.head_size),
                key.view(n, geometry.num_kv_heads, width, geometry.head_size),
                group.lens,
                scale=scale,
                soft_cap=soft_cap,
            )
            group.mass.add_(mass)
