"""The token layer's part of one scheduler step, without vLLM: what ``scheduler.py`` and the
bookkeeping benchmark both run.

Everything here costs time for each scheduled request in each step, so what all requests have in
common is done on arrays, and Python loops only over requests of which something is due.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from itertools import accumulate
from typing import Any, Protocol, TypeVar

import numpy as np

from vtoken.eviction import Due
from vtoken.integration.vllm.messages import RelocationBatch, StepMessage, StepReport
from vtoken.observation import RequestSignals
from vtoken.request_kv import RelocationPlan, RequestKV
from vtoken.token_layer import TokenLayer


class ScheduledRequest(Protocol):
    """What is read of vLLM's ``Request``."""

    num_computed_tokens: int
    num_in_flight_tokens: int


RequestT = TypeVar("RequestT", bound=ScheduledRequest)


def step_message(
    layer: TokenLayer,
    requests: Mapping[str, RequestT],
    num_scheduled: Mapping[str, int],
    admit: Callable[[RequestT], RequestKV],
) -> StepMessage:
    """Register this step's tokens, plan relocations and say what the worker must know.

    Args:
        layer: changes.
        requests: by id; their ``num_computed_tokens`` includes this step.
        num_scheduled: tokens of this step per request.
        admit: starts to track a request that is not tracked yet.
    """
    if not layer.roster.tracks(num_scheduled):
        for req_id in num_scheduled:
            if req_id not in layer.requests:
                admit(requests[req_id])
    lengths = [requests[req_id].num_computed_tokens for req_id in num_scheduled]
    changes = layer.schedule_step(num_scheduled, np.array(lengths, np.int64))
    plans = layer.plan_relocations(_complete(layer, num_scheduled))
    urgent = layer.reclamation.take_urgent()
    return StepMessage(
        rows={r: change.slots for r, change in changes.items() if change.slots is not None},
        dropped={r: change.dropped for r, change in changes.items() if change.dropped is not None},
        urgent=tuple(relocation_batch(layer, [plan], whole_rows=False) for plan in urgent),
        relocation=relocation_batch(layer, plans) if plans else None,
        observation=layer.observation(),
        **_observations(layer, num_scheduled),
        report_rows=layer.config.verify == "full",
    )


def _complete(
    layer: TokenLayer, num_scheduled: Mapping[str, int]
) -> Iterator[tuple[RequestKV, int]]:
    """The requests of a step, each with the number of its tokens that were there before."""
    for req_id, num_tokens in num_scheduled.items():
        kv = layer.requests[req_id]
        yield kv, kv.num_tokens - num_tokens


def _observations(layer: TokenLayer, num_scheduled: Mapping[str, int]) -> dict[str, Any]:
    """The fields ``observe``, ``want_signals`` and ``own_signals`` of the step's message."""
    spec = layer.observation()
    if spec is None:
        return {}
    observe, want, own = {}, {}, {}
    for kv, before in _complete(layer, num_scheduled):
        after = kv.num_tokens
        if (queries := layer.to_observe(kv, before, after)) is not None:
            observe[kv.req_id] = queries
        if layer.wants_signals(kv, after):
            want[kv.req_id] = kv.table.live_ids()
            if (signals := layer.signals_of(kv)) != spec.signals:
                own[kv.req_id] = signals
    return {"observe": observe, "want_signals": want, "own_signals": own}


def relocation_batch(
    layer: TokenLayer, plans: list[RelocationPlan], *, whole_rows: bool = True
) -> RelocationBatch:
    """All plans of one ticket, flattened; without ``whole_rows`` only moved tokens are hashed."""
    verify = layer.verification.covers(plans[0].ticket)
    return RelocationBatch(
        ticket=plans[0].ticket,
        req_ids=tuple(plan.req_id for plan in plans),
        bounds=tuple(accumulate((plan.moves.num_moves for plan in plans), initial=0)),
        src_slots=np.concatenate([plan.moves.src_slots for plan in plans]),
        dst_slots=np.concatenate([plan.moves.dst_slots for plan in plans]),
        verify=verify,
        verify_rows=verify and whole_rows and layer.config.verify == "full",
    )


def evict_due(
    layer: TokenLayer,
    requests: Mapping[str, RequestT],
    req_ids: Collection[str],
    is_running: Callable[[RequestT], bool],
    message: StepMessage,
    report: StepReport,
) -> None:
    """Evict from every request of a step whose output has arrived and that is due.

    Args:
        layer: changes.
        requests: by id; those that ended meanwhile are absent.
        req_ids: the requests of the step.
        is_running: whether the request still holds its blocks.
        message, report: of the step: signals that it asked for and got.
    """
    due = []
    for kv in layer.roster.may_be_due(req_ids):
        request = requests.get(kv.req_id)
        if request is None or not is_running(request):
            continue
        # Under async scheduling the newest tokens are still being computed.
        computed = request.num_computed_tokens - request.num_in_flight_tokens
        due.append(Due(kv, computed, _signals(kv.req_id, message, report)))
    if due:
        layer.evict_due(due)


def _signals(req_id: str, message: StepMessage, report: StepReport) -> RequestSignals | None:
    found = report.signals.get(req_id)
    if found is None:
        return None
    return RequestSignals(message.want_signals[req_id], found.num_observed, found.values)
