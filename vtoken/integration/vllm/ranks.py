"""The workers of one engine under tensor parallelism, as the worker core sees them.

Every rank gets the same messages, so all hold the same rows and carry out the same copies, each
for its own KV heads. What differs between ranks is what they report, and vLLM returns the report
of one of them. So reports are exchanged among the workers before they leave:

    scores     each rank observed its own heads: the mean over ranks is the mean over heads
    copies     a batch is complete when every rank copied it, and failed when one rank failed
    digests    of each rank's own bytes, all of them

Both exchanges happen in steps that all ranks can tell apart alike: steps with an observed query,
and steps in which a batch was joined. Other steps communicate nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch

from vtoken.integration.vllm.messages import StepReport
from vtoken.types import CopyResult, SlotArray


class Ranks(Protocol):
    """Exchange among the ranks; all of them must make the same calls in the same order."""

    def mean(self, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Mean over ranks of float32 tensors, the same bits on each rank; shapes as given."""
        ...  # pragma: no cover

    def gather(self, report: StepReport) -> list[StepReport]:
        """The reports of all ranks in rank order, on each rank."""
        ...  # pragma: no cover


class OneRank:
    """An engine with one worker: nothing to exchange."""

    def mean(self, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """``parts`` themselves."""
        return list(parts)

    def gather(self, report: StepReport) -> list[StepReport]:
        """``report`` alone."""
        return [report]


class TensorParallelRanks:
    """The ranks of vLLM's tensor-parallel group.

    Args:
        group: its ``GroupCoordinator``. Tensors go the way the model's own activations go,
            reports through the gloo group that vLLM keeps beside it.
    """

    def __init__(self, group: Any) -> None:
        self._group = group

    def mean(self, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """See :meth:`Ranks.mean`: one all-reduce for all parts."""
        if not parts:
            return []
        flat = torch.cat([part.reshape(-1) for part in parts])
        total = self._group.all_reduce(flat) / self._group.world_size
        sizes = [part.numel() for part in parts]
        return [x.view_as(part) for x, part in zip(total.split(sizes), parts, strict=True)]

    def gather(self, report: StepReport) -> list[StepReport]:
        """See :meth:`Ranks.gather`."""
        group = self._group
        reports: list[StepReport] = [report] * group.world_size
        torch.distributed.all_gather_object(reports, report, group=group.cpu_group)
        return reports


def merged(reports: Sequence[StepReport]) -> StepReport:
    """One report for all ranks' reports of one step; pure.

    Signals and seconds are those of the first rank: signals are equal on all of them.
    """
    first = reports[0]
    if len(reports) == 1:
        return first
    return dataclasses.replace(
        first,
        copies=tuple(map(_merged_copy, zip(*(r.copies for r in reports), strict=True))),
        verified=tuple(result for report in reports for result in report.verified),
        rows={req_id: _odd_row(req_id, reports) for req_id in first.rows},
    )


def _merged_copy(results: tuple[CopyResult, ...]) -> CopyResult:
    """A batch as slow as its slowest rank, and failed if one rank failed."""
    tickets = {result.ticket for result in results}
    assert len(tickets) == 1, f"ranks report batches {sorted(tickets)} in one place"
    errors = [f"rank {i}: {r.error}" for i, r in enumerate(results) if r.error is not None]
    return CopyResult(
        ticket=results[0].ticket,
        error="; ".join(errors) or None,
        copy_seconds=max(result.copy_seconds for result in results),
        stall_seconds=max(result.stall_seconds for result in results),
        num_bytes=sum(result.num_bytes for result in results),
    )


def _odd_row(req_id: str, reports: Sequence[StepReport]) -> SlotArray:
    """The row that differs from the first rank's, for the scheduler to find, or the first's."""
    first = reports[0].rows[req_id]
    others = (report.rows[req_id] for report in reports[1:])
    return next((row for row in others if not np.array_equal(row, first)), first)
