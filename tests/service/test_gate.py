"""The gate: ids, draining, time limits and the access line, around any application."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from service import drain as drain_module
from service import request_ids
from service.drain import Drain
from service.gate import RequestGate
from service.refusals import Refusals
from service.request_ids import MAX_ID_CHARS, valid_or_new

BEGUN = threading.Event()
"""Whether the application has the request, or has sent the first chunk of a stream."""
Use = Callable[[httpx.AsyncClient, Drain], Awaitable[Any]]


@pytest.fixture(autouse=True)
def _time_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """For requests that were cut off, on a slow machine, too."""
    monkeypatch.setattr(drain_module, "CUT_SECONDS", 300)


async def _echo(request: Request) -> Response:
    record = request_ids.current.get()
    assert record is not None
    record.output_tokens = 7
    request.state.vtoken_key_name = "alice"
    return JSONResponse({"id": record.request_id, "header": request.headers["x-request-id"]})


async def _slow(request: Request) -> Response:
    BEGUN.set()
    while not await request.is_disconnected():
        await asyncio.sleep(0.005)
    return JSONResponse(None)


async def _stream(request: Request) -> Response:
    async def chunks() -> AsyncIterator[str]:
        yield "data: {}\n\n"
        BEGUN.set()
        await asyncio.sleep(300)

    return StreamingResponse(chunks(), media_type="text/event-stream")


async def _broken(request: Request) -> Response:
    raise RuntimeError("broken")


async def _breaking(request: Request) -> Response:
    async def chunks() -> AsyncIterator[str]:
        yield "data: {}\n\n"
        raise KeyError

    return StreamingResponse(chunks(), media_type="text/event-stream")


ROUTES = {"echo": _echo, "slow": _slow, "stream": _stream, "broken": _broken}
ROUTES["breaking"] = _breaking


def use(work: Use, timeout: float = 0.0, refusals: Refusals | None = None) -> Any:
    """Run ``work`` with a client of the gate and its drain."""

    async def run() -> Any:
        routes = [Route(f"/v1/{n}", f, methods=["GET", "POST"]) for n, f in ROUTES.items()]
        drain = Drain(300.0)
        gate = RequestGate(
            Starlette(routes=routes),
            drain=drain,
            refusals=refusals or Refusals(),
            timeout_seconds=timeout,
        )
        transport = httpx.ASGITransport(gate, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await work(client, drain)

    return asyncio.run(run())


@pytest.mark.parametrize("given", ["a", "A-b_c.d:e/f+g=h@i", "x" * MAX_ID_CHARS])
def test_plain_id_is_kept(given: str) -> None:
    """It is the header that the application sees, and that the client gets back."""
    answer = use(lambda c, d: c.post("/v1/echo", headers={"X-Request-ID": given}))
    assert answer.json() == {"id": given, "header": given}
    assert answer.headers["x-request-id"] == given


@pytest.mark.parametrize(
    "given", ["", " ", "a b", "a\tb", "x" * (MAX_ID_CHARS + 1), "é", "a\x00", None]
)
def test_other_id_is_replaced(given: str | None) -> None:
    """Nothing that could break a line of the log or a header gets through."""
    made = valid_or_new(given)
    assert made != given
    assert len(made) == 32


def test_errors_carry_the_id() -> None:
    """Of the router, and of the server when the application breaks."""
    headers = {"X-Request-Id": "e"}
    assert use(lambda c, d: c.post("/none", headers=headers)).headers["x-request-id"] == "e"
    broken = use(lambda c, d: c.post("/v1/broken", headers=headers))
    assert (broken.status_code, broken.headers["x-request-id"]) == (500, "e")


def test_stream_that_breaks_is_ended_with_an_error_event() -> None:
    """It has words even where the error has none, and the client sees no broken connection."""
    answer = use(lambda c, d: c.post("/v1/breaking"))
    first, error, done = answer.text.strip().split("\n\n")
    assert (answer.status_code, first, done) == (200, "data: {}", "data: [DONE]")
    found = json.loads(error.removeprefix("data: "))["error"]
    assert (found["code"], found["message"]) == (500, "the server failed with KeyError")


def test_draining_server_takes_no_new_work_and_answers_the_rest() -> None:
    """503 with Retry-After in OpenAI's form for work; what asks about the server is served."""

    async def work(client: httpx.AsyncClient, drain: Drain) -> tuple[httpx.Response, ...]:
        drain.abort(15)
        return await client.post("/v1/echo"), await client.get("/v1/echo")

    refused, served = use(work)
    assert (refused.status_code, served.status_code) == (503, 200)
    assert refused.headers["retry-after"] == "5"
    assert refused.headers["connection"] == "close"
    assert refused.json()["error"]["type"] == "ServiceUnavailableError"


def test_requests_are_open_from_start_to_end() -> None:
    """Also those that break; the wait of a drain ends with the last."""

    async def work(client: httpx.AsyncClient, drain: Drain) -> None:
        task = asyncio.create_task(client.post("/v1/slow"))
        while not drain.num_open:
            await asyncio.sleep(0.001)
        waiting = asyncio.create_task(asyncio.to_thread(drain.wait))
        while not drain.is_draining:
            await asyncio.sleep(0.001)
        assert not waiting.done()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert await waiting == 0
        await client.post("/v1/broken")
        assert drain.num_open == 0

    use(work)


@pytest.mark.parametrize("route", ["slow", "stream"])
def test_request_that_the_drain_gives_up_is_told(route: str) -> None:
    """503 with Retry-After, or an error event at the end of its stream; then nothing is open."""

    async def work(client: httpx.AsyncClient, drain: Drain) -> httpx.Response:
        BEGUN.clear()
        task = asyncio.create_task(client.post(f"/v1/{route}"))
        while not BEGUN.is_set():
            await asyncio.sleep(0.001)
        assert drain.num_open == 1
        drain.abort(15)
        assert await asyncio.to_thread(drain.wait) == 1
        assert drain.num_open == 0
        return await task

    answer = use(work)
    if route == "slow":
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
        return
    first, error, done = answer.text.strip().split("\n\n")
    assert (first, done) == ("data: {}", "data: [DONE]")
    assert json.loads(error.removeprefix("data: "))["error"]["code"] == 503


def test_time_limit_is_504_before_the_answer_has_begun() -> None:
    """The application sees a disconnect; what it answers then is not sent."""
    answer = use(lambda c, d: c.post("/v1/slow"), timeout=0.05)
    assert answer.status_code == 504
    assert answer.json()["error"]["type"] == "TimeoutError"
    assert answer.headers["x-request-id"]


def test_time_limit_ends_a_stream_with_an_error_event() -> None:
    """In the form in which vLLM reports errors of a stream, then [DONE]."""
    answer = use(lambda c, d: c.post("/v1/stream"), timeout=1)
    assert answer.status_code == 200
    first, error, done = answer.text.strip().split("\n\n")
    assert (first, done) == ("data: {}", "data: [DONE]")
    assert json.loads(error.removeprefix("data: "))["error"]["code"] == 504


def test_refused_and_ended_requests_are_counted_by_reason() -> None:
    """Those that come while it drains, those out of time, those cut off; no other."""

    async def cut(client: httpx.AsyncClient, drain: Drain) -> None:
        task = asyncio.create_task(client.post("/v1/slow"))
        while not drain.num_open:
            await asyncio.sleep(0.001)
        drain.abort(15)
        await client.post("/v1/echo")
        await asyncio.to_thread(drain.wait)
        await task

    refusals = Refusals()
    use(lambda c, d: c.post("/v1/echo"), 30, refusals)
    use(lambda c, d: c.post("/v1/broken"), 30, refusals)
    use(lambda c, d: c.post("/v1/slow"), 0.02, refusals)
    use(lambda c, d: c.post("/v1/stream"), 0.02, refusals)
    use(cut, 0, refusals)
    counted = {reason: count for reason, count in refusals.totals().items() if count}
    assert counted == {"request_timeout_seconds": 2, "cut_off": 1, "draining": 1}


def test_access_line_has_what_is_known(caplog: pytest.LogCaptureFixture) -> None:
    """For work at level INFO, for the rest only at DEBUG."""
    with caplog.at_level(logging.INFO, logger="service.access"):
        use(lambda c, d: c.post("/v1/echo", headers={"X-Request-Id": "r"}))
        use(lambda c, d: c.get("/v1/echo"))
        use(lambda c, d: c.post("/v1/slow"), timeout=0.02)
    lines = [record.__dict__ for record in caplog.records if record.name == "service.access"]
    assert len(lines) == 2
    expected = {"request_id": "r", "method": "POST", "path": "/v1/echo", "status": 200}
    expected |= {"key_name": "alice", "output_tokens": 7}
    assert expected.items() <= lines[0].items()
    assert lines[0]["duration_seconds"] >= 0
    assert "prompt_tokens" not in lines[0]
    assert (lines[1]["outcome"], lines[1]["status"]) == ("timeout", 504)


def test_access_line_is_one_line_whatever_the_path(caplog: pytest.LogCaptureFixture) -> None:
    """A client cannot write lines of its own into the log, nor move a terminal's cursor."""
    forged = "/v1/echo%0APOST%20/v1/forged%20200%0D%1B%5B2J%E2%80%A8\u00e9"
    with caplog.at_level(logging.INFO, logger="service.access"):
        use(lambda c, d: c.post(forged))
    (record,) = (record for record in caplog.records if record.name == "service.access")
    assert record.getMessage() == (
        "POST /v1/echo\\nPOST /v1/forged 200\\r\\x1b[2J\\u2028\u00e9 404"
    )
    assert record.__dict__["path"].isprintable()
