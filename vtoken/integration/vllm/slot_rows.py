"""The worker's rows: which slots attention reads, one row per request, in logical order.

A row is the worker's image of a token table. The scheduler sends it whole when a request
starts, resumes or its tokens moved; it names the columns of tokens that died, and the worker
appends the slots that each step writes. Rows belong to requests, not to places in vLLM's batch:
reordering the batch or leaving a request out of a step touches nothing here.

    table[row]   k₀ k₁ k₂ … k₍len₋₁₎ | stale …        kernel slots, int32
    lens[row]    number of live entries
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from vtoken.errors import TokenTableError
from vtoken.table_store import ragged
from vtoken.types import IdArray, SlotArray

CPU = torch.device("cpu")
RowArray = NDArray[np.int64]
WriteSlots: TypeAlias = NDArray[np.int64] | torch.Tensor
"""Canonical slots, int64: an array, or a tensor where the runner has them on its device."""


class SlotLayout(Protocol):
    """How kernels number slots; see :class:`~vtoken.kv_view.SlotGeometry`."""

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        ...  # pragma: no cover

    def kernel_slots(self, slots: Any) -> Any:
        """Kernel slots of canonical ones, same shape and type."""
        ...  # pragma: no cover

    def canonical_slots(self, kernel_slots: Any) -> Any:
        """The inverse."""
        ...  # pragma: no cover


class SlotRows:
    """Slot rows of all requests that the worker holds state for.

    Attributes:
        table: ``[max_num_reqs, width]`` int32 kernel slots, read by the attention ops. Its
            address never changes.
        width: tokens per row: ``max_model_len`` rounded up to whole blocks, plus one block.
    """

    def __init__(
        self,
        max_num_reqs: int,
        max_model_len: int,
        layout: SlotLayout,
        device: torch.device = CPU,
    ) -> None:
        block_size = layout.block_size
        self.width = (-(-max_model_len // block_size) + 1) * block_size
        self.table = torch.zeros(max_num_reqs, self.width, dtype=torch.int32, device=device)
        self._layout = layout
        self._lens = np.zeros(max_num_reqs, np.int64)
        self._row_of: dict[str, int] = {}
        self._free = list(range(max_num_reqs))[::-1]

    def __contains__(self, req_id: str) -> bool:
        return req_id in self._row_of

    def __len__(self) -> int:
        return len(self._row_of)

    def set_row(self, req_id: str, slots: SlotArray) -> None:
        """Replace the row of ``req_id`` by canonical ``slots`` (``[num_live]``, logical order).

        Raises:
            TokenTableError: no row is free, or the row is longer than ``width``.
        """
        if len(slots) > self.width:
            raise TokenTableError(
                f"request {req_id!r} has {len(slots)} live tokens, a row holds {self.width}"
            )
        row = self._row_of.get(req_id)
        if row is None:
            if not self._free:
                raise TokenTableError(
                    f"no slot row for request {req_id!r}: all {len(self._lens)} are taken"
                )
            row = self._row_of[req_id] = self._free.pop()
        self._write(row, self._layout.kernel_slots(slots))
        self._lens[row] = len(slots)

    def drop_columns(self, dropped: Mapping[str, IdArray]) -> None:
        """Drop entries of rows; those behind them move up.

        Args:
            dropped: columns of each request's row, ascending.

        Raises:
            TokenTableError: a request has no row, or the row no such column.
        """
        if not dropped:
            return
        rows = self.rows(list(dropped))
        columns = list(dropped.values())
        for req_id, gone, end in zip(dropped, columns, self.lens(rows), strict=True):
            if gone[-1] >= end:
                raise TokenTableError(
                    f"column {gone[-1]} of request {req_id!r} is to go, its row has {end}"
                )
        self._remove(rows, columns)
        self._lens[rows] -= [len(part) for part in columns]

    def drop(self, req_ids: Iterable[str]) -> None:
        """Forget requests that finished or were preempted; unknown ones are ignored."""
        for req_id in req_ids:
            row = self._row_of.pop(req_id, None)
            if row is not None:
                self._lens[row] = 0
                self._free.append(row)

    def rows(self, req_ids: Sequence[str]) -> RowArray:
        """Row numbers of ``req_ids``, in order: int64 ``[num_reqs]``.

        Raises:
            TokenTableError: a request never got a row from the scheduler.
        """
        try:
            return np.array(list(map(self._row_of.__getitem__, req_ids)), np.int64)
        except KeyError:
            missing = [req_id for req_id in req_ids if req_id not in self._row_of]
            raise TokenTableError(
                f"{len(missing)} of {len(req_ids)} scheduled requests have no slot row, first "
                f"{missing[0]!r}; the scheduler sent rows for {len(self._row_of)} requests"
            ) from None

    def append(self, rows: RowArray, num_new: NDArray[np.int32], write_slots: WriteSlots) -> None:
        """Append to ``rows[i]`` the next ``num_new[i]`` of the canonical ``write_slots``.

        ``write_slots`` is ``[num_new.sum()]``, requests one after the other. Rows are distinct.

        Raises:
            TokenTableError: numbers disagree or a row would overflow; nothing was changed.
        """
        starts, ends = self._grown(rows, num_new, len(write_slots))
        kernel = self._layout.kernel_slots(np.asarray(write_slots))
        table = self.table.numpy()
        if len(write_slots) == len(rows) and int(num_new.max(initial=0)) == 1:
            table[rows, starts] = kernel
        else:
            table.reshape(-1)[ragged(rows * self.width + starts, num_new.astype(np.int64))] = kernel
        self._lens[rows] = ends

    def _grown(
        self, rows: RowArray, num_new: NDArray[np.int32], num_slots: int
    ) -> tuple[RowArray, RowArray]:
        """Lengths before and after an append, checked; changes nothing."""
        starts = self._lens[rows]
        ends: RowArray = starts + num_new
        total = int(num_new.sum())
        if total != num_slots:
            raise TokenTableError(f"{num_slots} write slots for {total} new tokens")
        if len(ends) and int(ends.max()) > self.width:
            raise TokenTableError(f"a row would hold {int(ends.max())} of {self.width} tokens")
        return starts, ends

    def lens(self, rows: RowArray) -> RowArray:
        """Live tokens of ``rows``, int64; a copy."""
        return self._lens[rows]

    def canonical(self, req_id: str) -> SlotArray:
        """Canonical slots of the live tokens of ``req_id``, logical order; a copy.

        Raises:
            TokenTableError: the request has no row.
        """
        row = int(self.rows([req_id])[0])
        kernel = self.table.numpy()[row, : self._lens[row]]
        slots: SlotArray = self._layout.canonical_slots(kernel)
        return slots

    def _write(self, row: int, kernel_slots: SlotArray) -> None:
        """Replace the first entries of a row."""
        self.table.numpy()[row, : len(kernel_slots)] = kernel_slots

    def _remove(self, rows: RowArray, columns: Sequence[IdArray]) -> None:
        """Close the gaps that these columns leave, before lengths change."""
        table = self.table.numpy()
        for row, gone in zip(rows.tolist(), columns, strict=True):
            first = int(gone[0])
            kept = np.delete(table[row, first : self._lens[row]], gone - first)
            table[row, first : first + len(kept)] = kept
