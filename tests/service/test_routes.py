"""Every route of vLLM's real app, with our plugin in it, is classified; unknown ones are closed."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from fastapi import FastAPI
from starlette.routing import Mount
from vllm import entrypoints
from vllm.entrypoints.launchers.app import build_app

from service import arguments
from service.endpoint_plugin import make_plugin
from service.forms import FORM_ROUTES
from service.routes import ROUTES, TABLE, Access, access_of, route_path
from service.settings.vllm_variables import vllm_environment
from vtoken.errors import ConfigError

METHODS = ("get", "post", "put", "patch", "delete", "websocket", "add_api_route", "api_route")
TASKS = ("generate", "render", "transcription", "realtime")
ELSEWHERE = {"/ready", "/readyz"}
"""Of vLLM's other servers."""


def make_app(monkeypatch: pytest.MonkeyPatch, *flags: str, tasks=TASKS, **environment) -> FastAPI:
    """vLLM's app as the server builds it, without an engine behind it."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(
        "vllm.entrypoints.launchers.app.attach_endpoint_plugins",
        lambda app, _: make_plugin().attach_router(app),
    )
    args, _ = arguments.parse(list(flags))
    return build_app(args, tasks, None)


def paths_of(app: FastAPI) -> Iterator[str]:
    """Path templates; of a mounted app all that is under it."""
    for route in app.routes:
        yield route.path + ("/{path:path}" if isinstance(route, Mount) else "")


def paths_in_source() -> set[str]:
    """Every path that any router of vLLM's entrypoints names, whatever it depends on."""
    found = set()
    for file in Path(entrypoints.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr in METHODS
                and node.args
                and isinstance(node.args[0], ast.Constant)
                and str(node.args[0].value).startswith("/")
            ):
                found.add(node.args[0].value)
    return found


@pytest.mark.parametrize(
    ("flags", "tasks", "environment"),
    [
        ((), TASKS, {}),
        (("--enable-offline-docs",), TASKS, {}),
        (("--enable-tokenizer-info-endpoint",), ("generate",), {}),
        ((), TASKS, {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}),
    ],
)
def test_every_route_is_classified(monkeypatch, flags, tasks, environment):
    """A route that nobody thought of fails here, before anybody can ask for it."""
    app = make_app(monkeypatch, *flags, tasks=tasks, **environment)
    paths = set(paths_of(app))
    assert {"/v1/chat/completions", "/metrics", "/admin/policy", "/vtoken/ui"} <= paths
    unknown = sorted(path for path in paths if path not in TABLE)
    assert not unknown, f"classify in service/routes.py: {unknown}"


def test_every_route_in_vllms_source_is_classified():
    """Those of other models and flags, too."""
    paths = paths_in_source()
    assert {"/v1/embeddings", "/fault_tolerance/apply", "/v1/realtime", "/sleep"} <= paths
    unknown = sorted(paths - TABLE.keys() - ELSEWHERE)
    assert not unknown, f"classify in service/routes.py: {unknown}"


def test_every_route_of_ours_is_what_it_should_be(monkeypatch):
    """What steers the engine needs an admin key, what asks the model an API key."""
    for path in paths_of(make_app(monkeypatch)):
        if path.startswith("/admin"):
            assert TABLE[path] is Access.ADMIN
        if path.startswith(("/v1/c", "/v1/r", "/v1/m", "/tokenize", "/invocations", "/inference")):
            assert TABLE[path] is Access.API, path


def test_developer_routes_are_denied(monkeypatch):
    """All that vLLM adds in developer mode, whoever starts it; our command refuses the mode."""
    without = set(paths_of(make_app(monkeypatch)))
    added = set(paths_of(make_app(monkeypatch, VLLM_SERVER_DEV_MODE="1"))) - without
    assert {"/collective_rpc", "/sleep", "/reset_prefix_cache"} <= added
    assert {TABLE.get(path) for path in added} == {Access.DENIED}
    with pytest.raises(ConfigError, match="VLLM_SERVER_DEV_MODE"):
        vllm_environment()


def test_no_route_is_classified_twice():
    """Else the order of the table would decide."""
    listed = [path for paths in ROUTES.values() for path in paths]
    assert len(listed) == len(set(listed)) == len(TABLE)


@pytest.mark.parametrize(
    ("path", "access"),
    [
        ("/health", Access.PUBLIC),
        ("/health/", Access.UNKNOWN),
        ("/health/other", Access.UNKNOWN),
        ("/metrics/", Access.METRICS),
        ("/metrics/anything", Access.METRICS),
        ("/v1/responses/resp_1/cancel", Access.API),
        ("/v1/responses/a/b", Access.UNKNOWN),
        ("/admin/what/is/this", Access.ADMIN),
        ("/administer", Access.UNKNOWN),
        ("//health", Access.UNKNOWN),
        ("/vtoken/ui/x.js", Access.ADMIN_PAGE),
        ("/vtoken/ui/a/b", Access.UNKNOWN),
        ("", Access.UNKNOWN),
    ],
)
def test_paths_are_matched_whole(path, access):
    """Nothing becomes public by looking like something public."""
    assert access_of(path) is access


@pytest.mark.parametrize(
    ("root", "path", "inside"),
    [
        ("", "/v1/models", "/v1/models"),
        ("/llm", "/llm/v1/models", "/v1/models"),
        ("/llm/", "/llm/v1/models", "/v1/models"),
        ("/llm", "/v1/models", "/v1/models"),
        ("/llm", "/llmhealth", "/llmhealth"),
        ("/llm", "/llm", ""),
    ],
)
def test_proxy_prefix_is_taken_off_whole(root, path, inside):
    """As the router does it: else a path could be checked as one route and served as another."""
    assert route_path({"path": path, "root_path": root}) == inside


def test_routes_that_take_forms_are_known(monkeypatch):
    """Their bodies are read as such."""
    found = {
        path
        for path, operations in make_app(monkeypatch).openapi()["paths"].items()
        for operation in operations.values()
        for kind in operation.get("requestBody", {}).get("content", ())
        if "form" in kind  # described as url-encoded, though they carry a file
    }
    assert found == FORM_ROUTES
