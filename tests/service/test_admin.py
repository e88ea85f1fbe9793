"""The admin routes: merge patch, versions, and refusals that name field and bound."""

from __future__ import annotations

import json

import pytest

from service.admin_body import MAX_BODY_BYTES


def test_get_policy_gives_document_and_etag(door):
    """The ETag is the document's version."""
    response = door.send("GET", "/admin/policy")
    assert response.headers["ETag"] == '"0"'
    assert response.json()["document"]["theta_f"] == 0.25
    assert response.json()["mode"] == "lazy"


def test_patch_merges_and_raises_the_version(door, engine):
    """Only the named fields change."""
    response = door.patch({"theta_f": 0.5, "budget_tokens": 256})
    assert response.status_code == 200
    assert response.headers["ETag"] == '"1"'
    assert response.json()["document"]["theta_f"] == 0.5
    assert response.json()["document"]["sink_tokens"] == 4
    assert engine.config.budget_tokens == 256


def test_patch_null_resets_to_the_default(door, engine):
    """JSON merge patch: null takes a member away."""
    door.patch({"theta_f": 0.5})
    assert door.patch({"theta_f": None}).json()["document"]["theta_f"] == 0.25


@pytest.mark.parametrize("header", [None, "*", '"0"', 'W/"0"', ' "0" '])
def test_patch_with_present_version_passes(door, header):
    """Without If-Match, or with the version in force, the change happens."""
    headers = {} if header is None else {"If-Match": header}
    assert door.patch({"theta_f": 0.5}, headers=headers).status_code == 200


def test_patch_with_stale_version_changes_nothing(door, engine):
    """412, and the engine keeps its policy."""
    door.patch({"theta_f": 0.5})
    response = door.patch({"theta_f": 0.75}, headers={"If-Match": '"0"'})
    assert response.status_code == 412
    assert response.json()["error"]["type"] == "StaleVersion"
    assert engine.config.theta_f == 0.5


@pytest.mark.parametrize("header", ["0", '"x"', '"0", "1"', '""', '"' + "9" * 40 + '"'])
def test_patch_with_unreadable_version_is_a_bad_request(door, engine, header):
    """A tag that this server never gave out is not guessed at."""
    assert door.patch({}, headers={"If-Match": header}).status_code == 400
    assert engine.calls == []


def test_two_versions_are_not_chosen_from(door, engine):
    """Two headers are a list, as two tags in one are."""
    headers = [("If-Match", '"0"'), ("If-Match", '"1"')]
    assert door.patch({"theta_f": 0.5}, headers=headers).status_code == 400
    assert engine.calls == []


@pytest.mark.parametrize(
    ("changes", "field", "in_bound"),
    [
        ({"theta_f": 1.5}, "theta_f", "theta_f < 1"),
        ({"theta_f": "high"}, "theta_f", "a number"),
        ({"theta_f": True}, "theta_f", "a number"),
        ({"evict_interval_tokens": 0}, "evict_interval_tokens", "1 <="),
        ({"budget_tokens": 9}, "budget_tokens", "budget_tokens >"),
        ({"keep_ratio": 0.5, "budget_tokens": 512}, "keep_ratio|budget_tokens", "exactly one"),
        ({"theta": 0.5}, "theta", "theta_f"),
        ({"mode": "off"}, "mode", "naive or lazy"),
        ({"seed": 1}, "seed", "known fields"),
    ],
)
def test_patch_refuses_with_field_and_bound(door, engine, changes, field, in_bound):
    """422 in the words of the engine's own configuration; nothing changes."""
    response = door.patch(changes)
    error = response.json()["error"]
    assert response.status_code == 422
    assert error["field"] == field
    assert in_bound in error["bound"]
    assert error["message"]
    assert engine.version == 0


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"theta_f=0.5",
        b'{"theta_f": NaN}',
        b'{"theta_f": Infinity}',
        b'{"low_watermark_ratio": 1e400}',
        b'{"policy_args": {"a": [-1e400]}}',
        b'{"budget_tokens": 99999999999999999999}',
        b'{"policy": "\\ud800"}',
        b'{"policy": "\xff"}',
        b'{"policy_args": ' + b'{"a":' * 5000 + b"1" + b"}" * 5001,
    ],
)
def test_patch_refuses_what_is_not_json(door, engine, body):
    """400 with a reason, no stack trace, and the engine is not asked."""
    response = door.send("PATCH", "/admin/policy", content=body)
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "BadBody"
    assert "Traceback" not in response.text
    assert engine.calls == []


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (b'{"theta_f": 0.1, "mode": "lazy", "theta_f": 0.9}', "theta_f"),
        (b'{"policy": "random", "policy_args": {"a": 1, "a": 2}}', "a"),
        (b'{"\\ud800": 1, "\\ud800": 2}', "\\ud800"),
    ],
)
@pytest.mark.parametrize(("method", "path"), [("PATCH", ""), ("POST", "/rollback")])
def test_fields_given_twice_are_refused(door, engine, body, field, method, path):
    """422: the last would count, and the other be lost without a word."""
    response = door.send(method, "/admin/policy" + path, content=body)
    assert response.status_code == 422
    assert response.json()["error"]["field"] == field
    assert response.json()["error"]["bound"] == "given once"
    assert engine.calls == []


@pytest.mark.parametrize("body", [[], 1, "x", None, True, [{"theta_f": 0.5}]])
def test_patch_refuses_what_is_not_an_object(door, engine, body):
    """422: it is JSON, but no merge patch of a document."""
    response = door.send("PATCH", "/admin/policy", content=json.dumps(body))
    assert response.status_code == 422
    assert response.json()["error"]["bound"] == "a JSON object"
    assert engine.calls == []


def test_patch_refuses_a_long_body(door, engine):
    """413 before the body is read to its end."""
    body = b'{"policy": "' + b"x" * MAX_BODY_BYTES + b'"}'
    assert door.send("PATCH", "/admin/policy", content=body).status_code == 413
    assert engine.calls == []


def test_state_and_policies(door):
    """Both pass what the engine says."""
    assert door.send("GET", "/admin/state").json()["pool"] == {"free_blocks": 7}
    assert door.send("GET", "/admin/policies").json() == {"policies": [{"name": "streaming_llm"}]}


def test_mode_off_answers_409(make, engine):
    """The routes exist and say why there is nothing to see."""
    response = make.door(engine, mode="off").send("GET", "/admin/policy")
    assert response.status_code == 409
    assert "mode off" in response.json()["error"]["message"]


def test_dead_engine_answers_503(make, engine):
    """As does one that does not answer in time."""
    engine.hangs = True
    assert make.door(engine, timeout_seconds=0.05).send("GET", "/admin/state").status_code == 503
    engine.is_dead = True
    assert make.door(engine).send("GET", "/admin/state").status_code == 503


def test_engine_fault_answers_500_without_trace(door, engine):
    """The reason is in the message, and nothing else is."""
    engine.error = Exception("boom")
    response = door.send("GET", "/admin/state")
    assert response.status_code == 500
    assert "boom" in response.json()["error"]["message"]
