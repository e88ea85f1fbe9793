"""Accumulators of attention signals, aligned with the worker's rows of live tokens.

Column ``c`` of a row belongs to the ``c``-th live token of the request in that row, as in the
table of slots. So one step adds to a contiguous range, a relocation changes nothing, and an
eviction drops the same columns that it drops from the slots::

    slots      k₀ k₁ k₂ k₃ … k_len   | stale
    signal     s₀ s₁ s₂ 0  … 0       | 0          observed = 3: later tokens were not seen yet

A signal may join while requests run: each has its own ``observed``.
Columns from ``observed`` on are zero, always: appended tokens start at zero without a write.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from vtoken.observation import (
    ATTENTION_HISTORY,
    ATTENTION_LAST,
    ATTENTION_PREFILL,
    ATTENTION_SIGNALS,
    ATTENTION_SUM,
)
from vtoken.types import IdArray


class SignalRows:
    """One ``[num_rows, width]`` tensor per attention signal; all start at zero.

    Attributes:
        signals: names of the signals kept.
    """

    def __init__(
        self,
        signals: frozenset[str],
        num_rows: int,
        width: int,
        device: torch.device | None = None,
        before: SignalRows | None = None,
    ) -> None:
        """Allocate what is not there yet.

        Args:
            signals: others than attention signals need no rows.
            num_rows, width: of every tensor.
            device: of every tensor.
            before: of the same shape: its signals go on, and its memory with them.
        """
        self.signals = signals & ATTENTION_SIGNALS
        self._buffers: dict[str, torch.Tensor] = {}
        self._observed: dict[str, NDArray[np.int64]] = {}
        for name in sorted(self.signals):
            if before is not None and name in before.signals:
                self._buffers[name] = before._buffers[name]
                self._observed[name] = before._observed[name]
            else:
                # zeros, not empty: pages that no request reaches are never touched
                buffer = torch.zeros(num_rows, width, dtype=_dtype(name), device=device)
                self._buffers[name] = buffer
                self._observed[name] = np.zeros(num_rows, np.int64)

    def clear(self, row: int) -> None:
        """A request starts in this row: forget what was observed there."""
        for name, buffer in self._buffers.items():
            buffer[row, : self._observed[name][row]] = 0
            self._observed[name][row] = 0

    def drop(self, row: int, columns: IdArray) -> None:
        """Drop these columns of a row (an eviction); the others keep their order.

        Args:
            row: to change.
            columns: ascending.
        """
        for name, buffer in self._buffers.items():
            end = int(self._observed[name][row])
            left = np.delete(np.arange(end), columns[: columns.searchsorted(end)])
            kept = torch.from_numpy(left).to(buffer.device, non_blocking=True)
            buffer[row, : len(left)] = buffer[row].index_select(0, kept)
            buffer[row, len(left) : end] = 0
            self._observed[name][row] = len(left)

    def add(
        self,
        rows: torch.Tensor,
        mass: torch.Tensor,
        lens: torch.Tensor,
        in_prefill: torch.Tensor,
    ) -> None:
        """Account for observed queries.

        Args:
            rows: int64 ``[n]`` on the host, distinct.
            mass: float32 ``[n, q, width]`` on the device, 0 from ``lens`` on.
            lens: int64 ``[n, q]`` on the host: live tokens that each query read, ascending in
                ``q``.
            in_prefill: bool ``[n]`` on the host.
        """
        where, until, prefilling = (
            tensor.to(mass.device, non_blocking=True) for tensor in (rows, lens, in_prefill)
        )
        for name, buffer in self._buffers.items():
            part = buffer[:, : mass.shape[2]]
            if name == ATTENTION_SUM:
                part.index_add_(0, where, mass.sum(1))
            elif name == ATTENTION_LAST:
                part.index_copy_(0, where, mass[:, -1])
            elif name == ATTENTION_PREFILL:
                part.index_add_(0, where, mass.sum(1) * prefilling[:, None])
            else:
                history = _shifted(part.index_select(0, where), mass, until)
                part.index_copy_(0, where, history)
            seen = in_prefill if name == ATTENTION_PREFILL else torch.ones_like(in_prefill)
            self._observed[name][rows[seen].numpy()] = lens[seen, -1].numpy()

    def observed(self, row: int, names: frozenset[str]) -> int:
        """How many leading columns an observed query has seen since all ``names`` are kept."""
        return min(int(self._observed[name][row]) for name in names)

    def read(self, row: int, length: int, names: frozenset[str]) -> Mapping[str, NDArray[Any]]:
        """These signals of the first ``length`` columns; copies. Waits for the device."""
        found = {name: self._buffers[name][row, :length].cpu().numpy().copy() for name in names}
        if ATTENTION_HISTORY in found:
            found[ATTENTION_HISTORY] = found[ATTENTION_HISTORY].view(np.uint64)
        return found


def bytes_per_column(signals: frozenset[str]) -> int:
    """Bytes that :class:`SignalRows` of these signals takes per row and column."""
    return sum(_dtype(name).itemsize for name in signals & ATTENTION_SIGNALS)


def _dtype(name: str) -> torch.dtype:
    return torch.int64 if name == ATTENTION_HISTORY else torch.float32


def _shifted(history: torch.Tensor, mass: torch.Tensor, lens: torch.Tensor) -> torch.Tensor:
    """History bits ``[n, width]`` with one more bit per query: mass above ``1 / lens``."""
    for j in range(mass.shape[1]):
        history = (history << 1) | (mass[:, j] > 1.0 / lens[:, j, None])
    return history
