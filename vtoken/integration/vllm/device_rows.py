"""Slot rows of Model Runner V2: the table lies on the device and is never waited for.

V2 prepares a step on the device while the host is ahead of it, and knows write slots there only.
How many live tokens a row has is known to the host all the same: it was told, or it counted. So
every column is computed on the host, and what crosses over are indices, once per step, or once per
part of the rows that lose columns::

    host     lens, rows to replace      ──one upload──▶  table[flat] = slots
    host     columns that die           ──an upload──▶   table[row] = table[row, those that live]
    device   write slots of the step    ───────────────▶  table[flat] = slots
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from vtoken.integration.vllm.cache_signals import WORK_BYTES
from vtoken.integration.vllm.observation_parts import packed
from vtoken.integration.vllm.slot_rows import (
    RowArray,
    SlotLayout,
    SlotRows,
    WriteSlots,
)
from vtoken.table_store import ragged
from vtoken.types import IdArray, SlotArray

_ENTRY_BYTES = 12
"""That writing an entry takes: its place and itself."""

_COLUMN_BYTES = 40
"""That closing the gaps of a row takes per column, even if nearly all of them die: two indices, the
entry before and after, the gap and its copy."""


class DeviceSlotRows(SlotRows):
    """Rows whose table is a tensor of any device; :meth:`append` writes all of a step at once."""

    def __init__(
        self, max_num_reqs: int, max_model_len: int, layout: SlotLayout, device: torch.device
    ) -> None:
        super().__init__(max_num_reqs, max_model_len, layout, device)
        self._staged: dict[int, SlotArray] = {}

    def append(self, rows: RowArray, num_new: NDArray[np.int32], write_slots: WriteSlots) -> None:
        """As the base class's; rows that were set since the last call are written first."""
        self._flush()
        starts, ends = self._grown(rows, num_new, len(write_slots))
        flat = torch.from_numpy(ragged(rows * self.width + starts, num_new.astype(np.int64)))
        slots = torch.as_tensor(write_slots, device=self.table.device)
        self._put(flat, self._layout.kernel_slots(slots).to(torch.int32))
        self._lens[rows] = ends

    def canonical(self, req_id: str) -> SlotArray:
        """As the base class's, for checks only: waits for the device."""
        self._flush()
        row = int(self.rows([req_id])[0])
        kernel: SlotArray = self.table[row, : int(self._lens[row])].cpu().numpy()
        slots: SlotArray = self._layout.canonical_slots(kernel)
        return slots

    def _write(self, row: int, kernel_slots: SlotArray) -> None:
        self._staged[row] = kernel_slots

    def _remove(self, rows: RowArray, columns: Sequence[IdArray]) -> None:
        """As the base class's; what a column holds afterwards is looked up on the device.

        Rows are put together by length, so that one long row stretches no others, and take at most
        what is kept back for scoring, which is over or has not begun.
        """
        self._flush()
        for index in packed(self._lens[rows] + 1, _COLUMN_BYTES, WORK_BYTES):
            self._close_gaps(rows[index], [columns[i] for i in index])

    def _close_gaps(self, rows: RowArray, columns: Sequence[IdArray]) -> None:
        width = int(self._lens[rows].max())
        most = max(map(len, columns))
        gaps = np.full((len(rows), 1 + most), self.width, np.int64)
        gaps[:, 0] = rows
        for i, gone in enumerate(columns):
            gaps[i, 1 : 1 + len(gone)] = gone - np.arange(len(gone))
        there = upload(torch.from_numpy(gaps), self.table.device)
        where = there[:, 0]
        targets = torch.arange(width, device=self.table.device).expand(len(rows), -1).contiguous()
        # Column t takes what stands behind all gaps at or before it.
        passed = torch.searchsorted(there[:, 1:].contiguous(), targets, right=True)
        source = passed.add_(targets).clamp_(max=width - 1)
        part = self.table[:, :width]
        part.index_copy_(0, where, part.index_select(0, where).gather(1, source))

    def _flush(self) -> None:
        """Write all staged rows, in one scatter unless they are many and long."""
        rows, slots = np.fromiter(self._staged, np.int64), list(self._staged.values())
        lens = np.array([len(part) for part in slots], np.int64)
        self._staged = {}
        for index in packed(lens, _ENTRY_BYTES, WORK_BYTES):
            flat = ragged(rows[index] * self.width, lens[index])
            values = np.concatenate([slots[i] for i in index])
            self._put(torch.from_numpy(flat), upload(torch.from_numpy(values), self.table.device))

    def _put(self, flat: torch.Tensor, values: torch.Tensor) -> None:
        index = upload(flat, self.table.device)
        self.table.view(-1).index_copy_(0, index, values)


def upload(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """``tensor`` on ``device``, without waiting: a copy from pinned memory; itself on the CPU."""
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)
