"""Spans of requests, their parents and events, with the SDK's exporter in memory."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF

from service import tracing
from service.errors import EngineGoneError
from service.request_ids import RequestRecord
from service.settings.vllm_variables import trace_endpoint, vllm_environment

PARENT = (b"traceparent", b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")
WORK = {"evictions": 2, "relocations": 1, "stall_seconds": 0.5}
RECEIPT = {"policy": "h2o", "evicted_tokens": 33, "freed_blocks": 2, "work": WORK}


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    """Takes the place of what vLLM installs."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)
    tracing.enable()
    yield exporter
    tracing.disable()


class Link:
    """Has one receipt."""

    def __init__(self, receipt: dict[str, Any] | None) -> None:
        self._receipt = receipt
        self.keys: list[str] = []

    async def receipt(self, key: str) -> dict[str, Any]:
        self.keys.append(key)
        if self._receipt is None:
            raise EngineGoneError("gone")
        return self._receipt


def run_request(record: RequestRecord, link: Link, *headers: tuple[bytes, bytes]) -> dict[str, Any]:
    """One request inside of its span, which asks for a receipt; what the application sees."""
    state = SimpleNamespace(vtoken=SimpleNamespace(link=link))
    scope = {"headers": [(b"accept", b"*"), *headers], "app": SimpleNamespace(state=state)}
    seen: dict[str, Any] = {}

    async def run() -> None:
        async with tracing.request_span(record, scope) as inner:
            seen.update(inner)
            record.status = record.status or 200
            record.receipt_key = tracing.receipt_key(record)

    asyncio.run(run())
    return seen


def make_record(**values: Any) -> RequestRecord:
    return RequestRecord("req-1", "POST", "/v1/completions", **values)


def test_span_continues_the_callers_trace(exporter: InMemorySpanExporter) -> None:
    """The application gets this span as its parent, once; other headers stay."""
    record = make_record(prompt_tokens=5, output_tokens=7)
    seen = run_request(record, Link(RECEIPT), PARENT, (b"tracestate", b"a=b"))
    (span,) = exporter.get_finished_spans()
    assert span.name == "POST /v1/completions"
    assert f"{span.parent.span_id:016x}" == "b7ad6b7169203331"
    assert record.trace_id == "0af7651916cd43dd8448eb211c80319c"
    inward = [value.decode() for key, value in seen["headers"] if key == b"traceparent"]
    assert inward == [f"00-{record.trace_id}-{span.context.span_id:016x}-01"]
    assert (b"accept", b"*") in seen["headers"]
    assert span.attributes["vtoken.request_id"] == "req-1"
    assert span.attributes["gen_ai.usage.completion_tokens"] == 7
    assert span.status.is_ok or span.status.is_unset


def test_events_sum_up_what_happened(exporter: InMemorySpanExporter) -> None:
    """Asked once, at the end."""
    link = Link(RECEIPT)
    run_request(make_record(), link)
    (span,) = exporter.get_finished_spans()
    found = {event.name: dict(event.attributes) for event in span.events}
    assert found == {
        "vtoken.evictions": {"count": 2, "tokens": 33, "policy": "h2o"},
        "vtoken.relocations": {"count": 1, "freed_blocks": 2},
        "vtoken.stalls": {"seconds": 0.5},
    }
    assert len(link.keys) == 1


def test_receipt_that_the_client_got_is_not_asked_again(exporter: InMemorySpanExporter) -> None:
    """It can be had once."""
    link = Link(None)
    run_request(make_record(receipt=RECEIPT), link)
    assert link.keys == []
    assert len(exporter.get_finished_spans()[0].events) == 3


@pytest.mark.parametrize("receipt", [None, {**RECEIPT, "work": {}}, {}])
def test_no_numbers_no_events(
    exporter: InMemorySpanExporter, receipt: dict[str, Any] | None
) -> None:
    """An engine that does not answer, or a request to which nothing happened."""
    run_request(make_record(), Link(receipt))
    assert exporter.get_finished_spans()[0].events == ()


@pytest.mark.parametrize(
    ("values", "is_error"),
    [
        ({"status": 200}, False),
        ({"status": 404}, False),
        ({"status": 503}, True),
        ({"status": 200, "outcome": "timeout"}, True),
        ({"status": 200, "outcome": "disconnected"}, False),
    ],
)
def test_status_of_the_span(
    exporter: InMemorySpanExporter, values: dict[str, Any], is_error: bool
) -> None:
    """An error is what the server did wrong."""
    run_request(make_record(**values), Link({}))
    (span,) = exporter.get_finished_spans()
    assert (not span.status.is_ok and not span.status.is_unset) == is_error
    assert span.attributes["http.response.status_code"] == values["status"]


def test_nothing_is_asked_where_nobody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without tracing, and for requests that are not sampled: no key, no call, no header."""
    record, link = make_record(), Link(RECEIPT)
    assert run_request(record, link, PARENT)["headers"][-1] == PARENT
    assert (record.trace_id, record.receipt_key, link.keys) == ("", "", [])
    provider = TracerProvider(sampler=ALWAYS_OFF)
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)
    tracing.enable()
    try:
        seen = run_request(record, link, PARENT)
    finally:
        tracing.disable()
    assert (record.receipt_key, link.keys) == ("", [])
    assert next(v for k, v in seen["headers"] if k == b"traceparent").endswith(b"-00")


@pytest.mark.parametrize(
    ("variables", "endpoint", "protocol"),
    [
        ({}, None, "grpc"),
        ({"ENDPOINT": "http://c:4317"}, "http://c:4317", "grpc"),
        (
            {"ENDPOINT": "http://c:4318/", "PROTOCOL": "http/protobuf"},
            "http://c:4318/v1/traces",
            "http/protobuf",
        ),
        ({"ENDPOINT": "http://c", "TRACES_ENDPOINT": "http://t/x"}, "http://t/x", "grpc"),
        (
            {"TRACES_ENDPOINT": "http://t/x", "TRACES_PROTOCOL": "http/protobuf"},
            "http://t/x",
            "http/protobuf",
        ),
    ],
)
def test_standard_variables_switch_it_on(
    monkeypatch: pytest.MonkeyPatch,
    variables: dict[str, str],
    endpoint: str | None,
    protocol: str,
) -> None:
    """OpenTelemetry's own, which vLLM knows in part."""
    for name in ("ENDPOINT", "PROTOCOL", "TRACES_ENDPOINT", "TRACES_PROTOCOL"):
        monkeypatch.delenv(f"OTEL_EXPORTER_OTLP_{name}", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(f"OTEL_EXPORTER_OTLP_{name}", value)
    assert trace_endpoint() == endpoint
    assert vllm_environment()["OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"] == protocol
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    assert trace_endpoint() is None
