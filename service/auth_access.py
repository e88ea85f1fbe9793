"""Asks every request for the key that its route needs: a pure-ASGI middleware.

It stands in for vLLM's own ``--api-key`` middleware, which looks at four prefixes only; the keys
given to vLLM join the others. The name of the key, never the key, is left in ``scope["state"]``
for limits and logs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI
from starlette.responses import JSONResponse
from starlette.routing import Match
from starlette.types import ASGIApp, Receive, Scope, Send

from service.asgi import error_response, header
from service.auth import KEY_NAME, AdminGuard, bearer_token
from service.auth_keys import KeyRing
from service.errors import AdminClosedError, AdminError, UnauthorizedError
from service.routes import Access, access_of, route_path

ON_ADMIN_PORT = "vtoken_admin_port"
"""Set in the scope of what came in through the admin port."""

_NOT_FOUND = "there is no such route on this port"


@dataclass(frozen=True)
class AccessRules:
    """Keys, and what they are for.

    Attributes:
        admin: knows the admin keys.
        api: the API keys; while there is none, the model's routes are open.
        metrics_key_required: whether metrics need an API or admin key.
        has_admin_port: whether the admin routes have a port of their own.
    """

    admin: AdminGuard
    api: KeyRing
    metrics_key_required: bool = False
    has_admin_port: bool = False


class Refusal(Exception):
    """What is answered instead of passing a request on."""

    def __init__(self, response: JSONResponse) -> None:
        self.response = response
        super().__init__(response.status_code)


class AccessControl:
    """See the module."""

    def __init__(self, app: ASGIApp, *, rules: AccessRules) -> None:
        self._app = app
        self._rules = rules
        self._checks: dict[Access, Callable[[Scope], str | None]] = {
            Access.PUBLIC: lambda _: None,
            Access.METRICS: self._metrics,
            Access.API: self._api,
            Access.ADMIN: self._admin,
            Access.ADMIN_PAGE: lambda _: None,
            Access.DENIED: _denied,
            Access.UNKNOWN: self._unknown,
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on with the name of its key, or refuse it."""
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        try:
            access = access_of(route_path(scope))
            self._check_port(scope, access)
            name = self._checks[access](scope)
        except Refusal as refusal:
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1008, "reason": ""})
            else:
                await refusal.response(scope, receive, send)
            return
        if name is not None:
            scope.setdefault("state", {})[KEY_NAME] = name
        await self._app(scope, receive, send)

    def _check_port(self, scope: Scope, access: Access) -> None:
        if not self._rules.has_admin_port:
            return
        refused = (
            (Access.API, Access.UNKNOWN)
            if scope.get(ON_ADMIN_PORT)
            else (Access.ADMIN, Access.ADMIN_PAGE)
        )
        if access in refused:
            raise Refusal(error_response(404, _NOT_FOUND))

    def _admin(self, scope: Scope) -> str:
        try:
            return self._rules.admin.check(header(scope, b"authorization"))
        except AdminError as error:
            raise Refusal(_admin_answer(error)) from error

    def _api(self, scope: Scope) -> str | None:
        if self._rules.api.is_empty:
            return None
        token = bearer_token(header(scope, b"authorization"))
        name = None if token is None else self._rules.api.name_of(token)
        if name is None:
            raise _unauthorized("send an API key as Authorization: Bearer <key>")
        return name

    def _metrics(self, scope: Scope) -> str | None:
        if not self._rules.metrics_key_required:
            return None
        token = bearer_token(header(scope, b"authorization"))
        if token is not None:
            try:
                return self._rules.admin.check(f"Bearer {token}")
            except (AdminClosedError, UnauthorizedError):
                if name := self._rules.api.name_of(token):
                    return name
        raise _unauthorized("metrics need an API or admin key: Authorization: Bearer <key>")

    def _unknown(self, scope: Scope) -> str | None:
        if not self._rules.api.is_empty:
            return self._api(scope)
        if any(route.matches(scope)[0] != Match.NONE for route in scope["app"].routes):
            path = route_path(scope)
            text = f"the route {path} is closed: it is not in the table of routes, so it needs "
            raise Refusal(error_response(403, text + "an API key, and none is configured"))
        return None  # the app answers 404


def install(app: FastAPI, rules: AccessRules) -> None:
    """Guard every route of ``app``, inside what vLLM puts around it; mutates it.

    Call it before vLLM adds its own middlewares, so that refusals have their CORS headers.
    """
    app.add_middleware(AccessControl, rules=rules)


def drop_vllm_guard(app: FastAPI) -> None:
    """Take vLLM's API key middleware out, whose keys have joined ours; mutates ``app``.

    Call it before the first request, after the app was built.
    """
    from vllm.entrypoints.serve.middleware.authenticate import AuthenticationMiddleware

    classes: list[Any] = [middleware.cls for middleware in app.user_middleware]
    assert AccessControl in classes, "nothing else asks for keys"
    app.user_middleware[:] = [
        middleware
        for middleware, cls in zip(app.user_middleware, classes, strict=True)
        if cls is not AuthenticationMiddleware
    ]
    # vLLM has built the stack already. A second one would count no request: the HTTP metrics belong
    # to the first.
    layer: Any = app.middleware_stack
    while (inner := getattr(layer, "app", None)) is not None:
        if isinstance(inner, AuthenticationMiddleware):
            layer.app = inner.app
        else:
            layer = inner


def _denied(scope: Scope) -> None:
    text = f"{route_path(scope)} is a developer route of vLLM, and these are not served"
    raise Refusal(error_response(403, text))


def _unauthorized(text: str) -> Refusal:
    response = error_response(401, text)
    response.headers["WWW-Authenticate"] = 'Bearer realm="vtoken"'
    return Refusal(response)


def _admin_answer(error: AdminError) -> JSONResponse:
    return JSONResponse(error.body(), status_code=error.status, headers=dict(error.headers))
