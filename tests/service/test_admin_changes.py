"""Dry runs, requests that keep the old document, history and rollback, over a real token layer."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime

import pytest

from tests.service.conftest import Door
from tests.service.layer_engine import LayerEngine
from vtoken.history import MAX_CHANGES, MAX_NOTE_CHARS


@pytest.fixture
def engine() -> LayerEngine:
    return LayerEngine()


def history(door: Door) -> list[dict]:
    return door.send("GET", "/admin/policy/history").json()["history"]


def rollback(door: Door, body: object = None, **options):
    return door.send("POST", "/admin/policy/rollback", json=body, **options)


# -- dry run -------------------------------------------------------------------------------


def test_dry_run_says_what_would_change_and_changes_nothing(door, engine):
    """Difference, victims and freed blocks; version, document and requests stay."""
    kv = engine.run("a", 200)
    door.patch({"budget_tokens": 1000})
    answer = door.patch({"budget_tokens": 100, "theta_f": 0.25}, params={"dry_run": "true"})
    found = answer.json()
    assert answer.status_code == 200
    assert answer.headers["ETag"] == '"2"'
    assert (found["dry_run"], found["version"]) == (True, 2)
    assert found["changes"] == {"budget_tokens": {"from": 1000, "to": 100}}
    assert found["document"]["budget_tokens"] == 100
    (request,) = found["requests"]
    assert (request["request_id"], request["evicted_tokens"]) == ("a", 100)
    assert request["next_eviction"] == "next step"
    assert found["totals"] == {"evicted_tokens": 100, "freed_blocks": request["freed_blocks"]}
    assert engine.layer.config.budget_tokens == 1000
    assert kv.num_evicted == 0
    assert len(history(door)) == 2


@pytest.mark.parametrize("policy", ["streaming_llm", "random", "none"])
@pytest.mark.parametrize("num_tokens", [40, 65, 200, 333])
def test_dry_run_tells_the_truth(door, engine, policy, num_tokens):
    """What it announces is what the next eviction does, token for token and block for block."""
    door.patch({"policy": "none"})
    kv = engine.run("a", num_tokens)
    change = {"policy": policy, "budget_tokens": 64, "mode": "naive"}
    (request,) = door.patch(change, params={"dry_run": "true"}).json()["requests"]
    held = kv.num_retained
    assert door.patch(change).status_code == 200
    engine.layer.evict_if_due(kv, num_tokens)
    assert request["evicted_tokens"] == kv.num_evicted
    assert request["freed_blocks"] == held - kv.num_retained
    assert request["freed_blocks_repacked"] is None


def test_dry_run_knows_the_cap_of_blocks(door, engine):
    """A cap below the budget decides."""
    kv = engine.run("a", 200)
    change = {"policy": "random", "budget_tokens": 100, "max_blocks_per_request": 4}
    (request,) = door.patch(change, params={"dry_run": "true"}).json()["requests"]
    door.patch(change)
    engine.layer.evict_if_due(kv, 200)
    assert request["evicted_tokens"] == kv.num_evicted == 200 - 3 * 16


def test_dry_run_with_scores_gives_counts_only(door, engine):
    """Which tokens go is not known yet; how many is, and that they are observed first."""
    engine.run("a", 200)
    found = door.patch({"policy": "h2o"}, params={"dry_run": "true"}).json()
    (request,) = found["requests"]
    assert (request["evicted_tokens"], request["freed_blocks"]) == (200 - 64, None)
    assert request["freed_blocks_repacked"] == 13 - 4
    assert request["next_eviction"] == "after 16 tokens"
    assert found["totals"]["freed_blocks"] is None
    assert any(w.startswith("attention:") and "1 running" in w for w in found["warnings"])


@pytest.mark.parametrize(
    ("changes", "warning"),
    [
        ({"budget_tokens": 40}, "quality: 1 running requests lose more than half"),
        ({"evict_free_ratio": 0.5}, "quality: with evict_free_ratio"),
        ({"keep_ratio": 0.04}, "below protected tokens"),
        ({"theta_f": 0.5}, None),
    ],
)
def test_dry_run_warns(door, engine, changes, warning):
    """Only of what is worth a warning."""
    engine.run("a", 70)
    door.patch({"policy": "none"})
    changes = {"policy": "streaming_llm", **changes} if warning else changes
    engine.run("b", 200)
    warnings = door.patch(changes, params={"dry_run": "true"}).json()["warnings"]
    if warning is None:
        assert warnings == []
    else:
        assert any(text.startswith(warning) for text in warnings), warnings


def test_dry_run_warns_of_protected_spans_and_own_options(door, engine):
    """Spans above the budget stay; what a request set itself is not changed."""
    engine.run("spans", 200, protect="0:150")
    engine.run("own", 200, budget_tokens=180)
    found = door.patch({"budget_tokens": 60}, params={"dry_run": "true"}).json()
    spans, own = found["requests"]
    assert spans["evicted_tokens"] == 200 - 150 - 8
    assert own["evicted_tokens"] == 20
    assert [w.split(":")[0] for w in found["warnings"]] == [
        "below protected tokens",
        "own options",
    ]


def test_dry_run_refuses_as_the_change_would(door, engine):
    """412 and 422 come first; ?dry_run alone means yes."""
    assert door.patch({}, params={"dry_run": ""}, headers={"If-Match": '"9"'}).status_code == 412
    assert door.patch({"theta_f": 2}, params={"dry_run": ""}).status_code == 422
    assert door.patch({"policy": "nope"}, params={"dry_run": ""}).status_code == 422
    assert door.patch({}, params={"dry_run": ""}).json()["dry_run"] is True
    assert engine.layer.policy_version == 1


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"dryrun": "true"}, "dryrun"),
        ({"dry_run": "maybe"}, "dry_run"),
        ([("dry_run", "true"), ("dry_run", "false")], "dry_run"),
        ({"apply_to": "all"}, "apply_to"),
        ({"note": "x" * (MAX_NOTE_CHARS + 1)}, "note"),
    ],
)
def test_mistyped_options_change_nothing(door, engine, params, field):
    """422 names the parameter: a wrong ?dryrun must not become a change."""
    for answer in (door.patch({"theta_f": 0.5}, params=params), rollback(door, params=params)):
        assert answer.status_code == 422
        if answer.json()["error"]["field"] != "version":  # nothing to go back to is a reason, too
            assert answer.json()["error"]["field"] == field
    assert engine.layer.policy_version == 1


# -- apply_to ------------------------------------------------------------------------------


def test_running_requests_keep_the_old_document(door, engine):
    """``apply_to=new``: whoever has arrived keeps budget and policy until the end."""
    old = engine.run("old")
    engine.arrive("waiting")
    answer = door.patch({"budget_tokens": 32, "policy": "random"}, params={"apply_to": "new"})
    assert answer.status_code == 200
    new = engine.run("new")
    waiting = engine.admit("waiting", 200)
    for _ in range(40):
        engine.step()
    evictor = engine.layer.evictor
    assert [evictor.policy_of(kv).name for kv in (old, waiting, new)] == [
        "streaming_llm",
        "streaming_llm",
        "random",
    ]
    assert [kv.num_live // 16 for kv in (old, waiting, new)] == [4, 4, 2]
    states = door.send("GET", "/admin/state").json()["requests"]
    assert {r["request_id"]: r["policy_version"] for r in states} == {
        "old": 1,
        "waiting": 1,
        "new": 2,
    }


def test_preemption_does_not_change_what_a_request_follows(door, engine):
    """It arrived before the change, however often it is computed again."""
    engine.run("a")
    door.patch({"budget_tokens": 32}, params={"apply_to": "new"})
    engine.preempt("a")
    again = engine.admit("a", 210)
    assert engine.layer.evictor.target_of(again, 210) == 64


def test_a_change_for_all_ends_every_exception(door, engine):
    """Two changes for new requests, then one for everybody."""
    kvs = [engine.run("first")]
    for budget in (48, 32):
        door.patch({"budget_tokens": budget}, params={"apply_to": "new"})
        kvs.append(engine.run(f"under {budget}"))
    evictor = engine.layer.evictor
    assert [evictor.target_of(kv, 200) for kv in kvs] == [64, 48, 32]
    door.patch({"budget_tokens": 40})
    assert [evictor.target_of(kv, 200) for kv in kvs] == [40, 40, 40]


def test_requests_of_every_age_keep_what_they_follow(door, engine):
    """Also one from before an earlier exception that a change for all has ended."""
    oldest = engine.run("oldest")
    door.patch({"budget_tokens": 48}, params={"apply_to": "new"})
    door.patch({"budget_tokens": 40})
    door.patch({"budget_tokens": 32}, params={"apply_to": "new"})
    assert engine.layer.evictor.target_of(oldest, 200) == 40


def test_documents_are_forgotten_with_their_last_request(door, engine):
    """Nothing grows with the number of changes."""
    engine.run("first")
    for n in range(5):
        door.patch({"theta_f": n / 10}, params={"apply_to": "new"})
    assert len(engine.layer.evictor.documents.in_use()) == 2
    engine.finish("first")
    door.patch({"theta_f": 0.9}, params={"apply_to": "new"})
    assert len(engine.layer.evictor.documents.in_use()) == 1


def test_pool_settings_change_for_everybody(door, engine):
    """No request can keep a θ_F or a mode; a warning says so."""
    engine.run("a")
    change = {"theta_f": 0.5, "mode": "naive", "budget_tokens": 48}
    warnings = door.patch(change, params={"apply_to": "new"}).json()["warnings"]
    assert any(w.startswith("pool: mode, theta_f ") for w in warnings)
    assert engine.layer.headroom_blocks == 0


def test_dry_run_for_new_requests_leaves_running_ones(door, engine):
    """They are shown with the document they follow and what that does to them."""
    engine.run("a", 200)
    params = {"dry_run": "true", "apply_to": "new"}
    (request,) = door.patch({"budget_tokens": 20}, params=params).json()["requests"]
    assert (request["policy_version"], request["evicted_tokens"]) == (1, 200 - 64)


def test_scores_are_observed_as_long_as_anybody_needs_them(door, engine):
    """A kept document with scores keeps the worker observing for its requests, and only so long."""
    door.patch({"policy": "h2o"})
    kv = engine.run("a")
    door.patch({"policy": "streaming_llm"}, params={"apply_to": "new"})
    assert engine.layer.observation() is not None
    assert engine.layer.signals_of(kv)
    engine.finish("a")
    assert engine.layer.observation() is None


def test_receipt_names_the_document_that_was_followed(door, engine):
    """Not the one in force at the end."""
    engine.run("a", receipt="k")
    door.patch({"budget_tokens": 32}, params={"apply_to": "new"})
    engine.finish("a")
    assert engine.layer.receipt("k")["policy_version"] == 1


# -- history and rollback ------------------------------------------------------------------


def test_history_tells_who_when_and_what(door, engine):
    """The newest first; only fields that changed; the time is UTC."""
    before = datetime.now(UTC)
    door.patch({"theta_f": 0.5, "sink_tokens": 4}, params={"note": "evening", "apply_to": "new"})
    change, start = history(door)
    assert start["action"] == "start"
    assert (change["version"], change["by"], change["action"]) == (2, "admin-1", "patch")
    assert (change["apply_to"], change["note"]) == ("new", "evening")
    assert change["changes"] == {"theta_f": {"from": 0.25, "to": 0.5}}
    assert change["at"].endswith("Z")
    seconds = (datetime.fromisoformat(change["at"]) - before).total_seconds()
    assert -1 < seconds < 60


def test_history_is_bounded(door, engine):
    """The oldest is forgotten, and cannot be rolled back to."""
    for n in range(MAX_CHANGES + 5):
        engine.layer.control.patch({"theta_f": (n % 9) / 10})
    found = history(door)
    assert len(found) == MAX_CHANGES
    assert [c["version"] for c in found[:2]] == [MAX_CHANGES + 6, MAX_CHANGES + 5]
    answer = rollback(door, {"version": 6})
    assert answer.status_code == 422
    assert answer.json()["error"]["bound"] == f"a remembered version, 7 to {MAX_CHANGES + 6}"


def test_rollback_restores_the_version_before(door, engine):
    """As a new version, with its own line; once more is forward again."""
    door.patch({"theta_f": 0.5, "policy": "random"})
    answer = rollback(door)
    assert answer.headers["ETag"] == '"3"'
    assert answer.json()["document"]["policy"] == "streaming_llm"
    assert answer.json()["changes"]["theta_f"] == {"from": 0.5, "to": 0.25}
    newest = history(door)[0]
    assert (newest["action"], newest["rolled_back_to"]) == ("rollback", 1)
    assert rollback(door).json()["document"]["policy"] == "random"


def test_rollback_to_a_version(door, engine):
    """Budgets of either kind come back, with null where there was none."""
    door.patch({"keep_ratio": 0.5})
    door.patch({"budget_tokens": 99})
    document = rollback(door, {"version": 2}).json()["document"]
    assert (document["keep_ratio"], document["budget_tokens"]) == (0.5, None)


def test_rollback_can_be_tried_and_guarded(door, engine):
    """dry_run, If-Match and apply_to as for a change."""
    kv = engine.run("a")
    door.patch({"budget_tokens": 32})
    tried = rollback(door, params={"dry_run": "true"}).json()
    assert tried["changes"] == {"budget_tokens": {"from": 32, "to": 64}}
    assert rollback(door, headers={"If-Match": '"1"'}).status_code == 412
    assert engine.layer.policy_version == 2
    answer = rollback(door, headers={"If-Match": '"2"'}, params={"apply_to": "new"})
    assert answer.status_code == 200
    assert engine.layer.evictor.target_of(kv, 200) == 32


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 422),  # there is no version before the first
        (b"{}", 422),
        (b'{"version": 2}', 422),
        (b'{"version": 0}', 422),
        (b'{"version": true}', 422),
        (b'{"version": "1"}', 422),
        (b'{"version": 1.0}', 422),
        (b'{"verison": 1}', 422),
        (b"[1]", 422),
        (b"{", 400),
        (b'{"version": 1}', 200),
    ],
)
def test_rollback_refuses_other_targets(door, engine, body, status):
    """Named, and nothing changes."""
    answer = door.send("POST", "/admin/policy/rollback", content=body)
    assert answer.status_code == status
    assert engine.layer.policy_version == (2 if status == 200 else 1)


def test_a_violation_is_in_the_history(door, engine):
    """The engine's own change has a line, and starting relocation again a warning."""
    kv = engine.run("a", 200)
    kv.blocks.num_live[0] += 1
    engine.layer.verification._holds("I2", lambda: engine.layer.verification.check_all())
    newest = history(door)[0]
    assert (newest["by"], newest["action"]) == ("vtoken", "safety")
    assert newest["changes"] == {"mode": {"from": "lazy", "to": "naive"}}
    warnings = rollback(door, params={"dry_run": "true"}).json()["warnings"]
    assert any(w.startswith("relocation: a violation stopped it") for w in warnings)


# -- changes that nobody waits for any more ------------------------------------------------


class BusyEngine(LayerEngine):
    """Inside a step that takes longer than anybody waits: calls queue up."""

    def __init__(self) -> None:
        super().__init__()
        self.is_busy = False
        self.queue: list[tuple] = []

    async def call_utility_async(self, *call):
        if self.is_busy:
            self.queue.append(call)
            await asyncio.Event().wait()
        return await super().call_utility_async(*call)

    def end_step(self) -> list[dict]:
        """Everything that was sent is answered; nobody listens."""
        self.is_busy = False
        return [asyncio.run(self.call_utility_async(*call)) for call in self.queue]


def test_change_that_was_given_up_is_not_made_later(make):
    """A rollback that got 503 and is sent again does not undo itself when the engine is back."""
    engine = BusyEngine()
    hasty, door = make.door(engine, timeout_seconds=0.05), make.door(engine, timeout_seconds=60)
    door.patch({"budget_tokens": 128})
    engine.is_busy = True
    for answer in (rollback(hasty), hasty.patch({"sink_tokens": 2})):
        assert answer.status_code == 503
        assert "/admin/policy/history" in answer.json()["error"]["message"]
        assert answer.json()["error"]["change"] == "open"
    late = engine.end_step()
    assert [answer["error"]["type"] for answer in late] == ["TooLate", "TooLate"]
    assert len(history(door)) == 2
    assert rollback(door).json()["document"]["budget_tokens"] == 64
    assert len(history(door)) == 3
