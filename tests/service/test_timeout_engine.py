"""A real server that gives a request five seconds: what the client, the engine and operators see.

The last test kills it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Status

from tests.service.otlp import Receiver, attributes
from tests.service.server_process import are_gone, kill, wait_for
from tests.service.tiny_server import LASTING_TOKENS, TinyServer, body, events, words

pytestmark = pytest.mark.engine

REASON = "request_timeout_seconds"
SECONDS = 5
"""In which a slow machine has begun to answer."""
MESSAGE = f"the request took longer than {SECONDS} s"


@pytest.fixture(scope="module")
def receiver() -> Iterator[Receiver]:
    with Receiver() as receiver:
        yield receiver


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, receiver: Receiver) -> Iterator[TinyServer]:
    server = TinyServer(
        tmp_path_factory.mktemp("timeout"),
        VTOKEN_REQUEST_TIMEOUT_SECONDS=str(SECONDS),
        VTOKEN_LOG_FORMAT="json",
        VTOKEN_METRICS_POLL_SECONDS="0.2",
        **receiver.environment,
    )
    try:
        server.wait_until_ready()
        yield server
    finally:
        server.kill_all()


def lasting(server: TinyServer, name: str, **others: Any) -> httpx.Response:
    """The answer to a request that would take a minute; ``name`` is its id and its trace's."""
    trace_id = name.encode().hex().rjust(32, "0")
    headers = {"X-Request-Id": name, "traceparent": f"00-{trace_id}-b7ad6b7169203331-01"}
    xargs = {"vtoken_receipt": True}
    document = body(words(200), LASTING_TOKENS, vllm_xargs=xargs, **others)
    return server.post(json=document, headers=headers)


def refused(server: TinyServer) -> float:
    """How many the metric has counted."""
    found = server.metrics().get("vtoken_refused_requests_total", {}).items()
    return next((value for labels, value in found if dict(labels)["reason"] == REASON), -1.0)


@pytest.mark.parametrize("stream", [False, True])
def test_request_out_of_time_is_told_and_freed(
    server: TinyServer, receiver: Receiver, stream: bool
) -> None:
    """504 in OpenAI's form, or as a stream's last event; no block stays taken, no step follows;
    metric, log and span say why, and the span what was evicted until then."""
    before = wait_for(lambda: (count := refused(server)) >= 0 and [count])[0]
    name = f"late-{stream}"
    answer = lasting(server, name, stream=stream)
    error = list(events(answer))[-1] if stream else answer.json()
    assert answer.status_code == (200 if stream else 504)
    assert error == {
        "error": {"message": MESSAGE, "type": "TimeoutError", "param": None, "code": 504}
    }
    wait_for(server.is_quiet, 120)
    steps = server.state()["engine"]["steps"]
    line = server.access(name)
    assert (line["status"], line["outcome"]) == (answer.status_code, "timeout")
    wait_for(lambda: refused(server) == before + 1, 120)
    span = wait_for(lambda: receiver.trace(line["trace_id"]).get("POST /v1/completions"), 120)
    assert attributes(span)["vtoken.outcome"] == "timeout"
    assert span.status.code == Status.STATUS_CODE_ERROR
    happened = {event.name: attributes(event) for event in span.events}
    assert happened["vtoken.evictions"]["tokens"] > 0
    assert server.state()["engine"]["steps"] == steps


def test_killed_server_leaves_no_process(server: TinyServer) -> None:
    """SIGKILL, in the middle of a request that the engine would go on with for a minute."""
    processes = server.descendants()
    assert server.worker() in processes
    document = body(words(20), LASTING_TOKENS, stream=True)
    with httpx.stream("POST", server.url + "/v1/completions", json=document, timeout=300) as answer:
        next(answer.iter_lines())
        server.process.kill()
        try:
            wait_for(lambda: are_gone(processes), 120)
        finally:
            kill(processes)
