"""Who may enter ``/admin``: the bearer of an admin key, and nobody while no key is set.

An API key does not open it. Which route needs which key is in :mod:`service.routes`; the
middleware that asks for API keys is in :mod:`service.auth_access`.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import Request, Security
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from service.auth_keys import KeyRing
from service.errors import AdminClosedError, UnauthorizedError

KEY_NAME = "vtoken_key_name"
"""Where the name of the key (never the key) stands in ``scope["state"]``."""

_bearer = HTTPBearer(auto_error=False, scheme_name="AdminKey", description="An admin key.")


class AdminGuard:
    """Lets the bearers of admin keys pass."""

    def __init__(self, keys: KeyRing) -> None:
        self._keys = keys

    @property
    def is_open(self) -> bool:
        """Whether any key is configured."""
        return not self._keys.is_empty

    def check(self, authorization: str | None) -> str:
        """The name of the admin key in ``authorization`` (the header's value).

        Raises:
            AdminClosedError: no admin key is configured.
            UnauthorizedError: the header is missing, not ``Bearer …``, or the key is wrong.
        """
        if not self.is_open:
            raise AdminClosedError(
                "admin is closed: set VTOKEN_ADMIN_KEY, VTOKEN_ADMIN_KEY_FILE or "
                "VTOKEN_ADMIN_KEYS_DIR and restart"
            )
        token = bearer_token(authorization)
        name = None if token is None else self._keys.name_of(token)
        if name is None:
            raise UnauthorizedError("send an admin key as Authorization: Bearer <key>")
        return name


async def require_admin(
    request: Request,
    _documented: Annotated[HTTPAuthorizationCredentials | None, Security(_bearer)],
) -> None:
    """FastAPI dependency: lets a request pass only with an admin key; see :class:`AdminGuard`."""
    guard: AdminGuard = request.app.state.vtoken.guard
    name = guard.check(request.headers.get("authorization"))
    request.scope.setdefault("state", {})[KEY_NAME] = name


def key_name_of(request: Request) -> str:
    """The name of the key that let the request in."""
    return str(request.scope.get("state", {}).get(KEY_NAME, "unknown"))


def bearer_token(authorization: str | None) -> str | None:
    """The token of a ``Bearer`` header; ``None`` if it is none."""
    scheme, _, token = (authorization or "").partition(" ")
    return token.strip() or None if scheme.lower() == "bearer" else None
