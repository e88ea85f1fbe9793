"""What is known of the request that a task works for: its id first of all.

A client's ``X-Request-Id`` is kept if it is short and plain, or a new one is made; the answer
carries it, whatever the answer is. vLLM builds its own id from the same header
(``cmpl-<id>-0``), so that the log, the trace and ``GET /admin/state`` name the same request.
"""

from __future__ import annotations

import re
import time
import uuid
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from starlette.types import Message, Scope, Send

from service.asgi import header, path_of
from service.text import printable

HEADER = b"x-request-id"
MAX_ID_CHARS = 128
_VALID = re.compile(rf"[A-Za-z0-9._:/+=@-]{{1,{MAX_ID_CHARS}}}")


@dataclass
class RequestRecord:
    """One HTTP request, from its arrival to its last byte.

    Attributes:
        request_id: in the header of the answer and in the engine's ids.
        method, path: of the request line, without the query, and on one line.
        started: monotonic seconds.
        status: of the answer; 0 while there is none.
        prompt_tokens, output_tokens: sums over its sequences, 0 for other requests.
        trace_id: of its span, 32 hexadecimal digits; empty without tracing.
        receipt_key: under which the engine keeps its numbers, if anybody asked for them.
        receipt: those numbers, if they were fetched.
        outcome: why it did not end by itself: ``timeout``, ``cut_off``, ``disconnected`` or
            ``error``.
    """

    request_id: str
    method: str
    path: str
    started: float = field(default_factory=time.monotonic)
    status: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    trace_id: str = ""
    receipt_key: str = ""
    receipt: dict[str, Any] | None = None
    outcome: str = ""


current: ContextVar[RequestRecord | None] = ContextVar("vtoken_request", default=None)
"""The record of the request that the present task works for; None outside of any."""


def valid_or_new(given: str | None) -> str:
    """``given`` if it can be used as an id, else a new one of 32 hexadecimal digits."""
    return given if given is not None and _VALID.fullmatch(given) else uuid.uuid4().hex


def open_record(scope: Scope) -> tuple[RequestRecord, Scope]:
    """The record of a request that arrives, and its scope with exactly one id header."""
    request_id = valid_or_new(header(scope, HEADER))
    headers = [(key, value) for key, value in scope["headers"] if key.lower() != HEADER]
    headers.append((HEADER, request_id.encode()))
    record = RequestRecord(request_id, scope["method"], printable(path_of(scope)))
    return record, {**scope, "headers": headers, "state": scope.get("state", {})}


def with_request_id(send: Send, record: RequestRecord) -> Send:
    """A ``send`` that puts the id on the answer and its status into ``record``."""

    async def marked(message: Message) -> None:
        if message["type"] == "http.response.start":
            record.status = message["status"]
            kept = [(k, v) for k, v in message.get("headers", ()) if k.lower() != HEADER]
            message = {**message, "headers": [*kept, (HEADER, record.request_id.encode())]}
        await send(message)

    return marked
