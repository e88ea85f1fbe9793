"""Builders shared by the service's tests: an engine that answers without vLLM, and an HTTP door."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from service import admin
from service.auth import AdminGuard
from service.auth_keys import KeyRing
from service.endpoint_plugin import ServiceState
from service.engine_link import EngineLink
from tests.service.embedded_server import API_KEY, Server
from vtoken.config import LIVE_FIELDS, VTokenConfig
from vtoken.errors import ConfigError
from vtoken.stats import VTokenStats

ADMIN_KEY = "correct horse"


class FakeEngine:
    """Answers ``vtoken_call`` by the contract, with the real configuration and statistics."""

    def __init__(self, config: VTokenConfig | None = None) -> None:
        self.config = config or VTokenConfig()
        self.stats = VTokenStats()
        self.version = 0
        self.is_dead = False
        self.calls: list[tuple[str, Any]] = []
        self.reply: Any = None  # overrides every answer
        self.error: Exception | None = None  # raised by every call
        self.hangs = False

    async def call_utility_async(self, name: str, op: str = "", payload: Any = None) -> Any:
        if name == "vtoken_pulse":
            return {"running": 0, "waiting": 0, "steps": 0}
        assert name == "vtoken_call"
        self.calls.append((op, payload))
        if self.hangs:
            await asyncio.Event().wait()
        if self.error is not None:
            raise self.error
        return self.reply if self.reply is not None else self._answer(op, payload)

    def _answer(self, op: str, payload: Any) -> dict[str, Any]:
        answers: Mapping[str, Callable[[], Any]] = {
            "snapshot": self.snapshot,
            "get_policy": self._policy,
            "set_policy": lambda: self._set_policy(payload),
            "rollback_policy": self._policy,
            "policy_history": lambda: {"version": self.version, "history": [], "max_changes": 1},
            "state": lambda: {"pool": {"free_blocks": 7}, "requests": []},
            "policies": lambda: [{"name": "streaming_llm"}],
        }
        try:
            return {"ok": answers[op]()}
        except ConfigError as error:
            details = {"field": error.field, "value": repr(error.value), "bound": error.bound}
            return {"error": {"type": "ConfigError", "message": str(error), **details}}
        except LookupError as error:
            return {"error": {"type": "VersionConflict", "message": str(error)}}

    def snapshot(self) -> dict[str, Any]:
        return {
            "stats": self.stats.snapshot(),
            "config": self.config.to_dict(),
            "policy_version": self.version,
        }

    def _policy(self) -> dict[str, Any]:
        values = self.config.to_dict()
        document = {name: values[name] for name in values if name in LIVE_FIELDS}
        return {"version": self.version, "document": document, "mode": self.config.mode}

    def _set_policy(self, payload: dict[str, Any]) -> dict[str, Any]:
        if payload["expected_version"] not in (None, self.version):
            raise LookupError(f"the policy is at version {self.version}")
        self.config = self.config.patched(payload["changes"])
        self.version += 1
        self.stats.inc("policy_changes_total")
        return self._policy()


def make_keys(keys: tuple[str, ...]) -> KeyRing:
    """Admin keys named ``admin-1``, ``admin-2``, …"""
    return KeyRing.of("admin", {f"admin-{n}": key for n, key in enumerate(keys, 1)})


def make_link(
    engine: FakeEngine, *, mode: str = "lazy", timeout_seconds: float = 5.0
) -> EngineLink:
    return EngineLink(
        engine.call_utility_async,
        mode=mode,
        is_dead=lambda: engine.is_dead,
        timeout_seconds=timeout_seconds,
    )


class Door:
    """Sends requests to the admin routes of an app that is connected with ``engine``."""

    def __init__(
        self,
        engine: FakeEngine,
        *,
        keys: tuple[str, ...] = (ADMIN_KEY,),
        mode: str = "lazy",
        timeout_seconds: float = 5.0,
    ) -> None:
        self.app = FastAPI()
        admin.attach(self.app)
        link = make_link(engine, mode=mode, timeout_seconds=timeout_seconds)
        self.app.state.vtoken = ServiceState(link, AdminGuard(make_keys(keys)))

    def send(
        self, method: str, path: str, *, key: str | None = ADMIN_KEY, **options: Any
    ) -> httpx.Response:
        headers = httpx.Headers(options.pop("headers", None))
        if key is not None:
            headers.setdefault("Authorization", f"Bearer {key}")

        async def send() -> httpx.Response:
            transport = httpx.ASGITransport(self.app)
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
                return await client.request(method, path, headers=headers, **options)

        return asyncio.run(send())

    def patch(self, changes: Any, **options: Any) -> httpx.Response:
        return self.send("PATCH", "/admin/policy", json=changes, **options)


@pytest.fixture(autouse=True)
def _no_vtoken_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests see no setting of the person who runs them (where models are cached is kept)."""
    for name in list(os.environ):
        if name.startswith("VTOKEN_") and name not in ("VTOKEN_CACHE_DIR", "VTOKEN_EMBEDDED_GGUF"):
            monkeypatch.delenv(name)


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def door(engine: FakeEngine) -> Door:
    return Door(engine)


@pytest.fixture
def make() -> SimpleNamespace:
    """The builders, for tests that need another engine or door than the usual."""
    return SimpleNamespace(engine=FakeEngine, door=Door, link=make_link, key=ADMIN_KEY)


@pytest.fixture(scope="session")
def embedded_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The one server with the embedded model; see ``SHARED`` in ``tests/conftest.py``."""
    folder = tmp_path_factory.mktemp("embedded_server")
    server = Server(folder / "log.txt", "--api-key", API_KEY)
    try:
        server.wait_until_ready()
        yield server
    finally:
        server.kill_all()


@pytest.fixture
def settings_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """Writes a settings file and names it in the environment."""

    def write(text: str, name: str = "settings.yaml") -> None:
        path = tmp_path / name
        path.write_text(text)
        monkeypatch.setenv("VTOKEN_CONFIG_FILE", str(path))

    return write
