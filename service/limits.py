"""What one request, and one client, may ask for: a middleware behind the API keys.

Bodies that are too long are a 413, values out of bounds a 400, and what the server has no room for
now a 429 with ``Retry-After``, all in OpenAI's form and before the engine hears of it. Each is
counted by its reason.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass
from typing import Any

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.asgi import error_response, header, is_work, path_of, read_body, replay
from service.auth import KEY_NAME
from service.forms import FORM_ROUTES, read_form

_OUTPUT_FIELDS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
_MAX_MESSAGE_CHARS = 1000


@dataclass(frozen=True)
class LimitRules:
    """The bounds; 0 means none. See the settings of the same names."""

    max_body_bytes: int = 0
    max_output_tokens: int = 0
    max_requests_per_key: int = 0
    max_queue_seconds: float = 0.0


class Limits:
    """Refuses, or passes on; finds queue and counts at ``app.state.vtoken.operations``."""

    def __init__(self, app: ASGIApp, *, rules: LimitRules) -> None:
        self._app = app
        self._rules = rules

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if not is_work(scope):
            await self._app(scope, receive, send)
            return
        most = self._rules.max_requests_per_key
        if not most:
            await self._queued(scope, receive, send)
            return
        key, opened = _key_of(scope), scope["app"].state.vtoken.operations.open_requests
        if not opened.enter(key, most):
            text = f"this key has {most} open requests, and may have no more"
            refusal = error_response(429, text, retry_after=1)
            await _counted(scope, "max_requests_per_key", refusal)(scope, receive, send)
            return
        try:
            await self._queued(scope, receive, send)
        finally:
            opened.leave(key)

    async def _queued(self, scope: Scope, receive: Receive, send: Send) -> None:
        if (refusal := self._too_long_queue(scope)) is not None:
            await refusal(scope, receive, send)
            return
        await self._checked(scope, receive, send)

    def _too_long_queue(self, scope: Scope) -> JSONResponse | None:
        rules = self._rules
        if rules.max_queue_seconds:
            wait = scope["app"].state.vtoken.operations.queue.wait_seconds()
            if wait > rules.max_queue_seconds:
                text = (
                    f"a request would wait about {wait:.0f} s before it starts, longer than "
                    f"the {rules.max_queue_seconds:g} s that this server lets it wait"
                )
                answer = error_response(429, text, retry_after=wait - rules.max_queue_seconds)
                return _counted(scope, "max_queue_seconds", answer)
        return None

    async def _checked(self, scope: Scope, receive: Receive, send: Send) -> None:
        limit = self._rules.max_body_bytes
        too_long = bool(limit) and _declared_length(scope) > limit
        messages = None if too_long else await read_body(receive, limit)
        if messages is None:
            await _counted(scope, "max_body_bytes", _too_long(limit))(scope, receive, send)
            return
        if (refusal := await self._bad_value(scope, messages)) is not None:
            await _counted(scope, "max_output_tokens", refusal)(scope, receive, send)
            return
        await self._app(scope, replay(messages, receive), send)

    async def _bad_value(self, scope: Scope, messages: list[Message]) -> JSONResponse | None:
        """vLLM gives shorter answers than it was asked for where the bound is not said here."""
        most = self._rules.max_output_tokens
        for name, value in await _output_fields(scope, messages) if most else ():
            if _number(value) > most:
                text = f"{name} is {value}, and this server generates at most {most} tokens"
                return error_response(400, text[:_MAX_MESSAGE_CHARS], param=name)
        return None


async def _output_fields(scope: Scope, messages: list[Message]) -> list[tuple[str, Any]]:
    """How many tokens the body asks for, by the name of each field that says so."""
    if path_of(scope) in FORM_ROUTES:
        fields = await read_form(scope, messages)
        return [(name, value) for name, value in fields if name in _OUTPUT_FIELDS]
    try:
        document = json.loads(b"".join(m.get("body", b"") for m in messages))
    except (ValueError, RecursionError):  # vLLM says why
        return []
    found: list[tuple[str, Any]] = []
    holders = {"": document}
    if isinstance(document, dict):  # of /inference/v1/generate
        holders["sampling_params."] = document.get("sampling_params")
    for prefix, holder in holders.items():
        if isinstance(holder, dict):
            found += [(prefix + name, holder.get(name)) for name in _OUTPUT_FIELDS]
    return found


def _number(value: object) -> float:
    """As vLLM reads it, to which ``12``, ``12.0`` and ``"12"`` are the same; 0 for what is none."""
    try:
        return float(value) if isinstance(value, int | float | str) else 0.0
    except OverflowError:
        return math.inf
    except ValueError:  # vLLM says why
        return 0.0


def _counted(scope: Scope, reason: str, refusal: JSONResponse) -> JSONResponse:
    scope["app"].state.vtoken.operations.refusals.count(reason)
    return refusal


def _too_long(limit: int) -> JSONResponse:
    return error_response(413, f"the body may have at most {limit} bytes")


def _declared_length(scope: Scope) -> int:
    text = header(scope, b"content-length") or "0"
    return int(text) if text.isascii() and text.isdigit() else 0


def _key_of(scope: Scope) -> str:
    """The key's name, or what tells one key from another; empty for those who send none."""
    name = scope.get("state", {}).get(KEY_NAME)
    if name is not None:
        return f"name:{name}"
    given = header(scope, b"authorization")
    return "" if given is None else hashlib.sha256(given.encode("latin-1")).hexdigest()
