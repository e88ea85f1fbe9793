"""Our part of vLLM's OpenAI app: admin routes, metrics, ready line.

vLLM finds :func:`make_plugin` through the entry point ``vllm.endpoint_plugins`` and calls
``attach_router`` while it builds the app, then ``init_state`` once the engine answers.
"""

from __future__ import annotations

import asyncio
from argparse import Namespace
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI
from prometheus_client import REGISTRY
from starlette.middleware import Middleware

from service import (
    admin,
    admin_port,
    auth_access,
    blocks,
    metrics,
    model_card,
    openai_errors,
    operations,
    shared_metrics,
    tls,
    ui,
)
from service.auth import AdminGuard
from service.auth_access import AccessRules
from service.engine_link import EngineLink
from service.engines import engine_numbers, utility_call
from service.operations import Operations
from service.poller import MetricsPoller
from service.ready import announce_when_ready, wait_until_started
from service.request_control import RequestControl
from service.settings.http_process import ServiceSettings, load_service_settings
from service.settings.vllm_variables import vllm_api_keys
from service.shared import Shared, shared_of
from vtoken.config import VTokenConfig


@dataclass
class ServiceState:
    """What the routes find at ``app.state.vtoken``; ``tasks`` keeps background tasks alive."""

    link: EngineLink
    guard: AdminGuard
    operations: Operations = field(default_factory=Operations)
    tasks: list[asyncio.Task[None]] = field(default_factory=list)

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Run ``work`` in the background until it ends or the server stops."""
        self.tasks.append(asyncio.create_task(work))


class VTokenEndpointPlugin:
    """Implements vLLM's ``EndpointPlugin`` protocol."""

    name = "vtoken_http"
    required_tasks = None

    def __init__(self, settings: ServiceSettings) -> None:
        self._settings = settings
        self._guard = AdminGuard(settings.admin_keys())

    def attach_router(self, app: FastAPI) -> None:
        """Add the admin routes and the per-request control; mutates ``app``."""
        admin.attach(app)
        blocks.attach(app)
        ui.attach(app)
        model_card.attach(app)
        openai_errors.attach(app)
        auth_access.install(app, self._access_rules(app))
        operations.attach(app, self._settings)
        self._app = app
        # Innermost: behind the API keys, and inside vLLM's request metrics.
        app.user_middleware.append(Middleware(RequestControl))

    async def init_state(self, engine_client: Any | None, state: Any, args: Namespace) -> None:
        """Connect routes and metrics with the engine and start the background tasks.

        ``engine_client`` is ``None`` on vLLM's render-only server, which has no engine: then the
        admin routes answer 409 and there is nothing to measure.
        """
        config, shared = engine_config(engine_client), shared_of(args)
        auth_access.drop_vllm_guard(self._app)
        operated = operations.connect(
            self._app, engine_client, args, self._settings, has_token_layer=config.mode != "off"
        )
        link = self._make_link(engine_client, config, shared)
        state.vtoken = ServiceState(link, self._guard, operated)
        if (renewed := tls.take_refresh(args)) is not None:
            state.vtoken.start(tls.follow_on_main_port(state, renewed))
        if self._settings.admin_port is not None:
            sock = shared.admin_sock if shared is not None else None
            sock = sock or admin_port.bind(self._settings.admin_host, self._settings.admin_port)
            state.vtoken.start(admin_port.serve(self._app, args, sock, renewed))
        if engine_client is None:
            return
        model = str(engine_client.vllm_config.model_config.served_model_name)
        collector = metrics.VTokenCollector(
            model,
            config.to_dict(),
            engines=engine_numbers(engine_client.engine_core),
            not_ready_codes=operated.not_ready_codes,
            refusals=operated.refusals.totals,
            store=None if shared is None else shared_metrics.SharedReading(shared.metrics_file),
        )
        if shared is None:
            metrics.register(collector, REGISTRY)
        else:
            shared_metrics.attach(self._app, collector)
        if config.mode != "off" and (shared is None or shared.is_first):
            interval = self._settings.metrics_poll_seconds
            poller = MetricsPoller(state.vtoken.link, collector, interval_seconds=interval)
            state.vtoken.start(poller.run())
        assert operated.watch is not None
        state.vtoken.start(operated.watch.run())
        if shared is None:
            state.vtoken.start(announce_when_ready(state, args, model, in_words(config)))
        else:
            state.vtoken.start(_tell_supervisor(state, shared))

    def _access_rules(self, app: FastAPI) -> AccessRules:
        args = getattr(app.state, "args", None)
        return AccessRules(
            admin=self._guard,
            api=self._settings.api_keys(vllm_api_keys(getattr(args, "api_key", None))),
            metrics_key_required=self._settings.metrics_key_required,
            has_admin_port=self._settings.admin_port is not None,
        )

    def _make_link(
        self, engine_client: Any | None, config: VTokenConfig, shared: Shared | None
    ) -> EngineLink:
        timeout = self._settings.engine_timeout_seconds
        if engine_client is None:
            return EngineLink(_no_engine, mode="off", is_dead=bool, timeout_seconds=timeout)
        return EngineLink(
            utility_call(engine_client.engine_core, None if shared is None else shared.change_lock),
            mode=config.mode,
            document=config.to_dict(),
            has_peers=shared is not None,
            is_dead=lambda: bool(engine_client.errored),
            timeout_seconds=timeout,
        )


def make_plugin() -> VTokenEndpointPlugin:
    """The entry point's factory.

    Raises:
        ConfigError: the environment holds a setting that cannot be used.
    """
    return VTokenEndpointPlugin(load_service_settings())


def engine_config(engine_client: Any | None) -> VTokenConfig:
    """The configuration that the engine was started with; mode ``off`` if it has none of ours."""
    return config_of(None if engine_client is None else engine_client.vllm_config)


def config_of(vllm_config: Any | None) -> VTokenConfig:
    """Ours in vLLM's; mode ``off`` if there is none."""
    extra = None if vllm_config is None else vllm_config.additional_config
    if isinstance(extra, Mapping) and "vtoken" in extra:
        return VTokenConfig.from_dict(extra["vtoken"])
    return VTokenConfig(mode="off", policy="none")


def in_words(config: VTokenConfig) -> str:
    """For the ready line."""
    return "mode off" if config.mode == "off" else f"mode {config.mode}, policy {config.policy}"


async def _tell_supervisor(state: Any, shared: Shared) -> None:
    await wait_until_started(state)
    shared.started.add()


async def _no_engine(*_: object) -> Any:
    raise AssertionError("mode off calls nothing")
