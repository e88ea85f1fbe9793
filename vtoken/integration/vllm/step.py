"""The token layer's part of one scheduler step, without vLLM: what ``scheduler.py`` and the
bookkeeping benchmark both run.

Everything here costs Python time for each scheduled request in each step, so the loops do no
more than compare numbers for a request of which nothing is due.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import accumulate
from typing import Any, Protocol, TypeVar

import numpy as np

from vtoken.integration.vllm.messages import RelocationBatch, StepMessage, StepReport
from vtoken.observation import RequestSignals
from vtoken.request_kv import RelocationPlan, RequestKV
from vtoken.token_layer import TokenLayer
from vtoken.types import SlotArray


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
    rows: dict[str, SlotArray] = {}
    computed: list[tuple[RequestKV, int]] = []
    tracked = layer.requests
    for req_id, num_tokens in num_scheduled.items():
        request = requests[req_id]
        kv = tracked.get(req_id) or admit(request)
        after = request.num_computed_tokens
        before = after - num_tokens
        row = layer.schedule_tokens(kv, before, after)
        if row is not None:
            rows[req_id] = row
        computed.append((kv, before))
    kept = {req_id: tracked[req_id].kept_columns for req_id in rows}
    plans = layer.plan_relocations(computed)
    urgent = layer.reclamation.take_urgent()
    return StepMessage(
        rows=rows,
        urgent=tuple(relocation_batch(layer, [plan], whole_rows=False) for plan in urgent),
        relocation=relocation_batch(layer, plans) if plans else None,
        observation=layer.observation(),
        kept={req_id: columns for req_id, columns in kept.items() if columns is not None},
        **_observations(layer, computed, num_scheduled),
        report_rows=layer.config.verify == "full",
    )


def _observations(
    layer: TokenLayer, computed: list[tuple[RequestKV, int]], num_scheduled: Mapping[str, int]
) -> dict[str, Any]:
    """The fields ``observe``, ``want_signals`` and ``own_signals`` of the step's message."""
    spec = layer.observation()
    if spec is None:
        return {}
    observe, want, own = {}, {}, {}
    for kv, before in computed:
        after = before + num_scheduled[kv.req_id]
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
    verify = layer.verifies(plans[0].ticket)
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
    req_ids: Iterable[str],
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
    tracked = layer.requests
    for req_id in req_ids:
        kv = tracked.get(req_id)
        request = requests.get(req_id)
        if kv is None or request is None:
            continue
        # Under async scheduling the newest tokens are still being computed.
        computed = request.num_computed_tokens - request.num_in_flight_tokens
        if computed >= kv.next_evict_at and is_running(request):
            layer.evict_if_due(kv, computed, _signals(req_id, message, report))


def _signals(req_id: str, message: StepMessage, report: StepReport) -> RequestSignals | None:
    found = report.signals.get(req_id)
    if found is None:
        return None
    return RequestSignals(message.want_signals[req_id], found.num_observed, found.values)
