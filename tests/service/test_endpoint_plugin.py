"""The plugin connects routes, metrics and the ready line with an engine client."""

from __future__ import annotations

import asyncio
from argparse import Namespace
from types import SimpleNamespace

import httpx
import pytest
from fastapi import FastAPI
from prometheus_client import CollectorRegistry, generate_latest

from service import endpoint_plugin
from service.endpoint_plugin import VTokenEndpointPlugin, engine_config, make_plugin
from service.ready import bound_port, ready_text
from service.shared import make_shared
from vtoken.config import VTokenConfig

ARGS = {"host": "127.0.0.1", "uds": None, "root_path": None, "ssl_keyfile": None}


def make_args(**changes) -> Namespace:
    return Namespace(**{**ARGS, "ssl_certfile": None, **changes})


def make_client(engine, config: VTokenConfig | None) -> SimpleNamespace:
    extra = {} if config is None else {"vtoken": config.to_dict()}
    vllm_config = SimpleNamespace(
        additional_config=extra,
        model_config=SimpleNamespace(served_model_name="served"),
        observability_config=SimpleNamespace(otlp_traces_endpoint=None),
    )
    core = SimpleNamespace(call_utility_async=engine.call_utility_async)
    return SimpleNamespace(
        vllm_config=vllm_config, engine_core=core, errored=False, generate=None, shutdown=None
    )


def make_attached_plugin() -> VTokenEndpointPlugin:
    """As vLLM has it before the engine answers."""
    plugin = make_plugin()
    plugin.attach_router(FastAPI())
    return plugin


def make_server(port: int) -> SimpleNamespace:
    listener = SimpleNamespace(getsockname=lambda: ("127.0.0.1", port))
    return SimpleNamespace(started=True, servers=[SimpleNamespace(sockets=[listener])])


@pytest.fixture
def registry(monkeypatch) -> CollectorRegistry:
    """Takes the place of the process-wide registry."""
    registry = CollectorRegistry()
    monkeypatch.setattr(endpoint_plugin, "REGISTRY", registry)
    return registry


def connect(client, state, until) -> None:
    """Run the plugin's background tasks until ``until`` holds."""

    async def run() -> None:
        await make_attached_plugin().init_state(client, state, make_args())
        async with asyncio.timeout(60):
            while not until():
                await asyncio.sleep(0.01)
        for task in state.vtoken.tasks:
            task.cancel()

    asyncio.run(run())


def test_routes_are_attached(monkeypatch):
    """The operations for people and machines, and they are in the OpenAPI document."""
    app = FastAPI()
    make_plugin().attach_router(app)
    paths = app.openapi()["paths"]
    assert {path: set(operations) for path, operations in paths.items()} == {
        "/admin/policy": {"get", "patch"},
        "/admin/policy/history": {"get"},
        "/admin/policy/rollback": {"post"},
        "/admin/policies": {"get"},
        "/admin/state": {"get"},
        "/admin/blocks": {"get"},
        "/health/live": {"get"},
        "/health/ready": {"get"},
        "/health/startup": {"get"},
        "/v1/models/{model_id}": {"get"},
    }


def test_statistics_reach_the_registry(engine, registry):
    """With the served model's name as label, from a poll of the engine."""
    engine.stats.set("waste_ratio", 0.5)
    client = make_client(engine, VTokenConfig())
    connect(
        client,
        SimpleNamespace(),
        lambda: (
            b"waste_ratio{" in generate_latest(registry) and b"} 0.5" in generate_latest(registry)
        ),
    )
    assert b'vtoken_waste_ratio{engine="0",model_name="served"} 0.5' in generate_latest(registry)


def test_mode_off_polls_nothing(engine, registry, capsys):
    """The engine has no utility to call; only policy_info and not_ready are shown."""
    state = SimpleNamespace(server=make_server(8001))
    lines: list[str] = []
    connect(
        make_client(engine, None),
        state,
        lambda: lines.extend(capsys.readouterr().out.splitlines()) or lines,
    )
    assert engine.calls == []
    assert b'mode="off"' in generate_latest(registry)
    assert b"waste_ratio" not in generate_latest(registry)
    assert lines[0] == "vtoken-serve ready on http://127.0.0.1:8001 (model served, mode off)"


def test_ready_line_waits_for_the_server(engine, registry, capsys):
    """Nothing is announced before vLLM's HTTP server listens."""
    state = SimpleNamespace()

    async def run() -> str:
        client = make_client(engine, VTokenConfig())
        await make_attached_plugin().init_state(client, state, make_args())
        await asyncio.sleep(0.2)
        assert capsys.readouterr().out == ""
        state.server = make_server(8123)
        async with asyncio.timeout(60):
            while not (said := capsys.readouterr().out):
                await asyncio.sleep(0.01)
        for task in state.vtoken.tasks:
            task.cancel()
        return said

    ready, example = asyncio.run(run()).splitlines()
    assert ready.startswith("vtoken-serve ready on http://127.0.0.1:8123 (model served, mode lazy")
    assert example.strip().startswith("curl http://127.0.0.1:8123/v1/chat/completions")


@pytest.mark.parametrize(("index", "polls"), [(0, True), (1, False)])
def test_one_of_several_processes_reads_the_statistics(
    engine, registry, capsys, tmp_path, monkeypatch, index, polls
):
    """Each tells the supervisor that it serves, and prints nothing; all answer scrapes."""
    (tmp_path / "metrics").mkdir()
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path / "metrics"))
    shared = make_shared(2, tmp_path)
    shared.index = index
    app, plugin = FastAPI(), make_plugin()
    plugin.attach_router(app)
    state = SimpleNamespace(server=make_server(8001))

    async def run() -> None:
        client = make_client(engine, VTokenConfig())
        await plugin.init_state(client, state, make_args(vtoken_shared=shared))
        async with asyncio.timeout(30):
            while not shared.started.total() or (polls and not shared.metrics_file.exists()):
                await asyncio.sleep(0.01)
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as door:
            assert "vtoken_waste_ratio{" in (await door.get("/metrics")).text
        for task in state.vtoken.tasks:
            task.cancel()

    asyncio.run(run())
    assert capsys.readouterr().out == ""
    assert ("snapshot" in [op for op, _ in engine.calls]) == polls
    assert generate_latest(registry) == b""
    assert state.vtoken.operations.refusals.totals().keys() == shared.refused.keys()


def test_server_without_engine_is_left_alone(registry):
    """vLLM's render-only server has nothing to measure; admin says mode off."""
    state = SimpleNamespace()
    asyncio.run(make_attached_plugin().init_state(None, state, make_args()))
    assert state.vtoken.link.mode == "off"
    assert state.vtoken.tasks == []


@pytest.mark.parametrize("extra", [None, {}, {"theirs": 1}])
def test_engine_without_our_settings_is_off(extra):
    """The mode is what the engine was started with, whatever the environment says."""
    client = SimpleNamespace(vllm_config=SimpleNamespace(additional_config=extra))
    assert engine_config(client).mode == "off"


@pytest.mark.parametrize(
    ("changes", "port", "url"),
    [
        ({"host": "0.0.0.0"}, 80, "http://127.0.0.1:80/v1"),
        ({"host": None}, 80, "http://127.0.0.1:80/v1"),
        ({"host": "::1"}, 80, "http://[::1]:80/v1"),
        ({"host": "box", "root_path": "/llm"}, 80, "http://box:80/llm/v1"),
        ({"ssl_keyfile": "k", "ssl_certfile": "c"}, 443, "https://127.0.0.1:443/v1"),
        ({"uds": "/run/x"}, None, "--unix-socket /run/x http://localhost/v1"),
    ],
)
def test_example_can_be_pasted(changes, port, url):
    """Wildcard, IPv6, TLS, proxy path and Unix socket each give an address that answers."""
    assert url in ready_text(make_args(**changes), port, "m", "mode off").splitlines()[1]


def test_bound_port_of_a_unix_socket_is_none():
    """There is none to show."""
    listener = SimpleNamespace(getsockname=lambda: "/run/x")
    assert bound_port(SimpleNamespace(servers=[SimpleNamespace(sockets=[listener])])) is None
