"""Counts of refused requests: every reason from the start, and none that nobody knows."""

from __future__ import annotations

import pytest

from service.refusals import REASONS, Refusals
from service.settings.http_process import ServiceSettings


def test_every_reason_is_there_from_the_start() -> None:
    """At zero; counting one leaves the others."""
    refusals = Refusals()
    assert refusals.totals() == dict.fromkeys(REASONS, 0)
    refusals.count("draining")
    refusals.count("draining")
    assert refusals.totals() == {**dict.fromkeys(REASONS, 0), "draining": 2}


def test_unknown_reason_is_a_mistake_of_ours() -> None:
    """A series that nobody documented does not appear by a typing error."""
    with pytest.raises(AssertionError, match="max_tokens"):
        Refusals().count("max_tokens")


def test_reasons_are_named_after_settings() -> None:
    """Every bound that a setting puts on requests is a reason, in its own words."""
    bounds = {name for name in ServiceSettings.model_fields if name.startswith("max_")}
    assert set(REASONS) == bounds | {"request_timeout_seconds", "draining", "cut_off"}
