"""Puts what an operator relies on into vLLM's app: probes, draining, limits, ids, log, traces.

Two middlewares: the gate outside of everything, and the limits behind the API keys. One function
before vLLM's ``generate``, one before its ``shutdown``, and a task that listens to the engine.
"""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI
from starlette.middleware import Middleware

from service import health, tracing
from service.admission import QueueEstimate
from service.drain import Drain, DrainingShutdown
from service.engines import utility_call
from service.gate import RequestGate
from service.generation import Generation
from service.health import HealthRules, Verdict
from service.limits import LimitRules, Limits
from service.open_requests import LocalOpenRequests, OpenRequests
from service.pulse import PulseWatch
from service.refusals import Refusals
from service.settings.http_process import ServiceSettings
from service.shared import shared_of

HURRY_SECONDS = 3
"""For connections to close after their requests were cut off."""


@dataclass
class Operations:
    """What probes and middlewares look at.

    Attributes:
        drain: counts open requests, and knows whether the server is stopping.
        queue: how long a new request would wait.
        refusals: counts what is turned away.
        open_requests: counts what each key has open.
        rules: bounds of the probes.
        watch: listens to the engine; None where there is none.
    """

    drain: Drain = field(default_factory=lambda: Drain(0))
    queue: QueueEstimate = field(default_factory=QueueEstimate)
    refusals: Refusals = field(default_factory=Refusals)
    open_requests: OpenRequests = field(default_factory=LocalOpenRequests)
    rules: HealthRules = field(default_factory=HealthRules)
    watch: PulseWatch | None = None

    def readiness(self) -> Verdict:
        """What ``/health/ready`` answers now."""
        is_draining = self.drain.is_draining
        if self.watch is None:
            return Verdict(not is_draining)
        now = self.watch.clock()
        return health.readiness(self.watch.record, self.rules, now, is_draining=is_draining)

    def not_ready_codes(self) -> set[str]:
        """The reasons of it, for metrics."""
        return {reason.code for reason in self.readiness().reasons}


def attach(app: FastAPI, settings: ServiceSettings) -> None:
    """Add the probes and the limits; mutates ``app``. The limits go behind what is there."""
    health.attach(app)
    rules = LimitRules(
        max_body_bytes=settings.max_body_bytes,
        max_output_tokens=settings.max_output_tokens,
        max_requests_per_key=settings.max_requests_per_key,
        max_queue_seconds=settings.max_queue_seconds,
    )
    app.user_middleware.append(Middleware(Limits, rules=rules))


def connect(
    app: FastAPI,
    engine_client: Any | None,
    args: Namespace,
    settings: ServiceSettings,
    *,
    has_token_layer: bool,
) -> Operations:
    """Close the app in and stand before the engine; mutates ``app`` and ``engine_client``.

    Must run in the event loop's thread, before the first request.
    """
    rules = HealthRules(
        settings.ready_stall_seconds, settings.ready_when_degraded, settings.live_stall_seconds
    )
    drain = getattr(args, "vtoken_drain", None) or Drain(settings.drain_seconds)
    # Around the stack, not in it: errors that the stack makes an answer of carry the id, too.
    stack = app.middleware_stack or app.build_middleware_stack()
    timeout = settings.request_timeout_seconds
    operations = Operations(drain, rules=rules)
    if (shared := shared_of(args)) is not None:
        operations.queue = QueueEstimate(shared.sent)
        operations.refusals = Refusals(shared.refused)
        operations.open_requests = shared.open_requests()
    refusals = operations.refusals
    app.middleware_stack = RequestGate(
        stack, drain=drain, refusals=refusals, timeout_seconds=timeout
    )
    if engine_client is None:
        return operations
    if engine_client.vllm_config.observability_config.otlp_traces_endpoint is not None:
        tracing.enable()
    DrainingShutdown(engine_client, drain, lambda: _hurry(app))
    engine_client.generate = Generation(
        engine_client.generate,
        queue=operations.queue,
        refusals=refusals,
        max_prompt_tokens=settings.max_prompt_tokens,
        max_output_tokens=settings.max_output_tokens,
        has_token_layer=has_token_layer,
    )
    operations.watch = PulseWatch(
        utility_call(engine_client.engine_core),
        lambda: bool(engine_client.errored),
        on_pulse=operations.queue.note,
    )
    return operations


def _hurry(app: FastAPI) -> None:
    """Let uvicorn cancel what does not end by itself."""
    if (server := getattr(app.state, "server", None)) is not None:
        server.config.timeout_graceful_shutdown = HURRY_SECONDS
