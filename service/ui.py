"""``GET /vtoken/ui``: the fragmentation view, a static page that reads the admin routes.

The page itself is public and knows nothing: what it shows it fetches with the admin key that its
reader types in. It loads nothing from elsewhere and its Content-Security-Policy forbids it to, so
the key can only go to the server that the page came from.
"""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
from functools import cache
from importlib.resources import files
from typing import Any, Literal, get_args, get_origin, get_type_hints

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.responses import JSONResponse

from service.flags import field_docs
from service.settings.token_layer import is_list, is_object
from vtoken.config import LIVE_FIELDS, VTokenConfig

CONTENT_SECURITY_POLICY = "; ".join(
    [
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "connect-src 'self'",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    ]
)
_HEADERS = {
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",  # ask again, and be told 304
}
_NEEDS_RESTART = ("mode", "off")
_TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css"}

router = APIRouter(prefix="/vtoken/ui", include_in_schema=False)


def attach(app: FastAPI) -> None:
    """Add the page's routes to ``app``; mutates it."""
    app.include_router(router)


@router.get("")
async def get_page(request: Request) -> Response:
    """The page."""
    return _file_response("index.html", request)


@router.get("/fields")
async def get_fields() -> JSONResponse:
    """What the policy form has to know about each setting that can change."""
    return JSONResponse({"fields": policy_fields()}, headers=_HEADERS)


@router.get("/{name}")
async def get_file(name: str, request: Request) -> Response:
    """A script or style of the page."""
    return _file_response(name, request)


def policy_fields() -> list[dict[str, Any]]:
    """Of each live setting: ``name``, ``kind``, ``choices``, ``help``; in the order of the class.

    ``kind`` is ``choice``, ``boolean``, ``integer``, ``number``, ``list``, ``object`` or ``text``.
    """
    hints, docs = get_type_hints(VTokenConfig), field_docs()
    return [
        {
            "name": field.name,
            "kind": _kind(hints[field.name]),
            "choices": [
                c for c in _choices(hints[field.name]) if (field.name, c) != _NEEDS_RESTART
            ],
            "help": inspect.cleandoc(docs[field.name]).replace("``", ""),
        }
        for field in dataclasses.fields(VTokenConfig)
        if field.name in LIVE_FIELDS
    ]


def _kind(hint: Any) -> str:
    if get_origin(hint) is Literal:
        return "choice"
    if is_object(hint):
        return "object"
    if is_list(hint):
        return "list"
    kinds = [kind for kind in get_args(hint) or (hint,) if kind is not type(None)]
    return {bool: "boolean", int: "integer", float: "number"}.get(kinds[0], "text")


def _choices(hint: Any) -> tuple[str, ...]:
    return get_args(hint) if get_origin(hint) is Literal else ()


def _file_response(name: str, request: Request) -> Response:
    found = _static_files().get(name)
    if found is None:
        return Response(status_code=404)
    content, kind = found
    headers = {**_HEADERS, "ETag": f'"{hashlib.sha256(content).hexdigest()[:16]}"'}
    if request.headers.get("if-none-match") == headers["ETag"]:
        return Response(status_code=304, headers=headers)
    return Response(content, media_type=kind, headers=headers)


@cache
def _static_files() -> dict[str, tuple[bytes, str]]:
    """Name to content and type: these files and no others can be asked for."""
    folder = files("service") / "static"
    found = {}
    for item in folder.iterdir():
        suffix = "." + item.name.rpartition(".")[2]
        if suffix in _TYPES:
            found[item.name] = (item.read_bytes(), _TYPES[suffix])
    return found
