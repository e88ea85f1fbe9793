"""Who may enter ``/admin``: the bearer of an admin key, and nobody while no key is set.

vLLM's own ``--api-key`` guards the paths under ``/v1``, ``/v2``, ``/inference`` and ``/cohere``
only. ``/admin`` has its own key, and an API key does not open it; ``/metrics``, ``/health`` and
``/version`` stay open with either, so keep them inside your network.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable

from fastapi import Request

from service.errors import AdminClosedError, UnauthorizedError


class AdminGuard:
    """Compares bearer tokens with the configured admin keys in constant time."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = tuple(_digest(key) for key in keys)

    @property
    def is_open(self) -> bool:
        """Whether any key is configured."""
        return bool(self._digests)

    def check(self, authorization: str | None) -> None:
        """Return if ``authorization`` (the header's value) carries an admin key.

        Raises:
            AdminClosedError: no admin key is configured.
            UnauthorizedError: the header is missing, not ``Bearer …``, or the key is wrong.
        """
        if not self.is_open:
            raise AdminClosedError(
                "admin is closed: set VTOKEN_ADMIN_KEY or VTOKEN_ADMIN_KEY_FILE and restart"
            )
        scheme, _, token = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not self._knows(token.strip()):
            raise UnauthorizedError("send the admin key as Authorization: Bearer <key>")

    def _knows(self, token: str) -> bool:
        digest = _digest(token)
        known = False
        for other in self._digests:  # no early exit: time must not tell which key is near
            known |= hmac.compare_digest(digest, other)
        return known


async def require_admin(request: Request) -> None:
    """FastAPI dependency: lets a request pass only with an admin key; see :class:`AdminGuard`."""
    request.app.state.vtoken.guard.check(request.headers.get("authorization"))


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
