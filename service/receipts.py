"""The receipt at the end of an answer: a member ``vtoken`` of the JSON object or of a last event.

    JSON      {"id": …, "usage": {…}, "vtoken": {"policy": "h2o", "evicted_tokens": 412, …}}
    stream    data: {"id": …, "choices": [], "vtoken": {…}}      one more event, before [DONE]

OpenAI's clients keep members that they do not know. A stream is never held back: each chunk is
passed on as it comes, and only the one with ``[DONE]`` waits for the engine's reply.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.types import Message, Send

from service.errors import AdminError

logger = logging.getLogger(__name__)

Fetch = Callable[[], Awaitable[dict[str, Any]]]

_DONE = b"data: [DONE]"
_HEAD = ("id", "object", "created", "model")


class ReceiptSender:
    """An ASGI ``send`` that adds the receipt to a successful answer; ``fetch`` is called once."""

    def __init__(self, send: Send, fetch: Fetch) -> None:
        self._send = send
        self._fetch = fetch
        self._kind = ""  # "json", "stream", or "" for what passes as it is
        self._start: Message | None = None
        self._body = b""  # of JSON: all of it; of a stream: the last event with data

    async def __call__(self, message: Message) -> None:
        """Send on, sooner or later; mutates nothing that the application still has."""
        if message["type"] == "http.response.start":
            self._kind = _kind(message)
        if self._kind == "stream" and message["type"] == "http.response.body":
            await self._stream(message)
        elif self._kind == "json":
            await self._json(message)
        else:
            await self._send(message)

    async def _json(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._start = message
            return
        self._body += message.get("body", b"")
        if message.get("more_body", False):
            return
        assert self._start is not None
        body = with_member(self._body, await self._receipt())
        headers = [(k, v) for k, v in self._start["headers"] if k.lower() != b"content-length"]
        headers.append((b"content-length", str(len(body)).encode()))
        await self._send({**self._start, "headers": headers})
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    async def _stream(self, message: Message) -> None:
        body = message.get("body", b"")
        place = _place_of_done(body)
        if place is None:
            if body.startswith(b"data: {"):
                self._body = body
            await self._send(message)
            return
        head, receipt = _head(body[:place] or self._body), await self._receipt()
        text = b"data: " + _dump({**head, "choices": [], "vtoken": receipt}) + b"\n\n"
        await self._send({**message, "body": body[:place] + text + body[place:]})

    async def _receipt(self) -> dict[str, Any] | None:
        """The receipt, or None: an answer is not to fail for want of it."""
        try:
            return await self._fetch()
        except AdminError as error:
            logger.warning("no receipt: %s", error)
            return None


def with_member(body: bytes, receipt: dict[str, Any] | None) -> bytes:
    """``body``, a JSON object, with one more member; its other bytes stay as they are."""
    end = body.rfind(b"}")
    if end <= 0:
        return body
    return body[:end] + b',"vtoken":' + _dump(receipt) + body[end:]


def _kind(start: Message) -> str:
    if start["status"] != 200:
        return ""
    kind = next((v for k, v in start["headers"] if k.lower() == b"content-type"), b"")
    if kind.startswith(b"text/event-stream"):
        return "stream"
    return "json" if kind.startswith(b"application/json") else ""


def _place_of_done(body: bytes) -> int | None:
    """Where the closing event begins; text of the model cannot look like it (no raw newline)."""
    if body.startswith(_DONE):
        return 0
    found = body.rfind(b"\n\n" + _DONE)
    return None if found < 0 else found + 2


def _head(body: bytes) -> dict[str, Any]:
    """What every event of the stream repeats, from the last one; empty after an error."""
    events = [line for line in body.split(b"\n") if line.startswith(b"data: {")]
    try:
        last = json.loads(events[-1].removeprefix(b"data: ")) if events else {}
    except ValueError:
        last = {}
    return {name: last[name] for name in _HEAD if name in last}


def _dump(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()
