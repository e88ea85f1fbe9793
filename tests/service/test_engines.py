"""Several engines answer as one: changes reach all or none, numbers are those of the whole."""

from __future__ import annotations

import asyncio
import multiprocessing
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from service.engine_link import EngineLink
from service.engines import AllEngines, merged_pool, merged_pulse, utility_call
from service.errors import EngineGoneError, RejectedError, StaleVersionError
from service.metrics import VTokenCollector
from vtoken.config import VTokenConfig

POOL = {
    "waste_ratio": 0.5,
    "low_utilization_block_ratio": 0.25,
    "live_tokens": 80,
    "retained_blocks": 10,
    "free_blocks": 90,
    "effective_theta_f": 0.25,
    "relocation_disabled": 0.0,
}


class Engine:
    """The token layer of one engine, as its control channel answers."""

    def __init__(self, pool: dict[str, float], max_headroom: int = 1000) -> None:
        self.pool, self.max_headroom = pool, max_headroom
        self.document, self.version = {"headroom_blocks": 4}, 1
        self.receipts: dict[str, int] = {}
        self.history: list[dict[str, Any]] = []

    def note(self, action: str) -> None:
        entry = {"version": self.version, "at": str(id(self)), "action": action}
        self.history.insert(0, entry)

    def policy_history(self, payload: dict[str, Any]) -> dict[str, Any]:
        return {"version": self.version, "history": list(self.history), "max_changes": 100}

    def answer(self, op: str, payload: dict[str, Any]) -> dict[str, Any]:
        if op == "set_policy":
            return self.set_policy(payload)
        return {"ok": getattr(self, op)(payload)}

    def set_policy(self, payload: dict[str, Any]) -> dict[str, Any]:
        if payload["expected_version"] not in (None, self.version):
            return {"error": {"type": "VersionConflict", "message": f"at {self.version}"}}
        if (headroom := payload["changes"]["headroom_blocks"]) >= self.max_headroom:
            bound = f"headroom_blocks < {self.max_headroom}"
            return {"error": {"type": "ConfigError", "message": "no", "bound": bound}}
        if payload["dry_run"]:
            totals = {"evicted_tokens": 3, "freed_blocks": None}
            found = {"requests": [{"request_id": "a"}], "totals": totals}
            found["document"] = {**self.document, "headroom_blocks": headroom}
            return {"ok": {**self.get_policy({}), **found}}
        self.document["headroom_blocks"] = headroom
        self.version = payload.get("next_version") or self.version + 1
        self.note("patch")
        return {"ok": self.get_policy({})}

    def get_policy(self, payload: dict[str, Any]) -> dict[str, Any]:
        return {"version": self.version, "document": self.document, "mode": "lazy"}

    def snapshot(self, payload: dict[str, Any]) -> dict[str, Any]:
        config = VTokenConfig().to_dict()
        return {"stats": {"gauges": self.pool}, "config": config, "policy_version": self.version}

    def state(self, payload: dict[str, Any]) -> dict[str, Any]:
        return {
            "pool": self.pool,
            "requests": [{"request_id": "r"}],
            "relocations": [{"ticket": 1}],
            "relocation_disabled": None,
            "skips": {"no_gain": 2},
            "engine": {"running": 1, "waiting": 0, "steps": 5},
        }

    def receipt(self, payload: dict[str, Any]) -> dict[str, Any]:
        num = self.receipts.pop(payload["key"], 0)
        return {
            "policy": "h2o" if num else None,
            "policy_version": self.version,
            "num_sequences": num,
            "evicted_tokens": 10 * num,
            "live_tokens": 20 * num,
            "freed_blocks": num,
            "work": {"evictions": num, "stall_seconds": 0.5 * num},
        }


@pytest.fixture
def fleet() -> tuple[EngineLink, list[Engine]]:
    """Two engines, the second with a pool of its own, and the link that a server has to them."""
    engines = [Engine(POOL), Engine({**POOL, "waste_ratio": 0.0, "retained_blocks": 30})]

    async def call_all(method: str, op: str, payload: Any) -> list[Any]:
        assert method == "vtoken_call"
        return [engine.answer(op, payload) for engine in engines]

    core = SimpleNamespace(core_engines=[b"0", b"1"], call_utility_all_async=call_all)
    link = EngineLink(utility_call(core), mode="lazy", is_dead=bool, timeout_seconds=5)
    return link, engines


def run(coroutine: Any) -> Any:
    return asyncio.run(coroutine)


def test_one_engine_is_called_as_before():
    """Nothing stands between the link and vLLM's call."""
    core = SimpleNamespace(core_engines=[b"0"], call_utility_async=object())
    assert utility_call(core) is core.call_utility_async


def test_a_change_reaches_every_engine(fleet):
    """And versions stay the same everywhere."""
    link, engines = fleet
    reply = run(link.set_policy({"headroom_blocks": 8}))
    assert reply["version"] == 2
    assert [engine.document["headroom_blocks"] for engine in engines] == [8, 8]
    assert [engine.version for engine in engines] == [2, 2]


def test_a_change_that_one_engine_refuses_changes_none(fleet):
    """Pools may differ, and bounds with them."""
    link, engines = fleet
    engines[1].max_headroom = 6
    with pytest.raises(RejectedError):
        run(link.set_policy({"headroom_blocks": 8}))
    assert [engine.version for engine in engines] == [1, 1]


def test_a_stale_version_is_told(fleet):
    """412, as with one engine."""
    from service.engine_link import ChangeOptions

    with pytest.raises(StaleVersionError):
        run(fleet[0].set_policy({"headroom_blocks": 8}, ChangeOptions(expected_version=7)))


@pytest.mark.parametrize("expected", [1, 2, 7])
@pytest.mark.parametrize("dry_run", [False, True])
def test_no_version_is_that_of_engines_which_differ(fleet, expected, dry_run):
    """One has changed by itself: 412 whichever version is expected, with both; none changes."""
    from service.engine_link import ChangeOptions

    link, engines = fleet
    engines[1].version, engines[1].document = 2, {"headroom_blocks": 4, "mode": "naive"}
    options = ChangeOptions(expected_version=expected, dry_run=dry_run)
    with pytest.raises(StaleVersionError, match="engine 0 at 1, engine 1 at 2") as caught:
        run(link.set_policy({"headroom_blocks": 8}, options))
    assert "without If-Match" in str(caught.value)
    assert [engine.version for engine in engines] == [1, 2]
    policy = run(link.get_policy())
    assert [one["version"] for one in policy["engines"]] == [1, 2]
    assert policy["version"] == 1


def test_a_change_that_makes_documents_equal_makes_versions_equal(fleet):
    """Unconditionally, and only then: while documents differ, so do their versions."""
    link, engines = fleet
    engines[1].version, engines[1].document = 2, {"headroom_blocks": 4, "mode": "naive"}
    run(link.set_policy({"headroom_blocks": 8}))
    assert [engine.version for engine in engines] == [2, 3]
    engines[1].document.pop("mode")
    run(link.set_policy({"headroom_blocks": 6}))
    assert [engine.version for engine in engines] == [4, 4]
    assert "engines" not in run(link.get_policy())


def test_history_shows_each_engine_once_one_has_changed_by_itself(fleet):
    """When each noted a change is no difference; a violation that one of them met is."""
    link, engines = fleet
    run(link.set_policy({"headroom_blocks": 8}))
    assert run(link.policy_history()) == engines[0].policy_history({})
    engines[1].note("safety")
    found = run(link.policy_history())
    assert [change["action"] for change in found["history"]] == ["patch"]
    actions = [[change["action"] for change in one["history"]] for one in found["engines"]]
    assert actions == [["patch"], ["safety", "patch"]]


def test_no_engine_comes_too_late_for_a_change_that_others_make(fleet):
    """Each gets it without the deadline, which is of a clock that another host has not."""
    link, _ = fleet
    call_all, sent = link._call._call_all, []

    async def seen(method: str, op: str, payload: dict[str, Any]) -> list[Any]:
        sent.append(payload["deadline"])
        return await call_all(method, op, payload)

    link._call = AllEngines(seen)
    assert run(link.set_policy({"headroom_blocks": 8}))["version"] == 2
    assert sent == [None, None]


def test_of_two_changes_at_once_one_finds_its_version_gone(fleet):
    """One API process: trial and change of one request are not cut by those of another."""
    from service.engine_link import ChangeOptions

    link, engines = fleet
    answers = link._call._call_all

    async def slow(*args: Any) -> list[Any]:
        found = answers(*args)
        await asyncio.sleep(0)
        return await found

    async def both() -> list[Any]:
        link._call = AllEngines(slow)
        changes = [{"headroom_blocks": blocks} for blocks in (8, 9)]
        options = ChangeOptions(expected_version=1)
        made = (link.set_policy(change, options) for change in changes)
        return await asyncio.gather(*made, return_exceptions=True)

    first, second = run(both())
    assert first["version"] == 2
    assert isinstance(second, StaleVersionError)
    assert [(e.version, e.document["headroom_blocks"]) for e in engines] == [(2, 8), (2, 8)]


def test_a_dry_run_shows_the_requests_of_all_engines(fleet):
    """With the number of their engine; a total that one engine does not know is unknown."""
    from service.engine_link import ChangeOptions

    reply = run(fleet[0].set_policy({"headroom_blocks": 8}, ChangeOptions(dry_run=True)))
    assert [(r["request_id"], r["engine"]) for r in reply["requests"]] == [("a", 0), ("a", 1)]
    assert reply["totals"] == {"evicted_tokens": 6, "freed_blocks": None}
    assert [engine.version for engine in fleet[1]] == [1, 1]


def test_state_is_that_of_the_whole(fleet):
    """Sums, and each engine's part beside them."""
    state = run(fleet[0].state())
    assert state["engine"] == {"running": 2, "waiting": 0, "steps": 10}
    assert state["skips"] == {"no_gain": 4}
    assert [request["engine"] for request in state["requests"]] == [0, 1]
    assert [part["pool"]["retained_blocks"] for part in state["engines"]] == [10, 30]


def test_waste_of_all_pools_is_weighted_by_their_blocks():
    """F of 10 blocks half empty and 30 full ones is one eighth."""
    pool = merged_pool([POOL, {**POOL, "waste_ratio": 0.0, "retained_blocks": 30}])
    assert pool["waste_ratio"] == pytest.approx(0.125)
    assert pool["retained_blocks"] == 40
    assert pool["effective_theta_f"] == 0.25
    empty = {**POOL, "retained_blocks": 0}
    assert merged_pool([empty, empty])["waste_ratio"] == 0.0


def test_receipts_add_up_wherever_the_sequences_ran(fleet):
    """The policy is that of an engine that ran one; the other kept nothing under the key."""
    link, engines = fleet
    engines[1].receipts["k"] = 2
    receipt = run(link.receipt("k"))
    assert (receipt["policy"], receipt["num_sequences"], receipt["evicted_tokens"]) == (
        "h2o",
        2,
        20,
    )
    engines[0].receipts["k"] = engines[1].receipts["k"] = 1
    receipt = run(link.receipt("k"))
    assert (receipt["num_sequences"], receipt["live_tokens"]) == (2, 40)
    assert receipt["work"] == {"evictions": 2, "stall_seconds": 1.0}
    assert run(link.receipt("k"))["num_sequences"] == 0


def test_metrics_are_labelled_by_engine(fleet):
    """Each engine's numbers, and both series from the first scrape."""
    collector, registry = (
        VTokenCollector("m", VTokenConfig().to_dict(), engines=("0", "1")),
        CollectorRegistry(),
    )
    registry.register(collector)
    for expected in ("0.0", "10.0"):
        text = generate_latest(registry).decode()
        assert f'vtoken_retained_blocks{{engine="0",model_name="m"}} {expected}' in text
        assert f'vtoken_live_tokens{{engine="1",model_name="m"}} {8 * float(expected)}' in text
        collector.update(run(fleet[0].snapshot()))
    assert 'vtoken_retained_blocks{engine="1",model_name="m"} 30.0' in text


def test_pulse_is_that_of_all_engines():
    """In the form of one engine's, with each of theirs."""
    on = {"running": 1, "waiting": 2, "steps": 3, "failed_relocations": 1.0}
    pulses = [{**on, "relocation_disabled": None}, {**on, "relocation_disabled": "I1: lost"}]
    assert merged_pulse(pulses) == {
        "running": 2,
        "waiting": 4,
        "steps": 6,
        "failed_relocations": 2.0,
        "relocation_disabled": "I1: lost",
        "engines": pulses,
    }
    off = {"running": 1, "waiting": 0, "steps": None}
    merged = {"running": 2, "waiting": 0, "steps": None, "engines": [off, off]}
    assert merged_pulse([off, off]) == merged


def test_pulse_asks_every_engine():
    """One that hangs keeps all others from being counted as alive."""

    async def call_all(method: str) -> list[Any]:
        assert method == "vtoken_pulse"
        return [{"running": 1, "waiting": 0, "steps": None}] * 3

    assert run(AllEngines(call_all)("vtoken_pulse"))["running"] == 3


def test_calls_without_a_rule_are_a_bug():
    """Rather than the first engine's answer for all."""
    with pytest.raises(ValueError, match="profile"):
        run(AllEngines(None)("profile"))


def test_changes_from_several_processes_do_not_mix() -> None:
    """Each holds the lock over trial and change, so all engines see them in one order."""
    lock = multiprocessing.get_context("spawn").Lock()
    engines = [Engine(POOL), Engine(POOL)]
    seen: list[tuple[int, bool]] = []

    async def call_all(method: str, op: str, payload: dict[str, Any]) -> list[dict[str, Any]]:
        seen.append((payload["changes"]["headroom_blocks"], lock.acquire(block=False)))
        await asyncio.sleep(0.01)
        return [engine.answer(op, payload) for engine in engines]

    def payload(blocks: int, dry_run: bool = False) -> dict[str, Any]:
        changes = {"headroom_blocks": blocks}
        return {"changes": changes, "expected_version": None, "dry_run": dry_run}

    async def run() -> None:
        processes = [AllEngines(call_all, lock) for _ in range(2)]
        await asyncio.gather(
            *(p("vtoken_call", "set_policy", payload(n)) for n, p in enumerate(processes, 5))
        )

    asyncio.run(run())
    first, second = dict.fromkeys(blocks for blocks, _ in seen)
    assert [blocks for blocks, _ in seen] == [first, first, second, second]
    assert not any(was_free for _, was_free in seen)
    assert {engine.document["headroom_blocks"] for engine in engines} == {second}
    assert lock.acquire(block=False), "released in the end"
    lock.release()
    asyncio.run(AllEngines(call_all, lock)("vtoken_call", "set_policy", payload(9, dry_run=True)))
    assert seen[-1] == (9, True), "a preview needs no lock"


@pytest.mark.parametrize(
    ("hanging", "fate", "words"),
    [("trial", "not_made", "nothing was changed"), ("change", "sent", "GET /admin/policy has it")],
)
def test_a_change_without_an_answer_says_what_becomes_of_it(fleet, hanging, fate, words):
    """While it is tried nothing is made of it; once it was sent, every engine makes it."""
    _, engines = fleet
    answers: list[Any] = []

    async def call_all(method: str, op: str, payload: dict[str, Any]) -> list[Any]:
        if (hanging == "trial") is payload["dry_run"]:
            answers.append(lambda: [engine.answer(op, payload) for engine in engines])
            await asyncio.sleep(600)
        return [engine.answer(op, payload) for engine in engines]

    link = EngineLink(AllEngines(call_all), mode="lazy", is_dead=bool, timeout_seconds=0.05)
    with pytest.raises(EngineGoneError, match=words) as refused:
        run(link.set_policy({"headroom_blocks": 8}))
    assert refused.value.body()["error"]["change"] == fate
    answers[0]()  # the engines' steps end
    assert {engine.version for engine in engines} == {1 if fate == "not_made" else 2}


def test_a_change_that_is_given_up_leaves_the_lock_alone() -> None:
    """It waited for another process; once that has let go, the next change gets the lock."""
    lock = multiprocessing.get_context("spawn").Lock()
    engines = [Engine(POOL), Engine(POOL)]

    async def call_all(method: str, op: str, payload: dict[str, Any]) -> list[dict[str, Any]]:
        return [engine.answer(op, payload) for engine in engines]

    def make_link(timeout_seconds: float) -> EngineLink:
        call = AllEngines(call_all, lock)
        return EngineLink(call, mode="lazy", is_dead=bool, timeout_seconds=timeout_seconds)

    async def sequence() -> None:
        assert lock.acquire(block=False)
        with pytest.raises(EngineGoneError, match="nothing was changed"):
            await make_link(0.05).set_policy({"headroom_blocks": 8})
        lock.release()
        await asyncio.sleep(0.1)  # for whoever might still wait
        assert (await make_link(60).set_policy({"headroom_blocks": 9}))["version"] == 2

    run(sequence())
    assert lock.acquire(block=False), "released in the end"
    lock.release()
