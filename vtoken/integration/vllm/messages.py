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
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vtoken.observation import ObservationSpec, Observe
from vtoken.types import CopyResult, IdArray, SlotArray

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
        rows: for each request that is new, resumed or whose tokens moved: the slots of its
            live tokens *before* this step's new tokens, in logical order. Requests that are
            not named keep the worker's row, to which the worker itself appends.
        dropped: for each request that lost tokens since its last message: the columns of the
            worker's present row that go, ascending; ``[n]``. Accumulated scores follow them. Of
            a request that is also in ``rows`` they concern nothing but the scores.
        urgent: copies to make before anything else happens in this step, one after the other:
            the blocks they free may be written by this very step.
        relocation: copies to start after this step's forward, or None.
        observation: what the worker observes, or None: no hook, no buffers.
        observe: per request, which of its queries in this step are observed.
        want_signals: requests whose signals must be reported with this step, each with the
            ids of its live tokens, this step's included (the worker needs only the names).
        own_signals: for requests of ``want_signals`` whose policy needs less than
            ``observation`` says, what it needs; the report has these signals only.
        report_rows: tests only: report every row of this step's requests back.
    """

    rows: Mapping[str, SlotArray] = field(default_factory=dict)
    dropped: Mapping[str, IdArray] = field(default_factory=dict)
    urgent: tuple[RelocationBatch, ...] = ()
    relocation: RelocationBatch | None = None
    observation: ObservationSpec | None = None
    observe: Mapping[str, Observe] = field(default_factory=dict)
    want_signals: Mapping[str, IdArray] = field(default_factory=dict)
    own_signals: Mapping[str, frozenset[str]] = field(default_factory=dict)
    report_rows: bool = False


@dataclass(frozen=True, eq=False)
class SignalReport:
    """Signals of one request after a step, one value per live token in logical order.

    Attributes:
        num_observed: leading live tokens that an observed query has seen.
        values: name to ``[num_live]``.
    """

    num_observed: int
    values: Mapping[str, NDArray[Any]]


@dataclass(frozen=True, eq=False)
class VerifyResult:
    """Digests of one request's K/V bytes around a relocation (I1) whose copy was reported done.

    Attributes:
        ticket: the batch.
        req_id: whose tokens moved.
        num_tokens: tokens hashed.
        digest_before, digest_after: equal unless bytes were lost.
    """

    ticket: int
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
        signals: per request of ``want_signals``.
        worker_seconds: time the worker spent on rows and copy bookkeeping in this step.
    """

    copies: tuple[CopyResult, ...] = ()
    verified: tuple[VerifyResult, ...] = ()
    rows: Mapping[str, SlotArray] = field(default_factory=dict)
    worker_seconds: float = 0.0
    signals: Mapping[str, SignalReport] = field(default_factory=dict)


EMPTY_ROW: SlotArray = np.empty(0, np.int32)
