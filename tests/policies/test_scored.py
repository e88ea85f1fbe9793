"""What each scored policy prefers, on views small enough to read."""

from __future__ import annotations

import numpy as np
import pytest

from vtoken.errors import ConfigError, PolicyError
from vtoken.observation import (
    ATTENTION_HISTORY,
    ATTENTION_LAST,
    ATTENTION_PREFILL,
    ATTENTION_SUM,
    KEY_NORM,
    KEY_REDUNDANCY,
    VALUE_KEY_RATIO,
)
from vtoken.policies.base import EvictionPolicy, LiveView, lowest, protect_partial_pages
from vtoken.policies.registry import POLICIES

NOBODY = np.zeros(6, np.bool_)


def make_view(live: list[int], num_prompt: int = 100, **signals: object) -> LiveView:
    """A view of these tokens with the given signals, pages of two."""
    values = {name: np.array(value, _dtype(name)) for name, value in signals.items()}
    return LiveView(np.array(live), max(live) + 1, num_prompt, 0, values, page_size=2)


def _dtype(name: str) -> type:
    return np.uint64 if name == ATTENTION_HISTORY else np.float32


@pytest.mark.parametrize(
    ("policy", "signal", "values", "victims"),
    [
        ("h2o", ATTENTION_SUM, [9, 1, 5, 0.5, 3, 7], [2, 4]),
        ("tova", ATTENTION_LAST, [9, 1, 5, 0.5, 3, 7], [2, 4]),
        ("knorm", KEY_NORM, [9, 1, 5, 0.5, 3, 7], [1, 8]),
        ("scissorhands", ATTENTION_HISTORY, [0b111, 0b1000, 0b11, 1 << 63, 0, 0b110], [2, 5]),
        # Max-pooled over three neighbours on each side by logical id.
        ("snapkv", ATTENTION_PREFILL, [9, 1, 0, 0, 3, 7], [5, 8]),
    ],
)
def test_policy_evicts_the_least_important(
    policy: str, signal: str, values: list[float], victims: list[int]
) -> None:
    """Two of six tokens go: the lowest by the method's own measure, of equals the older."""
    view = make_view(
        [1, 2, 3, 4, 5, 8] if policy != "snapkv" else [1, 2, 5, 8, 12, 13], **{signal: values}
    )
    assert POLICIES[policy]().select_victims(view, 2, NOBODY).tolist() == victims


def test_lowest_takes_the_older_of_equals_and_no_protected() -> None:
    """Ties are broken by age, whatever the sort does with them."""
    scores = np.array([0.0, 1, 0, 0, 2, 0])
    protected = np.array([True, False, False, False, False, False])
    assert lowest(scores, 2, protected).tolist() == [2, 3]
    assert lowest(scores, 0, protected).tolist() == []
    many = np.tile([1.0, 0.0, 2.0], 100)  # long enough for a sort that is not stable
    assert lowest(many, 30, np.zeros(300, np.bool_)).tolist() == list(range(1, 90, 3))


def test_scissorhands_forgets_what_left_the_window() -> None:
    """A token that was important long ago is no better than one that never was."""
    view = make_view([0, 1, 2], attention_history=[0b1111 << 8, 0b1, 0b10])
    narrow = POLICIES["scissorhands"](0, history_window=8)
    wide = POLICIES["scissorhands"]()
    nobody = np.zeros(3, np.bool_)
    assert narrow.select_victims(view, 1, nobody).tolist() == [0]
    assert wide.select_victims(view, 1, nobody).tolist() == [1]


def test_snapkv_evicts_generated_tokens_last() -> None:
    """Prompt tokens by score first, then generated ones, oldest first."""
    view = make_view([0, 1, 2, 3, 4, 5], num_prompt=3, attention_prefill=[3, 2, 9, 0, 0, 0])
    policy = POLICIES["snapkv"](0, pool_radius=0)
    assert policy.select_victims(view, 2, NOBODY).tolist() == [0, 1]
    assert policy.select_victims(view, 5, NOBODY).tolist() == [0, 1, 2, 3, 4]


def test_rkv_prefers_the_redundant_of_equally_attended() -> None:
    """With equal attention the key that resembles the others goes, with equal keys the ignored."""
    same = {ATTENTION_SUM: [1, 1, 1], KEY_REDUNDANCY: [0.1, 0.9, 0.2]}
    nobody = np.zeros(3, np.bool_)
    assert POLICIES["rkv"]().select_victims(make_view([0, 1, 2], **same), 1, nobody) == [1]
    unlike = {ATTENTION_SUM: [5, 4, 1], KEY_REDUNDANCY: [0.5, 0.5, 0.5]}
    assert POLICIES["rkv"]().select_victims(make_view([0, 1, 2], **unlike), 1, nobody) == [2]
    plain = POLICIES["rkv"](0, importance_weight=1)
    assert plain.select_victims(make_view([0, 1, 2], **{**same, **unlike}), 1, nobody) == [2]


def test_paged_eviction_takes_whole_pages_by_their_mean() -> None:
    """The page with the lowest mean goes, although the lowest token lies in another."""
    view = make_view([2, 3, 4, 5, 6, 7], value_key_ratio=[0.0, 9.0, 1.0, 1.0, 5.0, 5.0])
    assert view.page_of.tolist() == [1, 1, 2, 2, 3, 3]
    assert POLICIES["paged_eviction"]().select_victims(view, 2, NOBODY).tolist() == [4, 5]
    assert VALUE_KEY_RATIO in POLICIES["paged_eviction"].signals


def test_protect_partial_pages_spares_pages_that_cannot_go_whole() -> None:
    """A page with a dead or a protected token is protected as a whole."""
    view = make_view([0, 1, 2, 4, 5, 6, 7])
    protected = np.array([False] * 4 + [True] + [False] * 2)
    extended = protect_partial_pages(view, protected)
    assert extended.tolist() == [False, False, True, True, True, False, False]


@pytest.mark.parametrize(
    ("policy", "argument", "value"),
    [
        ("scissorhands", "history_window", 0),
        ("scissorhands", "history_window", 65),
        ("scissorhands", "history_window", True),
        ("scissorhands", "history_window", 8.0),
        ("snapkv", "pool_radius", 32),
        ("snapkv", "pool_radius", "3"),
        ("rkv", "importance_weight", 1.5),
        ("rkv", "importance_weight", None),
        ("rkv", "importance_weight", float("nan")),
    ],
)
def test_argument_outside_its_schema_is_refused(policy: str, argument: str, value: object) -> None:
    """The error names the argument and its bound."""
    with pytest.raises(ConfigError, match="of type") as caught:
        POLICIES[policy](0, **{argument: value})
    assert caught.value.field == f"policy_args.{argument}"


def test_arguments_take_their_defaults() -> None:
    """What the schema says is what the policy uses."""
    for cls in POLICIES.values():
        assert cls().args == {name: s["default"] for name, s in cls.args_schema.items()}


def test_unknown_signal_is_refused_when_the_class_is_written() -> None:
    """A misspelt signal would be waited for in vain."""
    with pytest.raises(PolicyError, match="attention_summ"):

        class Misspelt(EvictionPolicy):
            name = "misspelt"
            signals = frozenset({"attention_summ"})
