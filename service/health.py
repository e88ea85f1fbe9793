"""The three probes: may the process live, has it started, may it get requests.

``GET /health/live``      200 while the process answers and the engine is not lost for good
``GET /health/startup``   200 once this app serves; before, ``service.start_server`` answers 503
``GET /health/ready``     200, or 503 with the reasons

Each reason has a ``code`` for machines and a ``message`` for people. ``GET /health`` stays vLLM's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import JSONResponse

from service.pulse import PulseRecord

COPY_FAILURE_SECONDS = 30.0
"""So long a failed copy counts: copies that go on failing are red without a pause."""

CODES = (
    "draining",
    "no_answer_yet",
    "engine_unresponsive",
    "engine_stalled",
    "engine_dead",
    "relocation_disabled",
    "copies_failing",
)
"""Of every reason why a server that has started may not be ready."""

router = APIRouter(prefix="/health", tags=["vToken"])


@dataclass(frozen=True)
class Reason:
    """Why a probe is red, or would be if it were asked to be strict; ``code`` is of ``CODES``."""

    code: str
    message: str


_DRAINING = Reason("draining", "the server is stopping and takes no new requests")


@dataclass(frozen=True)
class Verdict:
    """What a probe answers.

    Attributes:
        is_ok: 200 or 503.
        reasons: why not.
        degraded: what is wrong and tolerated.
    """

    is_ok: bool
    reasons: tuple[Reason, ...] = ()
    degraded: tuple[Reason, ...] = ()

    def response(self, good: str, bad: str) -> JSONResponse:
        """As JSON, with ``status`` in these words."""
        body: dict[str, Any] = {"status": good if self.is_ok else bad}
        for name in ("reasons", "degraded"):
            if listed := getattr(self, name):
                body[name] = [{"code": one.code, "message": one.message} for one in listed]
        return JSONResponse(body, status_code=200 if self.is_ok else 503)


@dataclass(frozen=True)
class HealthRules:
    """The bounds; see the settings of the same names."""

    ready_stall_seconds: float = 7.0
    ready_when_degraded: bool = False
    live_stall_seconds: float = 300.0


def readiness(
    record: PulseRecord, rules: HealthRules, now: float, *, is_draining: bool = False
) -> Verdict:
    """Whether this server should get requests.

    Args:
        record: what is known of the engine.
        rules: the bounds.
        now: on the record's clock.
        is_draining: whether the server was told to stop.
    """
    reasons = [_DRAINING] if is_draining else []
    reasons += _engine_reasons(record, rules, now)
    degraded = _degradations(record, now)
    if not rules.ready_when_degraded:
        reasons, degraded = reasons + degraded, []
    return Verdict(not reasons, tuple(reasons), tuple(degraded))


def liveness(record: PulseRecord, rules: HealthRules, now: float) -> Verdict:
    """Whether a restart would not help."""
    silence = now - record.answered
    if rules.live_stall_seconds and silence > rules.live_stall_seconds:
        return Verdict(False, (_unresponsive(silence),))
    return Verdict(True)


def _engine_reasons(record: PulseRecord, rules: HealthRules, now: float) -> list[Reason]:
    if record.dead:
        return [Reason("engine_dead", "the engine process or one of its workers has died")]
    silence = now - record.answered
    if silence > rules.ready_stall_seconds:
        return [_unresponsive(silence)]
    if record.pulse is None:
        return [Reason("no_answer_yet", "the engine has not answered since the server started")]
    idle = now - record.progressed
    if idle > rules.ready_stall_seconds:
        slowest = record.pulse.parts[record.slowest]
        work = f"{slowest.running} running and {slowest.waiting} waiting requests"
        where = f" of engine {record.slowest}" if record.pulse.engines else ""
        return [Reason("engine_stalled", f"no step{where} for {idle:.1f} s with {work}")]
    return []


def _degradations(record: PulseRecord, now: float) -> list[Reason]:
    found = []
    if record.pulse is not None and record.pulse.relocation_disabled is not None:
        found.append(Reason("relocation_disabled", record.pulse.relocation_disabled))
    if record.copy_failed is not None and now - record.copy_failed <= COPY_FAILURE_SECONDS:
        age = now - record.copy_failed
        found.append(Reason("copies_failing", f"a relocation's copy failed {age:.1f} s ago"))
    return found


def _unresponsive(silence: float) -> Reason:
    return Reason("engine_unresponsive", f"the engine has not answered for {silence:.1f} s")


def attach(app: FastAPI) -> None:
    """Add the probes to ``app``; mutates it."""
    app.include_router(router)


@router.get("/live")
async def get_live(request: Request) -> JSONResponse:
    """200 while a restart would not help."""
    state = request.app.state.vtoken.operations
    if state.watch is None:
        return Verdict(True).response("live", "not live")
    verdict = liveness(state.watch.record, state.rules, state.watch.clock())
    return verdict.response("live", "not live")


@router.get("/startup")
async def get_startup() -> JSONResponse:
    """200: whoever reaches this app finds it started."""
    return JSONResponse({"status": "started", "phase": "serving", "percent": 100})


@router.get("/ready")
async def get_ready(request: Request) -> JSONResponse:
    """200 if this server should get requests, else 503 with the reasons."""
    verdict: Verdict = request.app.state.vtoken.operations.readiness()
    return verdict.response("ready", "not ready")
