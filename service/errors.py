"""Errors of the service: each knows its HTTP status, or that it belongs to the command line.

VTokenError
├── UsageError               the command line cannot be served as written (exit code 2)
├── StartError               the engine or the HTTP server did not start (exit code 1)
└── AdminError               answered on /admin with ``status`` and ``{"error": {…}}``
    ├── BadBodyError         400  the body is not JSON, or a header cannot be read
    ├── UnauthorizedError    401  no admin key, or a wrong one
    ├── AdminClosedError     403  no admin key is configured
    ├── ModeOffError         409  the engine runs without the token layer
    ├── StaleVersionError    412  the policy is no longer the version in If-Match
    ├── BodyTooLargeError    413
    ├── RejectedError        422  a setting is unknown, fixed or outside its bound
    ├── EngineFaultError     500  the engine answered, but not as agreed
    └── EngineGoneError      503  the engine is dead or does not answer in time
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from vtoken.errors import VTokenError


class UsageError(VTokenError):
    """The command line cannot be served as written; the message is one sentence."""


class StartError(VTokenError):
    """The server did not start; the message is one sentence."""


class AdminError(VTokenError):
    """A refusal on the admin routes.

    Attributes:
        status: HTTP status code.
        details: further members of the ``error`` object.
    """

    status: ClassVar[int] = 500
    headers: ClassVar[Mapping[str, str]] = {}

    def __init__(self, message: str, **details: object) -> None:
        self.details = details
        super().__init__(message)

    def body(self) -> dict[str, Any]:
        """The JSON body: ``{"error": {"message", "type", "code", …details}}``."""
        kind = type(self).__name__.removesuffix("Error")
        head = {"message": str(self), "type": kind, "code": self.status}
        return {"error": {**head, **self.details}}


class BadBodyError(AdminError):
    """The request cannot be read."""

    status = 400


class UnauthorizedError(AdminError):
    """No admin key was sent, or a wrong one."""

    status = 401
    headers: ClassVar[Mapping[str, str]] = {"WWW-Authenticate": 'Bearer realm="vtoken-admin"'}


class AdminClosedError(AdminError):
    """No admin key is configured, so nobody may enter."""

    status = 403


class ModeOffError(AdminError):
    """The engine runs in mode ``off``: there is no token layer to look at or to steer."""

    status = 409


class StaleVersionError(AdminError):
    """The policy changed since the caller read the version it sent in ``If-Match``."""

    status = 412


class BodyTooLargeError(AdminError):
    """The request body is longer than a policy document can be."""

    status = 413


class RejectedError(AdminError):
    """The engine refused a setting; ``details`` has field, value and bound."""

    status = 422


class EngineFaultError(AdminError):
    """The engine answered the call with something that is not in the contract."""

    status = 500


class EngineGoneError(AdminError):
    """The engine is dead, shutting down, or too busy to answer in time."""

    status = 503
