"""The admin routes: look at the token layer and change its policy while requests run.

``GET /admin/policy``     the policy document; its version is the ETag
``PATCH /admin/policy``   JSON merge patch, optionally guarded by If-Match
``GET /admin/policies``   the catalogue of eviction policies
``GET /admin/state``      pool, running requests, last relocations, skip reasons

Bounds are checked by the engine's configuration alone; here only the form of a request is.
"""

from __future__ import annotations

import json
import logging
import re
from typing import Annotated, Any, NoReturn, cast

from fastapi import APIRouter, Depends, FastAPI, Header, Request
from fastapi.responses import JSONResponse

from service.auth import require_admin
from service.engine_link import EngineLink
from service.errors import AdminError, BadBodyError, BodyTooLargeError, RejectedError

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 64 * 1024
_MAX_INT_DIGITS = 18  # what the message to the engine can carry is 64 bits wide
_ENTITY_TAG = re.compile(r'(?:W/)?"(\d{1,18})"')

router = APIRouter(prefix="/admin", tags=["vToken"], dependencies=[Depends(require_admin)])


def attach(app: FastAPI) -> None:
    """Add the routes and their error answers to ``app``; mutates it."""
    app.include_router(router)
    app.add_exception_handler(AdminError, _answer_error)


def _link(request: Request) -> EngineLink:
    return cast(EngineLink, request.app.state.vtoken.link)


@router.get("/policy")
async def get_policy(link: Annotated[EngineLink, Depends(_link)]) -> JSONResponse:
    """The policy document in force, with its version as ETag."""
    return _policy_response(await link.get_policy())


@router.patch(
    "/policy",
    openapi_extra={
        "requestBody": {"content": {"application/merge-patch+json": {"schema": {"type": "object"}}}}
    },
)
async def patch_policy(
    request: Request,
    link: Annotated[EngineLink, Depends(_link)],
    if_match: Annotated[str | None, Header()] = None,
) -> JSONResponse:
    """Change fields of the policy document; running requests follow at their next step.

    ``null`` resets a field to its default. With ``If-Match`` the change happens only if the
    document still has that version (412 otherwise). A refused change changes nothing (422).
    """
    expected = parse_if_match(if_match)
    changes = parse_changes(await _read_body(request))
    reply = await link.set_policy(changes, expected)
    logger.info("policy version %s: %s", reply.get("version"), changes)
    return _policy_response(reply)


@router.get("/policies")
async def get_policies(link: Annotated[EngineLink, Depends(_link)]) -> JSONResponse:
    """The eviction policies that can be chosen, with the schema of their arguments."""
    return JSONResponse({"policies": await link.policies()})


@router.get("/state")
async def get_state(link: Annotated[EngineLink, Depends(_link)]) -> JSONResponse:
    """The pool, the running requests, the last relocations and why others were skipped."""
    return JSONResponse(await link.state())


def parse_if_match(header: str | None) -> int | None:
    """The version in an ``If-Match`` header; ``None`` if absent or ``*``.

    Raises:
        BadBodyError: it is not one entity tag as this server gives out.
    """
    if header is None or header.strip() == "*":
        return None
    found = _ENTITY_TAG.fullmatch(header.strip())
    if found is None:
        raise BadBodyError('If-Match must be * or one version in quotes, as in If-Match: "3"')
    return int(found[1])


def parse_changes(body: bytes) -> dict[str, Any]:
    """The merge patch in ``body``.

    Raises:
        BadBodyError: the body is not JSON, or has numbers or text that JSON does not allow.
        RejectedError: it is JSON but not an object.
    """
    try:
        document = json.loads(body, parse_constant=_refuse_constant, parse_int=_parse_int)
        json.dumps(document, ensure_ascii=False).encode()  # refuses lone surrogates
    except (ValueError, RecursionError) as error:
        raise BadBodyError(f"the body is not valid JSON: {error}") from error
    if not isinstance(document, dict):
        raise RejectedError(
            "the body must be a JSON object with the fields to change",
            field=None,
            value=type(document).__name__,
            bound="a JSON object",
        )
    return document


async def _read_body(request: Request) -> bytes:
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            raise BodyTooLargeError(f"the body may have at most {MAX_BODY_BYTES} bytes")
    return body


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _parse_int(digits: str) -> int:
    if len(digits) > _MAX_INT_DIGITS:
        raise ValueError("a whole number is too long")
    return int(digits)


def _policy_response(reply: dict[str, Any]) -> JSONResponse:
    return JSONResponse(reply, headers={"ETag": f'"{reply["version"]}"'})


async def _answer_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, AdminError)
    return JSONResponse(error.body(), status_code=error.status, headers=dict(error.headers))
