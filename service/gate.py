"""The outermost middleware: every request passes it first, and its answer last.

It gives the request an id, counts it as open or refuses it while the server drains, ends it when
its time is up, opens its span, and writes its line of the log. It never buffers an answer.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service import request_ids, tracing, vllm_faults
from service.asgi import error_body, error_response, is_work
from service.auth import KEY_NAME
from service.drain import RETRY_AFTER_SECONDS, Drain
from service.refusals import Refusals
from service.request_ids import RequestRecord

access_logger = logging.getLogger("service.access")


class RequestGate:
    """See the module.

    Args:
        app: all of the server.
        drain: counts requests.
        refusals: counts those that are turned away, or ended here.
        timeout_seconds: for each request to the model; 0: none.
    """

    def __init__(
        self, app: ASGIApp, *, drain: Drain, refusals: Refusals, timeout_seconds: float
    ) -> None:
        self._app = app
        self._drain = drain
        self._refusals = refusals
        self._timeout_seconds = timeout_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record, scope = request_ids.open_record(scope)
        token = request_ids.current.set(record)
        send = request_ids.with_request_id(send, record)
        try:
            if is_work(scope):
                await self._work(record, scope, receive, send)
            else:
                await self._app(scope, receive, send)
        finally:
            request_ids.current.reset(token)
            _log(record, scope)

    async def _work(
        self, record: RequestRecord, scope: Scope, receive: Receive, send: Send
    ) -> None:
        clock = _Clock(record, receive, send)
        if not self._drain.enter(clock.cut):
            self._refusals.count("draining")
            text = "the server is stopping; send the request again, to another one"
            answer = error_response(503, text, retry_after=RETRY_AFTER_SECONDS)
            answer.headers["Connection"] = "close"
            await answer(scope, receive, send)
            return
        try:
            async with tracing.request_span(record, scope) as scope:
                await self._timed(record, scope, clock)
        finally:
            self._drain.leave(clock.cut)

    async def _timed(self, record: RequestRecord, scope: Scope, clock: _Clock) -> None:
        clock.start(self._timeout_seconds)
        try:
            await self._app(scope, clock.receive, clock.send)
        except Exception as error:
            record.outcome = record.outcome or "error"
            if clock.has_open_stream:
                await clock.fail(*vllm_faults.describe(error))
            elif not clock.expired.is_set():  # else the error is that the body ended early
                raise
        finally:
            clock.stop()
        if clock.expired.is_set() and not clock.is_over:
            self._refusals.count("request_timeout_seconds" if clock.status == 504 else "cut_off")
            await clock.answer()


class _Clock:
    """Ends a request as if its client had gone, which vLLM handles on every route.

    (Cancelling the task would not do: vLLM's handlers run in tasks of their own.)
    """

    def __init__(self, record: RequestRecord, receive: Receive, send: Send) -> None:
        self.expired = asyncio.Event()
        self.cut = self._cut  # one object, by which a drain knows this request
        self.status, self._text = 503, "the server is stopping and could not wait any longer"
        self._loop = asyncio.get_running_loop()
        self._record = record
        self._receive, self._send = receive, send
        self._is_stream = self.is_over = False
        self._timer: asyncio.TimerHandle | None = None
        self._next: asyncio.Future[Message] | None = None  # outlives a caller that only peeks

    def start(self, seconds: float) -> None:
        """Let time run; 0: for ever."""
        if seconds:
            text = f"the request took longer than {seconds:g} s"
            self._timer = self._loop.call_later(seconds, self._end, 504, text, "timeout")

    def stop(self) -> None:
        """The application is done."""
        if self._timer is not None:
            self._timer.cancel()
        if self._next is not None:
            self._next.cancel()

    async def receive(self) -> Message:
        """The next message, or a disconnect once time is up."""
        if self._next is None:
            self._next = asyncio.ensure_future(self._receive())
        if not self._next.done() and not self.expired.is_set():
            expired = asyncio.ensure_future(self.expired.wait())
            try:
                await asyncio.wait((self._next, expired), return_when=asyncio.FIRST_COMPLETED)
            finally:
                expired.cancel()
        if not self._next.done():
            return {"type": "http.disconnect"}
        message, self._next = self._next.result(), None
        return self._seen(message)

    def _seen(self, message: Message) -> Message:
        if message["type"] == "http.disconnect" and not self.is_over:
            self._record.outcome = "disconnected"
        return message

    async def send(self, message: Message) -> None:
        """Pass on what comes in time."""
        if self.expired.is_set():
            return
        if message["type"] == "http.response.start":
            kind = dict(message.get("headers", ())).get(b"content-type", b"")
            self._is_stream = kind.startswith(b"text/event-stream")
        self.is_over = message["type"] == "http.response.body" and not message.get("more_body")
        await self._send(message)

    @property
    def has_open_stream(self) -> bool:
        """Whether a stream has begun, and neither ended nor run out of time."""
        return self._is_stream and not self.is_over and not self.expired.is_set()

    async def fail(self, status: int, text: str) -> None:
        """End the stream with an error event: vLLM would break it off."""
        self.status, self._text = status, text
        await self.answer()

    async def answer(self) -> None:
        """Say why it ends: an error answer, or the last event of a stream that has begun."""
        if not self._record.status:
            retry = None if self.status == 504 else RETRY_AFTER_SECONDS
            answer = error_response(self.status, self._text, retry_after=retry)
            await answer({"type": "http"}, self._receive, self._send)
            return
        event = b"data: " + json.dumps(error_body(self.status, self._text)).encode() + b"\n\n"
        body = event + b"data: [DONE]\n\n" if self._is_stream else b""
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    def _cut(self) -> None:
        """End it because the server stops; for any thread."""
        self._loop.call_soon_threadsafe(self._end, self.status, self._text, "cut_off")

    def _end(self, status: int, text: str, outcome: str) -> None:
        if not self.expired.is_set():
            self.status, self._text, self._record.outcome = status, text, outcome
            self.expired.set()


def _log(record: RequestRecord, scope: Scope) -> None:
    """One line for each request to the model; for the others only if somebody debugs."""
    level = logging.INFO if is_work(scope) else logging.DEBUG
    if not access_logger.isEnabledFor(level):
        return
    fields: dict[str, Any] = {
        "request_id": record.request_id,
        "method": record.method,
        "path": record.path,
        "status": record.status,
        "duration_seconds": round(time.monotonic() - record.started, 4),
        "key_name": scope.get("state", {}).get(KEY_NAME),
        "prompt_tokens": record.prompt_tokens or None,
        "output_tokens": record.output_tokens or None,
        "outcome": record.outcome or None,
        "trace_id": record.trace_id or None,
    }
    kept = {name: value for name, value in fields.items() if value is not None}
    access_logger.log(level, "%s %s %d", record.method, record.path, record.status, extra=kept)
