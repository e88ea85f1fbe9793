"""The OpenAPI document says of each field of the policy document exactly what is enforced."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.service.conftest import Door
from tests.service.layer_engine import LayerEngine
from vtoken.config import LIVE_FIELDS, LIVE_MODES, VTokenConfig
from vtoken.policies.registry import POLICIES

WORDS = {"minimum": -1, "exclusiveMinimum": 1, "maximum": 1, "exclusiveMaximum": -1}
"""Keyword to where the nearest number on the other side of the bound lies: outside it, or inside
where the end is open."""
WITH: dict[str, dict[str, Any]] = {
    "budget_tokens": {"sink_tokens": 0, "recent_tokens": 1},
    "sink_tokens": {"budget_tokens": 100_000_000},
    "recent_tokens": {"budget_tokens": 100_000_000},
    "theta_f_min": {"theta_f_max": math.nextafter(1, 0)},
    "theta_f_max": {"theta_f_min": 0},
    "max_blocks_per_request": {"sink_tokens": 0, "recent_tokens": 1},
}
"""Other fields, so that no bound between two fields is met first."""


def make_door() -> Door:
    """Admin routes over a real token layer, whose pool is larger than any setting."""
    engine = LayerEngine()
    engine.pool.num_total_blocks = 10**9
    return Door(engine)


DOOR = make_door()
PATHS = DOOR.app.openapi()["paths"]
PATCH = PATHS["/admin/policy"]["patch"]["requestBody"]["content"]["application/merge-patch+json"]
FIELDS: dict[str, dict[str, Any]] = PATCH["schema"]["properties"]


def rule_of(name: str) -> dict[str, Any]:
    """What the schema says of values other than null."""
    options = [one for one in FIELDS[name]["anyOf"] if one != {"type": "null"}]
    assert len(options) == 1
    return options[0]


NUMBERS = [name for name in FIELDS if rule_of(name)["type"] in ("integer", "number")]
BOUNDS = [(name, word) for name in NUMBERS for word in WORDS if word in rule_of(name)]
CHOICES = [name for name in FIELDS if "enum" in rule_of(name)]


def tried(name: str, value: object) -> tuple[int, dict[str, Any]]:
    """Status of a dry run, and its error."""
    changes = {**WITH.get(name, {}), name: value}
    answer = DOOR.patch(changes, params={"dry_run": "true"})
    return answer.status_code, answer.json().get("error", {})


def next_to(bound: float, direction: int, kind: str) -> float:
    """The number beside ``bound``, up (1) or down (-1)."""
    return bound + direction if kind == "integer" else math.nextafter(bound, direction * math.inf)


def test_every_field_and_every_number_is_described() -> None:
    """Each live field has a description and its default; each number both bounds."""
    defaults = VTokenConfig().to_dict()
    assert set(FIELDS) == LIVE_FIELDS
    for name, schema in FIELDS.items():
        assert schema["description"]
        assert schema.get("default") == defaults[name]
    assert len(NUMBERS) >= 14
    assert len(BOUNDS) == 2 * len(NUMBERS)


@pytest.mark.parametrize(("name", "word"), BOUNDS)
def test_bound_is_the_enforced_one(name: str, word: str) -> None:
    """The last value inside is taken in a dry run; the next one is a 422 that names the bound."""
    rule = rule_of(name)
    bound, kind = rule[word], rule["type"]
    other = next_to(bound, WORDS[word], kind)
    inside, outside = (other, bound) if word.startswith("exclusive") else (bound, other)
    status, error = tried(name, inside)
    assert status == 200, error
    status, error = tried(name, outside)
    assert status == 422
    assert error["field"] == name
    assert str(bound) in error["bound"]


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_a_number_is_taken_if_the_schema_takes_it(data: st.DataObject) -> None:
    """Anywhere, not only at the ends; whole numbers only where the schema says so."""
    name = data.draw(st.sampled_from(NUMBERS))
    rule = rule_of(name)
    top = rule.get("maximum", rule.get("exclusiveMaximum"))
    value = data.draw(st.integers(-2, 2 * top + 2) | st.floats(-0.5, 1.5 * top))
    above = value >= rule["minimum"] if "minimum" in rule else value > rule["exclusiveMinimum"]
    below = value <= rule["maximum"] if "maximum" in rule else value < rule["exclusiveMaximum"]
    fits = rule["type"] == "number" or isinstance(value, int)
    status, error = tried(name, value)
    assert status == (200 if above and below and fits else 422), (name, value, error)


@pytest.mark.parametrize("name", CHOICES)
def test_choices_are_the_enforced_ones(name: str) -> None:
    """Each is taken; another is a 422 that names them."""
    choices = rule_of(name)["enum"]
    assert [tried(name, choice)[0] for choice in choices] == [200] * len(choices)
    status, error = tried(name, "another")
    assert status == 422
    assert all(choice in error["bound"] for choice in choices)


def test_mode_off_is_not_among_the_choices() -> None:
    """It cannot be switched to while the engine runs."""
    assert rule_of("mode")["enum"] == list(LIVE_MODES)
    status, error = tried("mode", "off")
    assert (status, error["field"]) == (422, "mode")


def test_every_example_of_a_policy_is_one() -> None:
    """Names of other packages' policies are valid, too, so that they are examples only."""
    assert rule_of("policy")["examples"] == list(POLICIES)
    assert [tried("policy", name)[0] for name in POLICIES] == [200] * len(POLICIES)
    assert tried("policy", "another")[0] == 422


def test_the_document_that_is_read_has_the_same_bounds() -> None:
    """``GET /admin/policy`` describes each field as the patch does, but for null."""
    schemas = DOOR.app.openapi()["components"]["schemas"]
    document = schemas["Policy"]["properties"]["document"]["properties"]
    assert set(document) == LIVE_FIELDS
    for name in FIELDS:
        options = document[name].get("anyOf", [document[name]])
        found = next(one for one in options if one != {"type": "null"})
        assert rule_of(name).items() <= found.items()
