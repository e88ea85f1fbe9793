"""Probes: what turns each red, what it says, and what it tolerates."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from service import health
from service.engines import merged_pulse
from service.health import CODES, COPY_FAILURE_SECONDS, HealthRules, liveness, readiness
from service.pulse import Pulse, PulseRecord, PulseWatch
from tests.service.conftest import Door

RULES = HealthRules(ready_stall_seconds=7, ready_when_degraded=False, live_stall_seconds=300)
BUSY = {"running": 2, "waiting": 1}


def make_pulse(**changes: Any) -> Pulse:
    values = {"running": 0, "waiting": 0, "steps": 10}
    return Pulse.parse({**values, **changes})


def make_record(*pulses: Pulse, every: float = 1.0) -> PulseRecord:
    """Answers at 0, 1, 2, … seconds."""
    record = PulseRecord(answered=0.0, progressed=0.0)
    for number, pulse in enumerate(pulses):
        record.note(pulse, number * every)
    return record


def codes(record: PulseRecord, now: float, rules: HealthRules = RULES, **options: Any) -> list[str]:
    verdict = readiness(record, rules, now, **options)
    assert verdict.is_ok == (not verdict.reasons)
    return [reason.code for reason in verdict.reasons]


def test_idle_engine_that_answers_is_ready() -> None:
    """It makes no steps, and need not."""
    assert codes(make_record(*[make_pulse()] * 30), 29.5) == []


def test_silent_engine_is_not_ready() -> None:
    """Once the bound has passed, and not before; the reason says for how long."""
    record = make_record(make_pulse())
    assert codes(record, 6.9) == []
    verdict = readiness(record, RULES, 8.0)
    assert verdict.reasons[0].code == "engine_unresponsive"
    assert "8.0 s" in verdict.reasons[0].message


def test_engine_that_never_answered_is_not_ready() -> None:
    """Nothing is known of it."""
    assert codes(make_record(), 1.0) == ["no_answer_yet"]


def test_engine_that_answers_without_stepping_is_stalled() -> None:
    """Work and no step for longer than the bound; a step clears it."""
    record = make_record(*[make_pulse(**BUSY)] * 10)
    assert codes(record, 9.0) == ["engine_stalled"]
    record.note(make_pulse(**BUSY, steps=11), 10.0)
    assert codes(record, 10.0) == []


def make_pulses(*engines: dict[str, Any]) -> Pulse:
    """What several engines answer."""
    return Pulse.parse(merged_pulse([{"running": 0, "waiting": 0, **one} for one in engines]))


def test_engine_that_steps_does_not_hide_one_that_is_stalled() -> None:
    """Of several, the one that has stood still for longest decides, and is named."""
    record = make_record(
        *(make_pulses({**BUSY, "steps": 3}, {"running": 5, "steps": n}) for n in range(10))
    )
    assert codes(record, 7.0) == []
    verdict = readiness(record, RULES, 9.0)
    assert [one.code for one in verdict.reasons] == ["engine_stalled"]
    assert "no step of engine 0 for 9.0 s with 2 running" in verdict.reasons[0].message
    record.note(make_pulses({**BUSY, "steps": 4}, {"running": 5, "steps": 9}), 10.0)
    assert codes(record, 10.0) == []
    record.note(make_pulses({"steps": 4}, {"running": 5, "steps": 9}), 16.0)
    assert "engine 1 for 7.1 s" in readiness(record, RULES, 16.1).reasons[0].message


def test_engine_without_work_is_not_stalled_beside_one_that_has_some() -> None:
    """It makes no steps, and need not."""
    pulses = (make_pulses({"steps": 3}, {"running": 5, "steps": n}) for n in range(20))
    assert codes(make_record(*pulses), 19.5) == []


def test_engines_are_judged_anew_when_their_number_changes() -> None:
    """Nobody knows then which of them is which."""
    record = make_record(make_pulse(**BUSY))
    record.note(make_pulses({**BUSY, "steps": 10}, {**BUSY, "steps": 10}), 20.0)
    assert codes(record, 20.5) == []


def test_steps_are_not_judged_where_nobody_counts_them() -> None:
    """Mode off: an answer between two steps is progress enough."""
    assert codes(make_record(*[make_pulse(**BUSY, steps=None)] * 20), 19.0) == []
    several = make_pulses(*[{**BUSY, "steps": None}] * 2)
    assert codes(make_record(*[several] * 20), 19.0) == []


def test_dead_engine_is_told_before_its_silence() -> None:
    """One reason, the one that explains the others."""
    record = make_record(make_pulse())
    record.dead = True
    assert codes(record, 100.0) == ["engine_dead"]


def test_draining_is_a_reason_of_its_own() -> None:
    """Beside what else is wrong."""
    record = make_record(make_pulse())
    assert codes(record, 0.0, is_draining=True) == ["draining"]
    assert codes(record, 10.0, is_draining=True) == ["draining", "engine_unresponsive"]


@pytest.mark.parametrize("tolerant", [False, True])
def test_degraded_engine_is_red_unless_that_is_tolerated(tolerant: bool) -> None:
    """Relocation off, with the violation's text, and copies that fail; shown in either case."""
    disabled = make_pulse(relocation_disabled="I1 is violated", failed_relocations=1.0)
    record = make_record(make_pulse(), disabled)
    rules = HealthRules(ready_when_degraded=tolerant)
    verdict = readiness(record, rules, 1.0)
    assert verdict.is_ok == tolerant
    found = {one.code: one.message for one in verdict.reasons + verdict.degraded}
    assert found["relocation_disabled"] == "I1 is violated"
    assert "copies_failing" in found


def test_failed_copy_is_forgotten_after_a_while() -> None:
    """Unless the next one fails as well."""
    record = make_record(make_pulse(), make_pulse(failed_relocations=1.0))
    for second in range(2, int(COPY_FAILURE_SECONDS) + 3):
        record.note(make_pulse(failed_relocations=1.0), float(second))
    assert codes(record, COPY_FAILURE_SECONDS + 1.0) == ["copies_failing"]
    assert codes(record, COPY_FAILURE_SECONDS + 2.0) == []


def test_liveness_outlasts_readiness() -> None:
    """A restart is the last resort, and can be switched off."""
    record = make_record(make_pulse())
    assert liveness(record, RULES, 200.0).is_ok
    assert not liveness(record, RULES, 301.0).is_ok
    assert liveness(record, HealthRules(live_stall_seconds=0), 1e9).is_ok


@pytest.mark.parametrize("reply", [{}, {"running": "x", "waiting": 0, "steps": 0}, None])
def test_malformed_answer_is_no_answer(reply: Any) -> None:
    """The watch goes on, and readiness sees silence."""

    async def run() -> PulseRecord:
        calls = []

        async def call(name: str) -> Any:
            calls.append(name)
            return reply

        watch = PulseWatch(call, lambda: False, interval_seconds=0.001)
        task = asyncio.create_task(watch.run())
        while len(calls) < 3:
            await asyncio.sleep(0.001)
        task.cancel()
        return watch.record

    assert asyncio.run(run()).pulse is None


def test_watch_reports_each_answer_and_death() -> None:
    """To whoever listens, with the time of its clock."""

    async def run() -> tuple[list[Any], PulseWatch]:
        heard: list[Any] = []

        async def call(name: str) -> Any:
            assert name == "vtoken_pulse"
            return {"running": 1, "waiting": 2, "steps": 3}

        watch = PulseWatch(
            call,
            lambda: True,
            on_pulse=lambda pulse, now: heard.append((pulse.waiting, now)),
            interval_seconds=0.001,
            clock=lambda: 42.0,
        )
        task = asyncio.create_task(watch.run())
        while not heard:
            await asyncio.sleep(0.001)
        task.cancel()
        return heard, watch

    heard, watch = asyncio.run(run())
    assert heard[0] == (2, 42.0)
    assert watch.record.dead


def test_routes_answer_by_the_record(door: Door) -> None:
    """Status and body of all three; without an engine, ready and live."""
    health.attach(door.app)
    assert door.send("GET", "/health/ready").json() == {"status": "ready"}
    assert door.send("GET", "/health/live").json() == {"status": "live"}
    assert door.send("GET", "/health/startup").json()["percent"] == 100
    operations = door.app.state.vtoken.operations
    operations.watch = SimpleNamespace(record=make_record(make_pulse()), clock=lambda: 400.0)
    ready, live = door.send("GET", "/health/ready"), door.send("GET", "/health/live")
    assert (ready.status_code, live.status_code) == (503, 503)
    assert ready.json()["status"] == "not ready"
    assert ready.json()["reasons"][0]["code"] == "engine_unresponsive"
    assert operations.not_ready_codes() == {"engine_unresponsive"}
    operations.drain.is_draining = True
    assert operations.not_ready_codes() == {"engine_unresponsive", "draining"}


def test_every_code_is_known_and_described() -> None:
    """The metric has a series for each, and the operator's table a line."""
    found = set(re.findall(r'Reason\("(\w+)"', Path(health.__file__).read_text()))
    assert found == set(CODES)
    table = (Path(__file__).parents[2] / "docs" / "operations.md").read_text()
    assert all(f"| `{code}` |" in table for code in CODES)
