"""Slot rows of Model Runner V2: the table lies on the device and is never waited for.

V2 prepares a step on the device while the host is ahead of it, and knows write slots there only.
How many live tokens a row has is known to the host all the same: it was told, or it counted. So
every column is computed on the host, and what crosses over are indices, once per step::

    host     lens, rows to replace      ──one upload──▶  table[flat] = slots
    host     columns that die           ──one upload──▶  table[row] = table[row, those that live]
    device   write slots of the step    ───────────────▶  table[flat] = slots
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from vtoken.integration.vllm.slot_rows import (
    RowArray,
    SlotLayout,
    SlotRows,
    WriteSlots,
)
from vtoken.table_store import ragged
from vtoken.types import IdArray, SlotArray

_MOST_ENTRIES = 2**22
"""Of rows that are rewritten at once: bounds what that takes beside the table."""


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
        """As the base class's; what a column holds afterwards is looked up on the device."""
        self._flush()
        width = int(self._lens[rows].max(initial=0))
        most = max(map(len, columns), default=0)
        gaps = np.full((len(rows), 1 + most), self.width, np.int64)
        gaps[:, 0] = rows
        for i, gone in enumerate(columns):
            gaps[i, 1 : 1 + len(gone)] = gone - np.arange(len(gone))
        there = upload(torch.from_numpy(gaps), self.table.device)
        target = torch.arange(width, device=self.table.device)
        part = max(1, _MOST_ENTRIES // max(1, width))
        for start in range(0, len(rows), part):
            some = there[start : start + part]
            targets = target.expand(len(some), -1).contiguous()
            # Column t takes what stands behind all gaps at or before it.
            passed = torch.searchsorted(some[:, 1:].contiguous(), targets, right=True)
            source = (targets + passed).clamp_(max=self.width - 1)
            kept = self.table.index_select(0, some[:, 0]).gather(1, source)
            self.table[:, :width].index_copy_(0, some[:, 0], kept)

    def _flush(self) -> None:
        """Write all staged rows in one scatter."""
        if not self._staged:
            return
        rows = np.fromiter(self._staged, np.int64)
        lens = np.array([len(slots) for slots in self._staged.values()], np.int64)
        flat = ragged(rows * self.width, lens)
        values = np.concatenate(list(self._staged.values()))
        self._staged = {}
        self._put(torch.from_numpy(flat), upload(torch.from_numpy(values), self.table.device))

    def _put(self, flat: torch.Tensor, values: torch.Tensor) -> None:
        index = upload(flat, self.table.device)
        self.table.view(-1).index_copy_(0, index, values)


def upload(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """``tensor`` on ``device``, without waiting: a copy from pinned memory; itself on the CPU."""
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)
