"""Only the bearer of an admin key passes, and nobody while there is none."""

from __future__ import annotations

import pytest

from service.auth import AdminGuard
from service.auth_keys import KeyRing
from service.errors import AdminClosedError, UnauthorizedError

ROUTES = [
    ("GET", "/admin/policy"),
    ("PATCH", "/admin/policy"),
    ("GET", "/admin/policies"),
    ("GET", "/admin/state"),
    ("GET", "/admin/policy/history"),
    ("POST", "/admin/policy/rollback"),
]


def make_keys(*keys: str) -> KeyRing:
    return KeyRing.of("admin", {key: key for key in keys})


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_every_route_is_closed_without_configured_key(make, engine, method, path):
    """403 with what to do, whatever key is sent; the engine is not asked."""
    door = make.door(engine, keys=())
    for key in (None, "", make.key):
        response = door.send(method, path, key=key)
        assert response.status_code == 403
        assert "VTOKEN_ADMIN_KEY" in response.json()["error"]["message"]
    assert engine.calls == []


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_every_route_refuses_missing_and_wrong_key(door, engine, method, path):
    """401 with a challenge, and the engine is not asked."""
    for key in (None, "", "wrong", "correct hors"):
        response = door.send(method, path, key=key)
        assert response.status_code == 401
        assert response.headers["WWW-Authenticate"].startswith("Bearer")
        assert response.json()["error"]["type"] == "Unauthorized"
    assert engine.calls == []


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_every_route_opens_with_the_key(door, method, path):
    """The right key reaches the engine."""
    assert door.send(method, path, content=b"{}").status_code == 200


@pytest.mark.parametrize(
    "header",
    [None, "", "Bearer", "Bearer ", "Basic k", "k", "Bearer k2", "Bearer \udcff", "beare k"],
)
def test_guard_refuses_other_headers(header):
    """Anything but the exact scheme and key is refused, bytes beyond ASCII included."""
    with pytest.raises(UnauthorizedError):
        AdminGuard(make_keys("k")).check(header)


@pytest.mark.parametrize("header", ["Bearer k", "bearer k", "BEARER  k", "Bearer clé"])
def test_guard_accepts_any_configured_key(header):
    """Several keys are valid at once; the scheme's case does not matter."""
    AdminGuard(make_keys("k", "clé")).check(header)


def test_guard_without_keys_is_closed():
    """An empty list of keys is not a key that is empty."""
    guard = AdminGuard(make_keys())
    assert not guard.is_open
    with pytest.raises(AdminClosedError):
        guard.check("Bearer ")
