"""Observes attention on a GPU: from captured queries, after the forward, before relocations.

Order within one step: ``begin`` arms the capture, the forward leaves the queries of the sampled
layers in it, ``forward_done`` queues the scores, then relocations are queued, and ``end``
reports. Everything stays on the device and on its compute stream; only a report of signals waits
for it, in steps in which a policy is due that needs them.

Requests are scored in parts, one after the other: a kernel per sampled layer, then the masses are
accumulated, and what a part took is free again. So a step takes :data:`WORK_BYTES` beside the
accumulators, whatever is observed in it, and a worker can keep that back from the KV cache.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from vtoken.gpu_scores.mass import ObservedQueries, Scorer
from vtoken.integration.vllm.cache_signals import WORK_BYTES
from vtoken.integration.vllm.observation_parts import (
    ColumnBytes,
    ObservedRequests,
    parts_by_queries,
)
from vtoken.integration.vllm.observer import ObservedMass, Observer
from vtoken.integration.vllm.query_capture import QueryCapture
from vtoken.integration.vllm.ranks import Ranks
from vtoken.integration.vllm.slot_rows import SlotRows
from vtoken.kv_pages import PagedKV
from vtoken.observation import ObservationSpec, Observe
from vtoken.signal_rows import bytes_per_column

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LogitScale:
    """How a layer scales its logits.

    Attributes:
        scale: factor, with that of a quantised cache.
        soft_cap: see :func:`vtoken.scores.attention_mass`.
    """

    scale: float
    soft_cap: float = 0.0


def column_bytes(num_heads: int) -> ColumnBytes:
    """What scoring a column takes on a device, for ``num_heads`` query heads of this rank.

    Per query the sum of the masses and the mass of a layer, or the copies in which ranks exchange
    it (float32: 16 bytes at most), and per head and tile of 64 columns four numbers; and once, in
    :meth:`SignalRows.add`, sums and two copies of a history.
    """
    return ColumnBytes(fixed=32, per_query=16 + -(-num_heads // 4))


def observation_bytes(signals: frozenset[str], num_rows: int, width: int, num_heads: int) -> int:
    """Most device memory that observing takes beside the captured queries.

    Args:
        signals: that a policy may ask for while the engine runs.
        num_rows, width: of the slot rows.
        num_heads: query heads of this rank.
    """
    if not signals:
        return 0
    work = max(WORK_BYTES, width * column_bytes(num_heads).of(1))
    return num_rows * width * bytes_per_column(signals) + work


class PagedObserver(Observer):
    """As :class:`Observer`; its sampled layers are those of the capture, from start to end."""

    def __init__(
        self,
        rows: SlotRows,
        layers: Mapping[str, PagedKV],
        capture: QueryCapture,
        scales: Mapping[str, LogitScale],
        scorer: Scorer,
        ranks: Ranks | None = None,
    ) -> None:
        """Start without a specification: nothing is observed.

        Args:
            rows: the worker's slot rows, of canonical slots, on the device.
            layers: the cache by layer name, in the order of the model.
            capture: buffers of the sampled layers.
            scales: of the sampled layers.
            scorer: computes masses.
            ranks: that hold the other heads; None: this worker has all of them.
        """
        super().__init__(rows, cast(Any, layers), ranks)
        self._capture = capture
        self._scales = scales
        self._scorer = scorer
        self._parts: list[ObservedRequests] = []

    def begin(
        self, observe: Mapping[str, Observe], req_ids: Sequence[str], num_new: NDArray[np.int32]
    ) -> None:
        """See :meth:`Observer.begin`."""
        self._parts = []
        if observe and self._signals.signals:
            requests = self._observed(observe, req_ids, num_new)
            num_heads = next(iter(self._capture.queries.values())).shape[1]
            self._parts = parts_by_queries(requests, column_bytes(num_heads), WORK_BYTES)
        self._capture.wanted = bool(self._parts)

    def forward_done(self) -> None:
        """Queue the scores of this step's queries on the compute stream."""
        parts, self._parts = self._parts, []
        self._capture.wanted = False
        for requests in parts:
            self._accumulate([self._score(requests)])

    def _score(self, requests: ObservedRequests) -> ObservedMass:
        back = np.arange(int(requests.num_queries[0]))[::-1]
        lens = torch.from_numpy(requests.lens[:, None] - back)
        rows = torch.from_numpy(requests.rows)
        device = self._rows.table.device
        places = torch.from_numpy(requests.ends[:, None] - 1 - back)
        observed = ObservedQueries(
            places=places.to(device, non_blocking=True),
            table=self._rows.table,
            rows=rows.to(device, non_blocking=True),
            lens=lens.to(device, non_blocking=True),
            width=int(requests.lens.max()),
        )
        in_prefill = torch.from_numpy(requests.in_prefill)
        return ObservedMass(rows=rows, lens=lens, in_prefill=in_prefill, mass=self._mass(observed))

    def _mass(self, observed: ObservedQueries) -> torch.Tensor:
        """Summed over the sampled layers, of which never more than one is held beside the sum."""
        first, *others = self._capture.queries
        total = self._mass_in(first, observed)
        for name in others:
            total.add_(self._mass_in(name, observed))
        return total

    def _mass_in(self, name: str, observed: ObservedQueries) -> torch.Tensor:
        scale, cache = self._scales[name], cast(PagedKV, self._layers[name])
        query = self._capture.queries[name]
        return self._scorer(query, cache, observed, scale.scale, scale.soft_cap)

    def configure(self, spec: ObservationSpec | None) -> None:
        """See :meth:`Observer.configure`; logs a choice of layers that is not the capture's."""
        super().configure(spec)
        captured = {name: self._layers[name] for name in self._capture.queries}
        if captured.keys() != self._sampled.keys():
            logger.warning(
                "score_layers cannot change on GPUs while the engine runs: still %s",
                ", ".join(captured),
            )
        self._sampled = captured

    def _keys(self, view: Any, slots: torch.Tensor) -> torch.Tensor:
        return self._gathered(view.key, view.locate(slots))

    def _values(self, view: Any, slots: torch.Tensor) -> torch.Tensor:
        return self._gathered(view.value, view.locate(slots))

    @staticmethod
    def _gathered(numbers: torch.Tensor, place: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        blocks, offsets = place
        return numbers[blocks, :, offsets].transpose(0, 1)
