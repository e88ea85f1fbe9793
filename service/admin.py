"""The admin routes: look at the token layer and change its policy while requests run.

``GET /admin/policy``            the policy document; its version is the ETag
``PATCH /admin/policy``          JSON merge patch, optionally guarded by If-Match
``GET /admin/policy/history``    who changed what, and when
``POST /admin/policy/rollback``  the values of an earlier version again
``GET /admin/policies``          the catalogue of eviction policies
``GET /admin/state``             pool, running requests, last relocations, skip reasons

Bounds are checked by the engine's configuration alone; here only the form of a request is.
"""

from __future__ import annotations

import logging
from typing import Annotated, Any, cast

from fastapi import APIRouter, Depends, FastAPI, Header, Query, Request, Response
from fastapi.responses import JSONResponse

from service import admin_models as models
from service.admin_body import (
    ENTITY_TAG,
    check_query,
    parse_flag,
    parse_if_match,
    parse_object,
    parse_version,
    read_body,
)
from service.auth import key_name_of, require_admin
from service.engine_link import ChangeOptions, EngineLink
from service.errors import AdminError
from vtoken.history import APPLY_TO, MAX_NOTE_CHARS

logger = logging.getLogger(__name__)

_REASONS = {
    400: "The body is not JSON, or `If-Match` cannot be read.",
    401: "No admin key, or a wrong one.",
    403: "No admin key is configured.",
    409: "The engine runs in mode off, without the token layer.",
    412: "The document is no longer the version in `If-Match`.",
    413: "The body is too long.",
    422: "A setting or parameter is unknown, fixed or outside its bound: names both.",
    500: "The engine answered, but not as agreed.",
    503: "The engine is dead or did not answer in time.",
}
_ETAG = {"ETag": {"description": "The version, in quotes.", "schema": {"type": "string"}}}


def _errors(*codes: int) -> dict[int | str, dict[str, Any]]:
    """Documentation of the error answers of one route."""
    return {c: {"model": models.ErrorBody, "description": _REASONS[c]} for c in codes}


_READ = _errors(401, 403, 409, 500, 503)
_WRITE = _errors(*_REASONS)

router = APIRouter(
    prefix="/admin", tags=["vToken"], dependencies=[Depends(require_admin)], responses=_READ
)


def attach(app: FastAPI) -> None:
    """Add the routes and their error answers to ``app``; mutates it."""
    app.include_router(router)
    app.add_exception_handler(AdminError, _answer_error)


def _link(request: Request) -> EngineLink:
    return cast(EngineLink, request.app.state.vtoken.link)


Link = Annotated[EngineLink, Depends(_link)]


def _change_options(
    request: Request,
    if_match: Annotated[
        str | None,
        Header(
            description='Change only this version, as in `"3"`.',
            json_schema_extra={"pattern": ENTITY_TAG, "examples": ['"3"']},
        ),
    ] = None,
    dry_run: Annotated[
        str,
        Query(
            description="Say what would change, and change nothing.",
            json_schema_extra={"type": "boolean"},
        ),
    ] = "false",
    apply_to: Annotated[
        str,
        Query(
            description="`running`: running and new requests. `new`: requests that arrive from "
            "now on; running ones keep the old document until they end.",
            json_schema_extra={"enum": list(APPLY_TO)},
        ),
    ] = "running",
    note: Annotated[
        str | None,
        Query(
            description="For the history.",
            json_schema_extra={"type": "string", "maxLength": MAX_NOTE_CHARS},
        ),
    ] = None,
) -> ChangeOptions:
    check_query(request.query_params.multi_items(), ("dry_run", "apply_to", "note"))
    every = request.headers.getlist("if-match")  # the parameter is the first
    return ChangeOptions(
        expected_version=parse_if_match(if_match and ", ".join(every)),
        apply_to=apply_to,
        by=key_name_of(request),
        note=note,
        dry_run=parse_flag("dry_run", dry_run),
    )


Options = Annotated[ChangeOptions, Depends(_change_options)]


@router.get("/policy", responses={200: {"model": models.Policy, "headers": _ETAG}})
async def get_policy(link: Link) -> Response:
    """The policy document in force, with its version as ETag."""
    return _policy_response(await link.get_policy())


@router.patch(
    "/policy",
    responses={
        200: {"model": models.ChangedPolicy | models.PolicyPreview, "headers": _ETAG},
        **_WRITE,
    },
    openapi_extra={
        "requestBody": {
            "required": True,
            "content": {
                "application/merge-patch+json": {
                    "schema": models.patch_schema(),
                    "example": {"policy": "streaming_llm", "budget_tokens": 512},
                }
            },
        }
    },
)
async def patch_policy(request: Request, link: Link, options: Options) -> Response:
    """Change fields of the policy document; running requests follow at their next step.

    ``null`` resets a field to its default. With ``If-Match`` the change happens only if the
    document still has that version (412 otherwise). A refused change changes nothing (422).
    """
    changes = parse_object(await read_body(request))
    reply = await link.set_policy(changes, options)
    _log("changed", reply, options)
    return _policy_response(reply)


@router.post(
    "/policy/rollback",
    responses={
        200: {"model": models.ChangedPolicy | models.PolicyPreview, "headers": _ETAG},
        **_WRITE,
    },
    openapi_extra={
        "requestBody": {
            "required": False,
            "content": {
                "application/json": {
                    "schema": models.RollbackTarget.model_json_schema(),
                    "example": {"version": 2},
                }
            },
        }
    },
)
async def rollback_policy(request: Request, link: Link, options: Options) -> Response:
    """Put the values of an earlier version in force again, by default of the one before.

    That is a change like any other: it gets a new version and a line in the history.
    """
    version = parse_version(await read_body(request))
    reply = await link.rollback_policy(version, options)
    _log("rolled back", reply, options)
    return _policy_response(reply)


@router.get("/policy/history", responses={200: {"model": models.PolicyHistory}})
async def get_policy_history(link: Link) -> Response:
    """Who changed what and when, the newest first; ends with the engine."""
    return JSONResponse(await link.policy_history())


@router.get("/policies", responses={200: {"model": models.Policies}})
async def get_policies(link: Link) -> Response:
    """The eviction policies that can be chosen, with the schema of their arguments."""
    return JSONResponse({"policies": await link.policies()})


@router.get("/state", responses={200: {"model": models.State}})
async def get_state(link: Link) -> Response:
    """The pool, the running requests, the last relocations and why others were skipped."""
    return JSONResponse(await link.state())


def _log(what: str, reply: dict[str, Any], options: ChangeOptions) -> None:
    if not options.dry_run:
        logger.info(
            "policy %s by %s for %s requests, now version %s: %s",
            what,
            options.by,
            options.apply_to,
            reply.get("version"),
            reply.get("changes"),
        )


def _policy_response(reply: dict[str, Any]) -> JSONResponse:
    return JSONResponse(reply, headers={"ETag": f'"{reply["version"]}"'})


async def _answer_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, AdminError)
    return JSONResponse(error.body(), status_code=error.status, headers=dict(error.headers))
