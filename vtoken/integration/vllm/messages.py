"""What scheduler and worker say to each other, one message per engine step each way.

The scheduler owns every token table; the worker owns the rows of slots that attention reads.
``StepMessage`` rides on vLLM's SchedulerOutput, ``StepReport`` on its ModelRunnerOutput, both
as a plain attribute named :data:`ATTRIBUTE`, which survives pickling between the processes.

    schedule(N) ──StepMessage(N)──▶ worker: rows, forward N, start copies of plan N
    worker: join copies of plan N, forward N+1 … ──StepReport(N+1): plan N copied──▶ commit

So a plan sent with step N is reported with step N+1 and committed there: until then every
read still goes to the sources, and a failed or overtaken copy costs nothing but its
destination blocks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from vtoken.types import CopyResult, SlotArray

ATTRIBUTE = "vtoken"


@dataclass(frozen=True, eq=False)
class RelocationBatch:
    """All plans of one step, flattened for one launch of the copy engine.

    Attributes:
        ticket: identifies the batch in the report; ascending.
        req_ids: requests with a plan, in order; ``[num_plans]``.
        bounds: ``bounds[i]:bounds[i + 1]`` are the moves of ``req_ids[i]``; ``[num_plans + 1]``.
        src_slots, dst_slots: ``[num_moves]`` int32; the two sets are disjoint.
        verify: hash K/V of these moves before and after (I1).
        verify_rows: with ``verify``, hash *every* live token of the request, not only moved ones.
    """

    ticket: int
    req_ids: tuple[str, ...]
    bounds: tuple[int, ...]
    src_slots: SlotArray
    dst_slots: SlotArray
    verify: bool = False
    verify_rows: bool = False


@dataclass(frozen=True, eq=False)
class StepMessage:
    """Scheduler → worker, with one SchedulerOutput.

    Attributes:
        rows: for each request that is new, resumed or structurally changed: the slots of its
            live tokens *before* this step's new tokens, in logical order. Requests that are
            not named keep the worker's row, to which the worker itself appends.
        relocation: copies to start after this step's forward, or None.
        report_rows: tests only: report every row of this step's requests back.
    """

    rows: Mapping[str, SlotArray] = field(default_factory=dict)
    relocation: RelocationBatch | None = None
    report_rows: bool = False


@dataclass(frozen=True, eq=False)
class VerifyResult:
    """Digests of one request's K/V bytes around a relocation (I1)."""

    req_id: str
    num_tokens: int
    digest_before: str
    digest_after: str


@dataclass(frozen=True, eq=False)
class StepReport:
    """Worker → scheduler, with one ModelRunnerOutput.

    Attributes:
        copies: batches whose copies ended since the last report, in order of submission.
        verified: digests, when the batch asked for them.
        rows: with ``report_rows``: slots of all live tokens that this forward read (new tokens
            included), per request, canonical slots.
        worker_seconds: time the worker spent on rows and copy bookkeeping in this step.
    """

    copies: tuple[CopyResult, ...] = ()
    verified: tuple[VerifyResult, ...] = ()
    rows: Mapping[str, SlotArray] = field(default_factory=dict)
    worker_seconds: float = 0.0


EMPTY_ROW: SlotArray = np.empty(0, np.int32)
