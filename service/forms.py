"""What a form says: the audio routes of vLLM take forms where the others take JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartException
from starlette.requests import ClientDisconnect, Request
from starlette.types import Message, Scope

from service.asgi import replay

FORM_ROUTES = frozenset({"/v1/audio/transcriptions", "/v1/audio/translations"})

_JSON_FIELDS = ("vllm_xargs",)
"""Fields of these routes that carry JSON."""


async def read_form(scope: Scope, messages: Sequence[Message]) -> list[tuple[str, Any]]:
    """The text fields of a form in their order, with values as in a JSON body; no files.

    A form that vLLM will refuse as such has no fields, so that vLLM can say why.

    Args:
        scope: of the request.
        messages: its whole body, as it came.
    """
    request = Request(scope, replay(list(messages), _disconnected))
    try:
        async with request.form() as form:
            items = form.multi_items()
    except (HTTPException, MultiPartException, ClientDisconnect, ValueError):
        return []
    return [(name, _read(name, value)) for name, value in items if isinstance(value, str)]


def _read(name: str, value: str) -> Any:
    if name not in _JSON_FIELDS:
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):  # vLLM says why
        return value


async def _disconnected() -> Message:
    return {"type": "http.disconnect"}
