"""``GET /admin/blocks``: guarded, and bounded in what it costs the engine."""

from __future__ import annotations

import asyncio

import pytest

from service.blocks import MAX_CELLS, MAX_ENGINE_RATIO, MIN_INTERVAL_SECONDS, BlockMaps
from service.engine_link import EngineLink
from service.errors import EngineGoneError
from tests.service.conftest import make_link
from tests.service.ui_server import Engines, PoolEngine, UiServer


@pytest.fixture
def engine() -> PoolEngine:
    engine = PoolEngine()
    engine.fill()
    return engine


class Clock:
    """Monotonic seconds that pass when a test says so."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def num_calls(engine: PoolEngine) -> int:
    return sum(op == "blocks" for op, _ in engine.calls)


def test_many_watchers_are_one_call(engine):
    """Whoever asks meanwhile waits for the same map; later ones get it with its age."""
    clock, link = Clock(), make_link(engine)
    maps = BlockMaps(clock)

    async def watch() -> list[dict]:
        return await asyncio.gather(*(maps.get(link) for _ in range(50)))

    answers = asyncio.run(watch())
    assert num_calls(engine) == 1
    assert engine.calls[0][1] == {"max_cells": MAX_CELLS}
    assert all(answer == answers[0] for answer in answers)
    clock.now += MIN_INTERVAL_SECONDS / 2
    assert asyncio.run(maps.get(link))["age_seconds"] == MIN_INTERVAL_SECONDS / 2
    assert num_calls(engine) == 1
    clock.now += MIN_INTERVAL_SECONDS
    asyncio.run(maps.get(link))
    assert num_calls(engine) == 2


def test_expensive_maps_are_drawn_seldom(engine):
    """So that they take no more than their share of the engine's time."""
    clock, link = Clock(), make_link(engine)
    maps = BlockMaps(clock)
    engine.reply = {"ok": {"seconds": 0.03, "policy_version": 1}}
    interval = asyncio.run(maps.get(link))["interval_seconds"]
    assert 0.03 / interval == pytest.approx(MAX_ENGINE_RATIO)
    clock.now += interval * 0.99
    asyncio.run(maps.get(link))
    assert num_calls(engine) == 1


def test_failure_is_told_and_not_kept(engine):
    """An old map is no answer to whether the engine lives; the next caller tries again."""
    clock, link = Clock(), make_link(engine)
    maps = BlockMaps(clock)
    asyncio.run(maps.get(link))
    engine.is_dead = True
    clock.now += 1
    for _ in range(2):
        with pytest.raises(EngineGoneError):
            asyncio.run(maps.get(link))
    engine.is_dead = False
    assert asyncio.run(maps.get(link))["num_blocks"] == 200


def test_route_needs_the_admin_key(engine):
    """As all of /admin."""
    server = UiServer(engine)
    server.stop()
    door = server.door
    assert door.send("GET", "/admin/blocks", key=None).status_code == 401
    assert door.send("GET", "/admin/blocks", key="wrong").status_code == 401
    assert num_calls(engine) == 0
    answer = door.send("GET", "/admin/blocks").json()
    assert sum(answer["held"]) == 93
    assert answer["policy_version"] == 1
    assert answer["seconds"] > 0


def test_each_of_several_engines_can_be_asked_for(engine):
    """All maps come with one call; one that is not there is refused with how many there are."""
    door = UiServer(engines := Engines(engine, PoolEngine(num_blocks=100)))
    door.stop()
    for number, (num_blocks, held) in enumerate(((200, 93), (100, 0))):
        found = door.door.send("GET", f"/admin/blocks?engine={number}").json()
        assert (found["engine"], found["num_engines"]) == (number, 2)
        assert (found["num_blocks"], sum(found["held"])) == (num_blocks, held)
    assert num_calls(engine) == num_calls(engines.parts[1]) == 1
    for gone in ("2", "x", "-1", ""):
        answer = door.door.send("GET", f"/admin/blocks?engine={gone}")
        error = answer.json()["error"]
        assert (answer.status_code, error["field"]) == (422, "engine")
    assert door.door.send("GET", "/admin/blocks?motor=1").status_code == 422


def test_link_names_the_operation(engine):
    """The number of cells travels with it."""
    link: EngineLink = make_link(engine)
    assert len(asyncio.run(link.blocks(10))["held"]) == 10
