"""Per-request control on the way in and out: a pure-ASGI middleware around vLLM's own routes.

In: ``vllm_xargs`` keys that start with ``vtoken_`` are checked before vLLM sees the request, so
that a wrong value is a 400 for streams, too (vLLM starts a stream before the engine looks at the
parameters), on every route that runs a model; where nothing would come of a key, it is refused.
Out: with ``vtoken_receipt`` the answer ends with a receipt; see :mod:`service.receipts`. Requests
that name nothing of ours pass unread and unchanged.
"""

from __future__ import annotations

import json
import logging
import secrets
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import parse_qsl

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service import request_ids
from service.asgi import error_response, path_of, read_body, replay
from service.engine_link import EngineLink
from service.forms import FORM_ROUTES, read_form
from service.receipts import ReceiptSender
from vtoken.config import unknown_field_hint
from vtoken.errors import ConfigError
from vtoken.policies.registry import policy_for
from vtoken.request_options import KEYS, NO_OPTIONS, PREFIX, RequestOptions

logger = logging.getLogger(__name__)

WITH_RECEIPT = frozenset({"/invocations", "/v1/chat/completions", "/v1/completions"})
"""Of these the first takes what the other two take, and answers as they do."""

_XARGS = ("vllm_xargs",)
_NO_OPTIONS = (
    "/classify",
    "/cohere/v2/chat",
    "/generative_scoring",
    "/pooling",
    "/rerank",
    "/score",
    "/v1/audio/transcriptions",
    "/v1/audio/translations",
    "/v1/embeddings",
    "/v1/rerank",
    "/v1/score",
    "/v1/systemone",
    "/v2/embed",
    "/v2/rerank",
)
PLACES: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(_NO_OPTIONS, ()),
    "/inference/v1/generate": ("sampling_params", "extra_args"),
    "/invocations": _XARGS,
    "/v1/chat/completions": _XARGS,
    "/v1/chat/completions/batch": _XARGS,
    "/v1/completions": _XARGS,
    "/v1/messages": _XARGS,
    "/v1/responses": _XARGS,
}
"""Every route that runs a model, and where in its body options stand; ``()``: nowhere, for vLLM
makes its requests to the engine from other members, or the route is of models without a token
layer (embeddings, scores, sound)."""

CHECKED = frozenset(PLACES)

_HOLDERS = frozenset(name for place in PLACES.values() for name in place)

MAX_BODY_BYTES = 4 * 2**20
"""A longer body may not name anything of ours: it is not parsed here."""

_MAX_MESSAGE_CHARS = 1000
_MAX_NAME_CHARS = 200
_ALWAYS_KEPT = ("sink_tokens", "recent_tokens")
# "vtoken_" as it is, with an escaped letter, or in UTF-16 or UTF-32, which JSON allows too.
_HINTS = (b"vtoken_", b"\\u00", b"\x00")
_FORM_HINTS = _HINTS[:2]  # sound is full of zeros


class RequestControl:
    """Checks options, and answers with receipts; finds ``app.state.vtoken`` when first asked."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, unchanged unless it asks for a receipt, or refuse it."""
        path = path_of(scope)
        if scope["type"] != "http" or scope["method"] != "POST" or path not in CHECKED:
            await self._app(scope, receive, send)
            return
        messages = await read_body(receive) or []
        try:
            document, options = await _read(scope, messages)
        except ConfigError as error:
            await _refusal(error)(scope, receive, send)
            return
        if not options.receipt:
            await self._app(scope, replay(messages, receive), send)
            return
        key = secrets.token_hex(16)
        document["vllm_xargs"]["vtoken_receipt"] = key
        body = json.dumps(document).encode()
        messages = [{"type": "http.request", "body": body, "more_body": False}]
        link = scope["app"].state.vtoken.link
        sender = ReceiptSender(send, lambda: _receipt(link, key))
        await self._app(_with_length(scope, len(body)), replay(messages, receive), sender)


async def _read(scope: Scope, messages: Sequence[Message]) -> tuple[dict[str, Any], RequestOptions]:
    """What the request says, and what of it is ours; nothing if it cannot name us.

    Raises:
        ConfigError: as :func:`read_options`.
    """
    path, body = path_of(scope), b"".join(m.get("body", b"") for m in messages)
    query = scope.get("query_string", b"").decode("latin-1")
    named: list[tuple[str, Any]] = [*parse_qsl(query, keep_blank_values=True)]
    if path in FORM_ROUTES and any(hint in body for hint in _FORM_HINTS):
        named += await read_form(scope, messages)
    for name, value in named:
        _check_place({name: value}, path)
    if path in FORM_ROUTES:
        return {}, NO_OPTIONS
    if not any(hint in body for hint in _HINTS):
        return {}, NO_OPTIONS
    link: EngineLink = scope["app"].state.vtoken.link
    await link.refresh()
    return read_options(body, link, path)


def read_options(body: bytes, link: EngineLink, path: str) -> tuple[dict[str, Any], RequestOptions]:
    """The request's document and what it says about its own eviction.

    A body that vLLM will refuse as such gives no options, so that vLLM can say why.

    Args:
        body: as sent.
        link: to the engine; knows mode and policy document.
        path: the route.

    Raises:
        ConfigError: a key is unknown, misplaced or out of bounds, or the mode is ``off``.
    """
    if len(body) > MAX_BODY_BYTES:
        if b"vtoken_" in body:
            bound = f"bodies that name it may have at most {MAX_BODY_BYTES} bytes"
            raise ConfigError("vtoken_*", f"in {len(body)} bytes", bound)
        return {}, NO_OPTIONS
    try:
        document = json.loads(body, object_pairs_hook=_members)
    except (ValueError, RecursionError):
        return {}, NO_OPTIONS
    if not isinstance(document, dict):
        return {}, NO_OPTIONS
    _check_place(document, path)
    ours = _ours_at(document, PLACES[path])
    if not ours:
        return document, NO_OPTIONS
    first = next(iter(ours))
    if link.mode == "off":
        bound = "this server runs in mode off, without the token layer"
        raise ConfigError(first, ours[first], bound)
    if document.get("use_beam_search"):
        raise ConfigError(first, ours[first], "not together with use_beam_search")
    return document, _checked(RequestOptions.parse(ours), link, path)


def _members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of a body. Of two members of one name the last would count, unseen."""
    found = dict(pairs)
    if len(found) < len(pairs):
        times = Counter(name for name, _ in pairs)
        for name, value in pairs:
            if times[name] > 1 and (name.startswith(PREFIX) or name in _HOLDERS):
                raise ConfigError(name, value, "given once")
    return found


def _checked(options: RequestOptions, link: EngineLink, path: str) -> RequestOptions:
    """What the server knows beyond the form: policies, the present protection, the route."""
    if isinstance(options.receipt, str):  # the key is ours to choose
        raise ConfigError("vtoken_receipt", options.receipt, "true or false")
    if options.receipt and path not in WITH_RECEIPT:
        raise ConfigError("vtoken_receipt", True, f"only on {', '.join(sorted(WITH_RECEIPT))}")
    if options.policy_key is not None:
        policy_for(*options.policy_key, 0)
    options.check_budget_above(sum(link.document.get(name, 0) for name in _ALWAYS_KEPT))
    return options


def _check_place(document: dict[str, Any], path: str) -> None:
    """vLLM ignores unknown fields of a body: what was meant for us must not get lost there."""
    right = PLACES[path]
    misplaced = _ours_at(document, ())
    for place in {*PLACES.values()} - {right}:
        misplaced |= _ours_at(document, place)
    for name, value in misplaced.items():
        hint = "" if name in KEYS else "; " + unknown_field_hint(name, KEYS, "keys")
        where = f"only inside {'.'.join(right)}" if right else f"not on {path}"
        raise ConfigError(name, value, where + hint)


def _ours_at(document: dict[str, Any], place: tuple[str, ...]) -> dict[str, Any]:
    """The members of the object there that are ours; none if there is no object."""
    found: Any = document
    for name in place:
        found = found.get(name) if isinstance(found, dict) else None
    items = found.items() if isinstance(found, dict) else ()
    return {name: value for name, value in items if name.startswith(PREFIX)}


def _refusal(error: ConfigError) -> JSONResponse:
    """OpenAI's error body, as vLLM writes it."""
    text = str(error)
    if len(text) > _MAX_MESSAGE_CHARS:
        text = text[:_MAX_MESSAGE_CHARS] + f"… is not allowed: {error.bound}"
    return error_response(400, text, param=error.field[:_MAX_NAME_CHARS])


async def _receipt(link: EngineLink, key: str) -> dict[str, Any]:
    """What the client sees of it; a receipt can be had once, so the trace's part is kept here."""
    receipt = await link.receipt(key)
    if (record := request_ids.current.get()) is not None:
        record.receipt = receipt
    return {name: value for name, value in receipt.items() if name != "work"}


def _with_length(scope: Scope, length: int) -> Scope:
    headers = [(k, v) for k, v in scope["headers"] if k.lower() != b"content-length"]
    return {**scope, "headers": [*headers, (b"content-length", str(length).encode())]}
