"""What our ASGI middlewares share: OpenAI's error body, and reading a body that is passed on."""

from __future__ import annotations

import math
from http import HTTPStatus

from starlette.responses import JSONResponse
from starlette.types import Message, Receive, Scope

from service.text import encodable

_KINDS = {
    400: "BadRequestError",
    413: "RequestTooLargeError",
    429: "RateLimitError",
    503: "ServiceUnavailableError",
    504: "TimeoutError",
}
_OPEN = ("/health", "/metrics", "/admin", "/ping", "/version", "/load")
"""Paths that ask about the server; the others ask the model."""


def path_of(scope: Scope) -> str:
    """The path without the proxy's prefix."""
    return str(scope.get("path", "")).removeprefix(scope.get("root_path", ""))


def is_work(scope: Scope) -> bool:
    """Whether this is a request to the model: what is drained, limited, traced and timed."""
    if scope["type"] != "http" or scope["method"] != "POST":
        return False
    path = path_of(scope)
    return not any(path == one or path.startswith(one + "/") for one in _OPEN)


def error_body(status: int, message: str, param: str | None = None) -> dict[str, object]:
    """OpenAI's error object, as vLLM writes it.

    What a client sent may be repeated in it.
    """
    message, param = encodable(message), None if param is None else encodable(param)
    kind = _KINDS.get(status, HTTPStatus(status).phrase.replace(" ", "") + "Error")
    return {"error": {"message": message, "type": kind, "param": param, "code": status}}


def error_response(
    status: int, message: str, *, param: str | None = None, retry_after: float | None = None
) -> JSONResponse:
    """An error answer, with ``Retry-After`` in whole seconds, at least 1, where it may help."""
    headers = {} if retry_after is None else {"Retry-After": str(max(1, math.ceil(retry_after)))}
    return JSONResponse(error_body(status, message, param), status_code=status, headers=headers)


async def read_body(receive: Receive, max_bytes: int = 0) -> list[Message] | None:
    """The whole body, which Starlette would collect next anyway; ends early if the client does.

    Returns:
        The messages, or ``None`` as soon as they have more than ``max_bytes`` (0: no limit).
    """
    messages, size = [], 0
    while True:
        message = await receive()
        messages.append(message)
        size += len(message.get("body", b""))
        if max_bytes and size > max_bytes:
            return None
        if message["type"] != "http.request" or not message.get("more_body", False):
            return messages


def replay(messages: list[Message], receive: Receive) -> Receive:
    """First what was read, then what comes: the application still hears of a disconnect."""
    waiting = iter(messages)

    async def replayed() -> Message:
        message = next(waiting, None)
        return await receive() if message is None else message

    return replayed


def header(scope: Scope, name: bytes) -> str | None:
    """The first header of this lower-case name."""
    found = next((value for key, value in scope["headers"] if key.lower() == name), None)
    return None if found is None else found.decode("latin-1")
