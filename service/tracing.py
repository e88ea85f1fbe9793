"""One span for each request to the model, with vLLM's own spans below it.

Off unless vLLM traces (``--otlp-traces-endpoint``, or the ``OTEL_EXPORTER_OTLP_*`` variables, which
become that flag): then vLLM has installed an exporter in this process, and this module uses it. The
span continues the caller's ``traceparent`` and replaces it on the way in, so that vLLM's
``llm_request`` is its child. What eviction and relocation did to the request is asked from the
engine once, at the end, and becomes events of the span: nothing is reported step by step.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from opentelemetry import trace
from opentelemetry.trace import Span, SpanKind, StatusCode, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.types import Scope

from service.errors import AdminError
from service.request_ids import RequestRecord

_HEADERS = (b"traceparent", b"tracestate")
_PROPAGATOR = TraceContextTextMapPropagator()

_tracer: Tracer | None = None


def enable() -> None:
    """Trace from now on, through the provider that vLLM has installed."""
    global _tracer
    _tracer = trace.get_tracer("vtoken.serve")


def disable() -> None:
    """Trace no more."""
    global _tracer
    _tracer = None


def receipt_key(record: RequestRecord | None) -> str:
    """A key under which the engine is to keep the request's numbers; empty if nobody traces it."""
    return secrets.token_hex(16) if record is not None and record.trace_id else ""


@asynccontextmanager
async def request_span(record: RequestRecord, scope: Scope) -> AsyncIterator[Scope]:
    """Around one request; gives the scope to serve, and sets ``record.trace_id`` if sampled."""
    if _tracer is None:
        yield scope
        return
    carrier = {k.decode(): v.decode("latin-1") for k, v in scope["headers"] if k in _HEADERS}
    span = _tracer.start_span(
        f"{record.method} {record.path}",
        context=_PROPAGATOR.extract(carrier),
        kind=SpanKind.SERVER,
        attributes={
            "http.request.method": record.method,
            "url.path": record.path,
            "vtoken.request_id": record.request_id,
        },
    )
    if span.is_recording():
        record.trace_id = f"{span.get_span_context().trace_id:032x}"
    try:
        yield _with_parent(scope, span)
    finally:
        if span.is_recording():
            await _fetch_receipt(record, scope)
            _describe(span, record)
        span.end()


def _with_parent(scope: Scope, span: Span) -> Scope:
    carrier: dict[str, str] = {}
    _PROPAGATOR.inject(carrier, context=trace.set_span_in_context(span))
    headers = [(k, v) for k, v in scope["headers"] if k not in _HEADERS]
    headers += [(name.encode(), value.encode()) for name, value in carrier.items()]
    return {**scope, "headers": headers}


async def _fetch_receipt(record: RequestRecord, scope: Scope) -> None:
    if not record.receipt_key or record.receipt is not None:
        return
    try:
        record.receipt = await scope["app"].state.vtoken.link.receipt(record.receipt_key)
    except AdminError:  # the span is worth having without
        return


def _describe(span: Span, record: RequestRecord) -> None:
    span.set_attribute("http.response.status_code", record.status)
    if record.prompt_tokens:
        span.set_attribute("gen_ai.usage.prompt_tokens", record.prompt_tokens)
        span.set_attribute("gen_ai.usage.completion_tokens", record.output_tokens)
    if record.outcome:
        span.set_attribute("vtoken.outcome", record.outcome)
    if record.status >= 500 or record.outcome in ("error", "timeout"):
        span.set_status(StatusCode.ERROR)
    if record.receipt:
        _add_events(span, record.receipt)


def _add_events(span: Span, receipt: Mapping[str, Any]) -> None:
    """What happened to the request, summed up; nothing where nothing happened."""
    work = receipt.get("work", {})
    if work.get("evictions"):
        numbers = {"count": work["evictions"], "tokens": receipt["evicted_tokens"]}
        span.add_event("vtoken.evictions", {**numbers, "policy": str(receipt["policy"])})
    if work.get("relocations"):
        numbers = {"count": work["relocations"], "freed_blocks": receipt["freed_blocks"]}
        span.add_event("vtoken.relocations", numbers)
        span.add_event("vtoken.stalls", {"seconds": work["stall_seconds"]})
