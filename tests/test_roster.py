"""Roster: whose row is whose, and who may be due, while requests come and go."""

from __future__ import annotations

import pytest

from tests.core_models import make_layer, make_request
from vtoken.table_store import NOBODY


def test_rows_follow_who_is_tracked() -> None:
    """The answer to the same question changes when a request begins or ends."""
    layer, pool = make_layer(policy="none")
    asked = ["a", "b"]
    a = make_request(layer, pool, "a", num_tokens=17)
    assert layer.roster.rows_of(asked).tolist() == [a.row, NOBODY]
    assert not layer.roster.tracks(asked)
    b = make_request(layer, pool, "b", num_tokens=17)
    assert layer.roster.rows_of(asked).tolist() == [a.row, b.row]
    assert layer.roster.tracks(asked)
    left = a.row
    layer.forget("a")
    assert layer.roster.rows_of(asked).tolist() == [NOBODY, b.row]
    assert make_request(layer, pool, "c", num_tokens=17).row == left
    assert layer.roster.rows_of(asked).tolist() == [NOBODY, b.row]
    assert not layer.roster.tracks(asked)


def test_a_row_that_changes_hands_is_due_for_its_new_owner_only() -> None:
    """A step that was scheduled before a request ended finds nobody in its place."""
    layer, pool = make_layer(policy="streaming_llm", budget_tokens=8)
    names = ["a", "b"]
    for name in names:
        make_request(layer, pool, name, num_tokens=33).next_evict_at = 1
    assert [kv.req_id for kv in layer.roster.may_be_due(names)] == names
    layer.forget("a")
    successor = make_request(layer, pool, "c", num_tokens=33)
    successor.next_evict_at = 1
    assert [kv.req_id for kv in layer.roster.may_be_due(names)] == ["b"]
    assert layer.roster.may_be_due(["c"]) == [successor]


def test_nobody_can_change_rows_that_are_remembered() -> None:
    """They answer the next step's question as well."""
    layer, pool = make_layer(policy="none")
    make_request(layer, pool, "a", num_tokens=17)
    with pytest.raises(ValueError, match="read-only"):
        layer.roster.rows_of(["a"])[0] = 5
