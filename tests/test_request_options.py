"""RequestOptions: what each key accepts, and that a refusal names key, value and bound."""

from __future__ import annotations

import contextlib
import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vtoken.config import VTokenConfig
from vtoken.errors import ConfigError
from vtoken.request_options import KEYS, NO_OPTIONS, RequestOptions


def parse(**ours: Any) -> RequestOptions:
    """Options from ``vtoken_<name>`` keys."""
    return RequestOptions.parse({f"vtoken_{name}": value for name, value in ours.items()})


@pytest.mark.parametrize("extra_args", [None, {}, {"session_id": "x", "kv_transfer_params": {}}])
def test_requests_without_our_keys_have_no_options(extra_args: dict[str, Any] | None) -> None:
    """One shared object: nothing is allocated for them."""
    assert RequestOptions.parse(extra_args) is NO_OPTIONS
    assert NO_OPTIONS.policy_key is None
    assert not NO_OPTIONS.has_own_budget


@pytest.mark.parametrize(
    ("given_", "field", "value"),
    [
        ({"policy": "h2o"}, "policy_key", ("h2o", "{}")),
        (
            {"policy": "x", "policy_args": '{"b": 1, "a": 2}'},
            "policy_key",
            ("x", '{"a": 2, "b": 1}'),
        ),
        ({"keep_ratio": 1}, "keep_ratio", 1),
        ({"keep_ratio": 1e-9}, "keep_ratio", 1e-9),
        ({"budget_tokens": 1}, "budget_tokens", 1),
        ({"budget_tokens": 100_000_000}, "budget_tokens", 100_000_000),
        ({"evict": False}, "policy_key", ("none", "{}")),
        ({"evict": 0}, "evict", False),
        ({"evict": 1}, "policy_key", None),
        ({"receipt": True}, "receipt", True),
        ({"receipt": 1}, "receipt", True),
        ({"receipt": "k_1-Z"}, "receipt", "k_1-Z"),
        ({"protect": "0:35"}, "protect", ((0, 35),)),
        ({"protect": " 100:120, 0:35 "}, "protect", ((0, 35), (100, 120))),
        ({"protect": ["5:9", "0:5", "20:21"]}, "protect", ((0, 9), (20, 21))),
        ({"protect": "0:9,3:4"}, "protect", ((0, 9),)),
    ],
)
def test_allowed_values(given_: dict[str, Any], field: str, value: object) -> None:
    """In the types that ``vllm_xargs`` lets through, with booleans as 0 and 1."""
    assert getattr(parse(**given_), field) == value


NO_SPANS = ["", "0", "0:0", "5:4", "-1:3", "0:3;4:5", "0:3,", "a:b", "0:1:2", "٠:٣x", "1.5:3", []]


@pytest.mark.parametrize(
    ("given_", "field", "bound"),
    [
        *(({"policy": v}, "policy", "name of a policy") for v in (5, "", ["h2o"], True)),
        ({"policy_args": "{}"}, "policy_args", "together with vtoken_policy"),
        *(
            (
                {"policy": "h2o", "policy_args": v},
                "policy_args",
                "a JSON object written as a string",
            )
            for v in ("", "{", "[1]", "null", '{"a": NaN}', "[" * 4000, {"a": 1}, 7, " " * 5000)
        ),
        ({"policy": "h2o", "policy_args": '{"a": 1, "a": 2}'}, "policy_args", "each name once"),
        *(
            ({"keep_ratio": v}, "keep_ratio", "0 < vtoken_keep_ratio <= 1")
            for v in (0, -0.5, 1.01, float("nan"), float("inf"), "0.5", True, [0.5])
        ),
        *(
            ({"budget_tokens": v}, "budget_tokens", "1 <= vtoken_budget_tokens")
            for v in (0, -1, 2.0, "64", True, 10**9, [1])
        ),
        ({"keep_ratio": 0.5, "budget_tokens": 9}, "keep_ratio", "not together with"),
        *(({"evict": v}, "evict", "true or false") for v in (2, "false", -1, 0.0, [0])),
        *(({"receipt": v}, "receipt", "true") for v in (2, "", "a b", "x" * 65, [1])),
        *(({"protect": v}, "protect", "start:end") for v in (*NO_SPANS, 5, [0, 35], [["0:3"]])),
        ({"protect": ",".join(["0:1"] * 65)}, "protect", "1 to 64 spans"),
        *(
            ({"evict": 0, **other}, next(iter(other)), "vtoken_evict=false")
            for other in ({"policy": "h2o"}, {"keep_ratio": 0.5}, {"protect": "0:3"})
        ),
        *(({name.removeprefix("vtoken_"): None}, name[7:], "not null") for name in sorted(KEYS)),
    ],
)
def test_refused_values(given_: dict[str, Any], field: str, bound: str) -> None:
    """ConfigError with the key as users write it."""
    with pytest.raises(ConfigError) as caught:
        parse(**given_)
    assert caught.value.field == f"vtoken_{field}"
    assert bound in caught.value.bound
    assert f"vtoken_{field}=" in str(caught.value)


def test_unknown_keys_are_refused_with_the_nearest() -> None:
    """A typo does not silently do nothing."""
    with pytest.raises(ConfigError, match="did you mean 'vtoken_keep_ratio'") as caught:
        parse(keep_ration=0.5)
    assert caught.value.field == "vtoken_keep_ration"
    with pytest.raises(ConfigError, match="known keys are"):
        parse(policy_key="x")


def test_target_is_the_requests_own_or_the_services() -> None:
    """The ratio rounds up, as the service's does."""
    config = VTokenConfig(budget_tokens=100)
    assert NO_OPTIONS.target_live_tokens(config, 1000) == 100
    assert parse(budget_tokens=7).target_live_tokens(config, 1000) == 7
    assert parse(keep_ratio=0.5).target_live_tokens(config, 21) == 11


def test_budget_must_leave_room() -> None:
    """For at least one token beside those that are kept anyway."""
    parse(budget_tokens=37).check_budget_above(36)
    parse(keep_ratio=0.01).check_budget_above(36)
    with pytest.raises(ConfigError, match="= 36") as caught:
        parse(budget_tokens=36).check_budget_above(36)
    assert caught.value.field == "vtoken_budget_tokens"


@given(st.lists(st.tuples(st.integers(0, 300), st.integers(1, 40)), min_size=1, max_size=20))
def test_spans_cover_what_was_named(starts: list[tuple[int, int]]) -> None:
    """Joined, ascending, apart, and the same tokens."""
    spans = [(start, start + length) for start, length in starts]
    found = parse(protect=",".join(f"{a}:{b}" for a, b in spans)).protect
    assert all(left[1] < right[0] for left, right in itertools.pairwise(found))
    covered = set(itertools.chain(*(range(*span) for span in found)))
    assert covered == set(itertools.chain(*(range(*span) for span in spans)))


SCALARS = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=12))


@given(st.dictionaries(st.sampled_from(sorted(KEYS)), SCALARS | st.lists(SCALARS, max_size=3)))
def test_anything_else_is_a_config_error(extra_args: dict[str, Any]) -> None:
    """Whatever a client sends: options or a ConfigError, no other exception."""
    with contextlib.suppress(ConfigError):
        options = RequestOptions.parse(extra_args)
        assert options.target_live_tokens(VTokenConfig(), 1000) >= 1
