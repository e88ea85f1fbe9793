"""Every way in which a call to the engine goes wrong has its own error."""

from __future__ import annotations

import asyncio

import pytest

from service.engine_link import ChangeOptions, EngineLink
from service.errors import (
    EngineFaultError,
    EngineGoneError,
    ModeOffError,
    RejectedError,
    StaleVersionError,
)


def call(link, op="get_policy", *args):
    return asyncio.run(getattr(link, op)(*args))


def test_results_pass_unchanged(make, engine):
    """What the engine calls ok is what the caller gets."""
    link = make.link(engine)
    assert call(link, "snapshot") == engine.snapshot()
    assert call(link)["version"] == 0
    assert call(link, "policies") == [{"name": "streaming_llm"}]
    assert call(link, "state")["pool"] == {"free_blocks": 7}


def test_mode_off_asks_nobody(make, engine):
    """The utility does not exist in mode off, so it is not called."""
    with pytest.raises(ModeOffError, match="--vtoken-mode"):
        call(make.link(engine, mode="off"))
    assert engine.calls == []


def test_dead_engine_is_gone_at_once(make, engine):
    """A known death is not waited for."""
    engine.is_dead = engine.hangs = True
    with pytest.raises(EngineGoneError, match="dead"):
        call(make.link(engine, timeout_seconds=60))


def test_silent_engine_is_gone_after_the_timeout(make, engine):
    """vLLM never resolves the future of a call whose engine died: time ends the wait."""
    engine.hangs = True
    with pytest.raises(EngineGoneError, match=r"within 0\.05 s"):
        call(make.link(engine, timeout_seconds=0.05))


def test_silence_leaves_open_what_becomes_of_a_change(make, engine):
    """It was sent, so the error says how to find out; a dry run and a reading change nothing."""
    engine.hangs = True
    link = make.link(engine, timeout_seconds=0.05)
    for op in ("set_policy", "rollback_policy"):
        args = ({"theta_f": 0.5},) if op == "set_policy" else (None,)
        with pytest.raises(
            EngineGoneError, match=r"GET /admin/policy/history .* with If-Match"
        ) as e:
            call(link, op, *args)
        assert e.value.details == {"change": "open"}
        with pytest.raises(EngineGoneError) as caught:
            call(link, op, *args, ChangeOptions(dry_run=True))
        assert "history" not in str(caught.value)
        assert caught.value.details == {}


def test_engine_that_dies_during_the_call_is_gone(make, engine):
    """Whatever vLLM raises then, the reason is the death."""
    link = make.link(engine)

    async def die(*_):
        engine.is_dead = True
        raise RuntimeError("EngineCore encountered an issue")

    link._call = die
    with pytest.raises(EngineGoneError, match="dead"):
        call(link)


@pytest.mark.parametrize(
    "reply", [{}, [], "x", {"ok": {}, "error": {}}, {"ok": []}, {"ok": None}, {"error": "boom"}]
)
def test_other_replies_are_faults(make, engine, reply):
    """A reply that is not in the contract is not passed on."""
    engine.reply = reply
    with pytest.raises(EngineFaultError):
        call(make.link(engine))


def test_exceptions_are_faults(make, engine):
    """A failed utility call carries its text."""
    engine.error = Exception("Call to vtoken_call method failed: boom")
    with pytest.raises(EngineFaultError, match="boom"):
        call(make.link(engine))


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("ConfigError", RejectedError),
        ("VersionConflict", StaleVersionError),
        ("ModeOff", ModeOffError),
        ("TooLate", EngineGoneError),
        ("UnknownOperation", EngineFaultError),
    ],
)
def test_refusals_are_translated(make, engine, kind, expected):
    """Each type of the contract has its error, with the engine's message."""
    engine.reply = {"error": {"type": kind, "message": "because"}}
    with pytest.raises(expected, match="because"):
        call(make.link(engine))


def test_rejection_bounds_what_it_repeats(make, engine):
    """A long value comes back cut."""
    details = {"field": "policy", "value": "x" * 10_000, "bound": "short"}
    engine.reply = {"error": {"type": "ConfigError", "message": "no", **details}}
    with pytest.raises(RejectedError) as caught:
        call(make.link(engine))
    assert len(caught.value.details["value"]) < 1100
    assert caught.value.details["field"] == "policy"


def test_document_is_refreshed_only_where_others_change_it(make, engine):
    """One question then; a link that stands alone, or in mode off, asks nobody."""
    for mode, has_peers, num_calls in (("lazy", False, 0), ("off", True, 0), ("lazy", True, 1)):
        engine.calls.clear()
        link = EngineLink(
            engine.call_utility_async,
            mode=mode,
            is_dead=bool,
            timeout_seconds=5,
            document={"sink_tokens": 4},
            has_peers=has_peers,
        )
        engine.config = engine.config.patched({"sink_tokens": 9})
        call(link, "refresh")
        assert len(engine.calls) == num_calls
        assert link.document["sink_tokens"] == (9 if num_calls else 4)
    engine.error = Exception("no answer")
    call(link, "refresh")
    assert link.document["sink_tokens"] == 9, "what was seen stays"
