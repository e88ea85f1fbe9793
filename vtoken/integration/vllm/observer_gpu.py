"""Observes attention on a GPU: from captured queries, after the forward, before relocations.

Order within one step: ``begin`` arms the capture, the forward leaves the queries of the sampled
layers in it, ``forward_done`` queues a kernel per layer and group of requests, then the step's
relocations are queued, and ``end`` accumulates. Everything stays on the device and on its compute
stream; only a report of signals waits for it, in steps in which a policy is due that needs them.
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
from vtoken.integration.vllm.observer import ObservedRequests, Observer, parts_by_queries
from vtoken.integration.vllm.query_capture import QueryCapture
from vtoken.integration.vllm.ranks import Ranks
from vtoken.integration.vllm.slot_rows import SlotRows
from vtoken.kv_pages import PagedKV
from vtoken.observation import ObservationSpec, Observe

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


@dataclass(frozen=True, eq=False)
class _Group:
    """Scored requests: where they are, and their mass over the sampled layers."""

    rows: torch.Tensor
    lens: torch.Tensor
    in_prefill: torch.Tensor
    mass: torch.Tensor


@dataclass(frozen=True, eq=False)
class _Scored:
    """A step's groups, as :meth:`Observer.end` reads them."""

    groups: Sequence[_Group]


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
        self._pending: list[ObservedRequests] = []

    def begin(
        self, observe: Mapping[str, Observe], req_ids: Sequence[str], num_new: NDArray[np.int32]
    ) -> None:
        """See :meth:`Observer.begin`."""
        self.step = None
        self._pending = []
        if observe and self._signals.signals:
            requests = self._observed(observe, req_ids, num_new)
            self._pending = parts_by_queries(requests)
        self._capture.wanted = bool(self._pending)

    def forward_done(self) -> None:
        """Queue the scores of this step's queries on the compute stream."""
        pending, self._pending = self._pending, []
        self._capture.wanted = False
        if pending:
            self.step = cast(Any, _Scored([self._score(requests) for requests in pending]))

    def _score(self, requests: ObservedRequests) -> _Group:
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
        masses = []
        for name, query in self._capture.queries.items():
            scale, cache = self._scales[name], cast(PagedKV, self._layers[name])
            masses.append(self._scorer(query, cache, observed, scale.scale, scale.soft_cap))
        mass = torch.stack(masses).sum(0)
        return _Group(rows, lens, torch.from_numpy(requests.in_prefill), mass)

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

    def _gather(self, view: Any, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        blocks, offsets = view.locate(slots.to(view.cache.device))
        key, value = view.key[blocks, :, offsets], view.value[blocks, :, offsets]
        return key.transpose(0, 1), value.transpose(0, 1)
