"""The history of the policy document: order, bounds, differences."""

from __future__ import annotations

from itertools import pairwise

import pytest

from vtoken.config import LIVE_FIELDS, VTokenConfig
from vtoken.errors import ConfigError
from vtoken.history import MAX_CHANGES, MAX_NOTE_CHARS, ChangeInfo, History, diff


def make_history(num_changes: int) -> History:
    """A history whose version ``n`` has ``sink_tokens = n``."""
    configs = [VTokenConfig(sink_tokens=n) for n in range(1, num_changes + 2)]
    history = History(configs[0])
    for before, after in pairwise(configs):
        history.record(after.sink_tokens, before, after, ChangeInfo())
    return history


def test_newest_comes_first_and_the_start_is_there() -> None:
    """Versions count from 1, which nobody made."""
    changes = list(make_history(2))
    assert [change.version for change in changes] == [3, 2, 1]
    assert (changes[-1].info.action, changes[-1].changes) == ("start", {})


def test_oldest_is_forgotten() -> None:
    """It does not grow, and says what it still knows."""
    history = make_history(MAX_CHANGES + 3)
    assert len(list(history)) == MAX_CHANGES
    assert history.find(5).config.sink_tokens == 5
    with pytest.raises(ConfigError, match=f"a remembered version, 5 to {MAX_CHANGES + 4}"):
        history.find(4)


def test_find_gives_the_version_before_by_default() -> None:
    """Unless there is none."""
    assert make_history(3).find().version == 3
    with pytest.raises(ConfigError, match="no version before 1"):
        make_history(0).find()


def test_diff_names_live_fields_that_differ() -> None:
    """From and to, as JSON; what cannot change is left out."""
    before = VTokenConfig(policy_args={"a": 1}, seed=1)
    after = VTokenConfig(policy_args={"a": 2}, seed=2, keep_ratio=0.5, budget_tokens=None)
    assert diff(before, after) == {
        "policy_args": {"from": {"a": 1}, "to": {"a": 2}},
        "keep_ratio": {"from": None, "to": 0.5},
        "budget_tokens": {"from": 1024, "to": None},
    }
    assert "seed" not in LIVE_FIELDS


@pytest.mark.parametrize(
    ("fields", "field"),
    [({"apply_to": "some"}, "apply_to"), ({"note": "x" * (MAX_NOTE_CHARS + 1)}, "note")],
)
def test_info_is_bounded(fields: dict[str, str], field: str) -> None:
    """What callers choose is checked where it is kept."""
    with pytest.raises(ConfigError) as caught:
        ChangeInfo(**fields)  # type: ignore[arg-type]
    assert caught.value.field == field
