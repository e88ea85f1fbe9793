"""Which key opens which route, over vLLM's real app; and what a refusal looks like."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.serve.middleware.authenticate import AuthenticationMiddleware

from service import arguments, auth_access
from service.admin_port import AdminPortApp
from service.auth import KEY_NAME
from service.endpoint_plugin import ServiceState, make_plugin

KEYS = {"api": "k-api", "admin": "k-admin", "wrong": "k-wrong", "none": None}


class Inner:
    """Stands in for everything behind the access middleware, and remembers who came."""

    def __init__(self, app: FastAPI) -> None:
        self.app = app
        self.names: list[str | None] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            return
        self.names.append(scope.get("state", {}).get(KEY_NAME))
        if scope["type"] == "websocket":
            await send({"type": "websocket.accept"})
            return
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"in"})


class Site:
    """vLLM's app with our plugin and keys; ``inner`` answers instead of vLLM's routes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...] = (), **env: str):
        for name, value in env.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(
            "vllm.entrypoints.launchers.app.attach_endpoint_plugins",
            lambda app, _: make_plugin().attach_router(app),
        )
        args, _ = arguments.parse(list(flags))
        self.app = build_app(args, ("generate",), None)
        auth_access.drop_vllm_guard(self.app)
        self.inner = Inner(self.app)
        guard = next(m for m in self.app.user_middleware if m.cls is auth_access.AccessControl)
        self.rules = guard.kwargs["rules"]
        place = self.app.user_middleware.index(guard)
        del self.app.user_middleware[place + 1 :]
        stack: Any = auth_access.AccessControl(self.inner, rules=self.rules)
        for middleware in reversed(self.app.user_middleware[:place]):
            stack = middleware.cls(stack, *middleware.args, **middleware.kwargs)
        self.app.middleware_stack = stack

    def ask(
        self, path: str, key: str = "none", method: str = "GET", *, admin_port: bool = False, **more
    ) -> httpx.Response:
        token = KEYS.get(key, key)
        headers = {**more.pop("headers", {})}
        if token is not None:
            headers["Authorization"] = f"Bearer {token}"
        app = AdminPortApp(self.app) if admin_port else self.app

        async def send() -> httpx.Response:
            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(transport=transport, base_url="http://t") as client:
                return await client.request(method, path, headers=headers, **more)

        return asyncio.run(send())

    def status(self, path: str, key: str = "none", **more: Any) -> int:
        return self.ask(path, key, **more).status_code


@pytest.fixture
def make_site(monkeypatch):
    return lambda *flags, **env: Site(monkeypatch, flags, **env)


BOTH = {"VTOKEN_API_KEY": "k-api", "VTOKEN_ADMIN_KEY": "k-admin"}
FROM_PAGE = ("--allowed-origins", '["http://page"]')
GUARDED = [
    "/v1/chat/completions",
    "/v1/models",
    "/v1/responses/r/cancel",
    "/tokenize",
    "/invocations",
    "/generative_scoring",
    "/inference/v1/generate",
    "/openapi.json",
    "/docs",
    "/kv_event_sources",
    "/no/such/route",
]
STEERING = ["/admin/policy", "/admin/nothing", "/scale_elastic_ep", "/v1/load_lora_adapter"]
OPEN = ["/health", "/health/ready", "/ping", "/version", "/vtoken/ui", "/vtoken/ui/fields"]


@pytest.mark.parametrize("path", GUARDED)
def test_api_routes_need_an_api_key(make_site, path):
    """Also those that vLLM's own guard leaves open; an admin key is none."""
    site = make_site(**BOTH)
    assert {key: site.status(path, key) for key in KEYS} == {
        "api": 200,
        "admin": 401,
        "wrong": 401,
        "none": 401,
    }
    assert site.inner.names == ["api"]


@pytest.mark.parametrize("path", STEERING)
def test_steering_routes_need_an_admin_key(make_site, path):
    """An API key is none."""
    site = make_site(**BOTH)
    assert {key: site.status(path, key) for key in KEYS} == {
        "api": 401,
        "admin": 200,
        "wrong": 401,
        "none": 401,
    }
    assert site.inner.names == ["admin"]


@pytest.mark.parametrize("path", OPEN)
def test_open_routes_ask_for_nothing(make_site, path):
    """Probes come without keys."""
    site = make_site(**BOTH)
    assert site.status(path) == 200
    assert site.inner.names == [None]


def test_without_keys_the_model_is_open_and_admin_closed(make_site):
    """As vLLM is; 403 says what to set."""
    site = make_site()
    assert site.status("/v1/chat/completions", method="POST") == 200
    assert site.status("/tokenize", "wrong", method="POST") == 200
    answer = site.ask("/admin/policy", "admin")
    assert answer.status_code == 403
    assert "VTOKEN_ADMIN_KEY" in answer.json()["error"]["message"]


def test_unclassified_route_needs_an_api_key(make_site):
    """Whoever added it, nobody has said that it is for everybody."""
    site = make_site(**BOTH)
    site.app.add_api_route("/new/thing", lambda: {})
    assert [site.status("/new/thing", key) for key in ("api", "admin", "none")] == [200, 401, 401]


def test_unclassified_route_is_closed_without_api_keys(make_site):
    """403 names it; what is not there at all is passed on, for the app to answer 404."""
    site = make_site()
    site.app.add_api_route("/new/thing", lambda: {})
    answer = site.ask("/new/thing", "api")
    assert answer.status_code == 403
    assert "/new/thing" in answer.json()["error"]["message"]
    assert site.status("/not/there") == 200


@pytest.mark.parametrize("path", ["/collective_rpc", "/sleep", "/reset_prefix_cache"])
def test_developer_routes_are_closed_to_everybody(make_site, path):
    """Whatever key comes."""
    site = make_site(VLLM_SERVER_DEV_MODE="1", **BOTH)
    assert {site.status(path, key, method="POST") for key in KEYS} == {403}
    assert site.inner.names == []


def test_metrics_are_open_unless_a_key_is_required(make_site):
    """Then an API key or an admin key opens them."""
    assert make_site(**BOTH).status("/metrics") == 200
    site = make_site(VTOKEN_METRICS_KEY_REQUIRED="true", **BOTH)
    for path in ("/metrics", "/metrics/", "/load"):
        assert {key: site.status(path, key) for key in KEYS} == {
            "api": 200,
            "admin": 200,
            "wrong": 401,
            "none": 401,
        }
    nobody = make_site(VTOKEN_METRICS_KEY_REQUIRED="true", VTOKEN_API_KEY="", VTOKEN_ADMIN_KEY="")
    assert nobody.status("/metrics", "api") == 401


def test_vllms_own_keys_join(make_site):
    """--api-key beats VLLM_API_KEY, as with vLLM, and both kinds open the same routes."""
    site = make_site("--api-key", "one", "two", VTOKEN_API_KEY="k-api", VLLM_API_KEY="three")
    assert not any(m.cls is AuthenticationMiddleware for m in site.app.user_middleware)
    found = [site.status("/v1/models", key) for key in ("one", "two", "three", "api")]
    assert found == [200, 200, 401, 200]
    assert site.inner.names == ["vllm-1", "vllm-2", "api"]


def test_vllms_variable_joins(make_site):
    """Alone, too, and with the newline of a Secret made from a file."""
    site = make_site(VLLM_API_KEY="three\n")
    assert [site.status("/v1/models", key) for key in ("three", "none")] == [200, 401]


def test_refusal_has_openais_body(make_site):
    """What OpenAI's clients turn into AuthenticationError, with a challenge and CORS headers."""
    site = make_site(*FROM_PAGE, **BOTH)
    answer = site.ask("/v1/models", "wrong", headers={"Origin": "http://page"})
    error = answer.json()["error"]
    assert answer.status_code == error["code"] == 401
    assert set(error) == {"message", "type", "param", "code"}
    assert "Bearer" in error["message"]
    assert "k-wrong" not in answer.text
    assert answer.headers["WWW-Authenticate"].startswith("Bearer")
    assert answer.headers["Access-Control-Allow-Origin"]


@pytest.mark.parametrize("header", ["Basic k-api", "k-api", "Bearer", "Bearer  ", "Bearer k-api x"])
def test_other_headers_are_refused(make_site, header):
    """Only a bearer token counts."""
    site = make_site(**BOTH)
    assert site.status("/v1/models", headers={"Authorization": header}) == 401


def test_preflight_needs_no_key(make_site):
    """Browsers send none; CORS answers before."""
    site = make_site(*FROM_PAGE, **BOTH)
    headers = {"Origin": "http://page", "Access-Control-Request-Method": "POST"}
    assert site.status("/v1/models", method="OPTIONS", headers=headers) == 200
    assert site.inner.names == []


def test_websocket_needs_a_key(make_site):
    """It is closed before it is accepted."""
    site = make_site(**BOTH)
    sent: list[dict] = []

    async def connect(*headers: tuple[bytes, bytes]) -> None:
        scope = {"type": "websocket", "path": "/v1/realtime", "headers": headers, "app": site.app}

        async def send(message: dict) -> None:
            sent.append(message)

        await auth_access.AccessControl(site.inner, rules=site.rules)(scope, None, send)

    asyncio.run(connect())
    asyncio.run(connect((b"authorization", b"Bearer k-api")))
    assert [m["type"] for m in sent] == ["websocket.close", "websocket.accept"]


def test_admin_port_splits_the_routes(make_site):
    """Admin routes and their page there only, the model here only, probes on both."""
    site = make_site(VTOKEN_ADMIN_PORT="0", **BOTH)
    for path in ("/admin/policy", "/vtoken/ui", "/scale_elastic_ep"):
        assert site.status(path, "admin") == 404
        assert site.status(path, "admin", admin_port=True) == 200
    assert site.status("/admin/policy", "none", admin_port=True) == 401
    for path in ("/v1/models", "/tokenize", "/what"):
        assert site.status(path, "api") == 200
        assert site.status(path, "api", admin_port=True) == 404
    for path in ("/health", "/metrics", "/version"):
        assert site.status(path) == site.status(path, admin_port=True) == 200


def test_without_admin_port_nobody_can_claim_to_be_there(make_site):
    """Everything is on the one port."""
    site = make_site(**BOTH)
    assert site.status("/admin/policy", "admin") == 200
    assert site.status("/v1/models", "api") == 200


def test_guard_is_not_dropped_without_ours():
    """Rather no server than one that asks nobody for a key."""
    with pytest.raises(AssertionError):
        auth_access.drop_vllm_guard(FastAPI())


def test_guard_is_dropped_from_the_stack_that_serves(monkeypatch):
    """vLLM builds it with the app: a change of the list alone would change nothing."""
    monkeypatch.setattr(
        "vllm.entrypoints.launchers.app.attach_endpoint_plugins",
        lambda app, _: make_plugin().attach_router(app),
    )
    args, _ = arguments.parse(["--api-key", "k"])
    app = build_app(args, ("generate",), None)
    built = app.middleware_stack
    auth_access.drop_vllm_guard(app)
    assert app.middleware_stack is built, "another one would count no request"
    layer, names = built or app.build_middleware_stack(), []
    while layer is not None:
        names.append(type(layer).__name__)
        layer = getattr(layer, "app", None)
    assert "AccessControl" in names
    assert "AuthenticationMiddleware" not in names


def test_service_state_still_guards_the_routes_themselves(make, engine):
    """Two locks: the admin routes ask again, wherever they are mounted."""
    door = make.door(engine)
    assert isinstance(door.app.state.vtoken, ServiceState)
    assert door.send("GET", "/admin/policy", key=None).status_code == 401
