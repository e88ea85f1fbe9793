"""VTokenConfig: bounds, conversions and live changes."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vtoken.config import LIVE_FIELDS, VTokenConfig
from vtoken.errors import ConfigError


def test_config_defaults_are_valid_and_frozen() -> None:
    """A configuration without arguments exists and cannot be written to."""
    config = VTokenConfig()
    assert (config.mode, config.budget_tokens, config.keep_ratio) == ("lazy", 1024, None)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.theta_f = 0.5  # type: ignore[misc]


@pytest.mark.parametrize(
    ("field", "value", "bound"),
    [
        ("mode", "eager", "off, naive, lazy"),
        ("mode", ["lazy"], "off, naive, lazy"),
        ("verify", "on", "off, sampled, full"),
        ("policy", 5, "name"),
        ("policy", ["random"], "name"),
        ("policy", "", "name"),
        ("policy_args", 3, "object"),
        ("policy_args", [["a", 1]], "object"),
        ("record_evictions", "yes", "true or false"),
        ("relocate_shared", 1, "true or false"),
        ("relocate_into_cached", "yes", "true or false"),
        ("max_blocks_per_request", 1, "2 <= max_blocks_per_request <= 1000000"),
        ("max_blocks_per_request", 2.0, "an integer"),
        ("sink_tokens", -1, "0 <= sink_tokens <= 4096"),
        ("sink_tokens", 4097, "0 <= sink_tokens <= 4096"),
        ("recent_tokens", 0, "1 <= recent_tokens"),
        ("recent_tokens", 1.5, "an integer"),
        ("evict_interval_tokens", 0, "1 <= evict_interval_tokens"),
        ("evict_interval_tokens", True, "an integer"),
        ("evict_during_prefill", 1, "true or false"),
        ("evict_free_ratio", -0.1, "0 <= evict_free_ratio <= 1"),
        ("evict_free_ratio", 1.1, "0 <= evict_free_ratio <= 1"),
        ("theta_f_mode", "auto", "fixed, adaptive"),
        ("theta_f_min", 0.51, "theta_f_min <= theta_f_max = 0.5"),
        ("theta_f_min", -0.1, "0 <= theta_f_min < 1"),
        ("theta_f_max", 1.0, "0 <= theta_f_max < 1"),
        ("theta_f", 1.0, "0 <= theta_f < 1"),
        ("theta_f", -0.1, "0 <= theta_f < 1"),
        ("theta_f", float("nan"), "0 <= theta_f < 1"),
        ("theta_f", "0.5", "a number"),
        ("theta_f", True, "a number"),
        ("low_watermark_ratio", 1.1, "0 <= low_watermark_ratio <= 1"),
        ("headroom_blocks", -1, "0 <= headroom_blocks"),
        ("max_source_blocks", 1, "2 <= max_source_blocks"),
        ("check_interval_steps", 0, "1 <= check_interval_steps"),
        ("seed", -1, "0 <= seed"),
        ("seed", 2**32, "seed <= 4294967295"),
        ("budget_tokens", 1, "2 <= budget_tokens"),
        ("budget_tokens", 36, "budget_tokens > sink_tokens + recent_tokens = 36"),
    ],
)
def test_config_refuses_value_out_of_bounds(field: str, value: Any, bound: str) -> None:
    """The error names the field, the value and the bound that it breaks."""
    with pytest.raises(ConfigError) as caught:
        VTokenConfig(**{field: value})
    assert caught.value.field == field
    assert caught.value.value is value
    assert bound in caught.value.bound
    assert field in str(caught.value)


@pytest.mark.parametrize("ratio", [0, 0.0, -0.5, 1.01, "0.5", float("nan")])
def test_config_refuses_keep_ratio_outside_half_open_interval(ratio: Any) -> None:
    """``keep_ratio`` lies in (0, 1]."""
    with pytest.raises(ConfigError, match="keep_ratio"):
        VTokenConfig(keep_ratio=ratio, budget_tokens=None)


@pytest.mark.parametrize("both", [(None, None), (0.5, 100)])
def test_config_wants_exactly_one_budget(both: tuple[Any, Any]) -> None:
    """Neither or both of ``keep_ratio`` and ``budget_tokens`` is an error."""
    with pytest.raises(ConfigError, match="exactly one"):
        VTokenConfig(keep_ratio=both[0], budget_tokens=both[1])


def test_config_accepts_the_bounds_themselves() -> None:
    """Closed bounds are inside."""
    VTokenConfig(theta_f=0, low_watermark_ratio=1, sink_tokens=0, recent_tokens=1, budget_tokens=2)
    VTokenConfig(keep_ratio=1.0, budget_tokens=None, max_source_blocks=2, seed=2**32 - 1)


def test_only_lazy_relocates() -> None:
    """The other modes never move a token."""
    assert [m for m in ("off", "naive", "lazy") if VTokenConfig(mode=m).relocates] == ["lazy"]


@given(st.integers(0, 10**6), st.integers(1, 1000))
def test_target_live_tokens_rounds_ratio_up_and_keeps_one(num_tokens: int, mill: int) -> None:
    """With a ratio the target is ⌈n·r⌉ (to a rounding error), at least 1 and at most n or 1."""
    config = VTokenConfig(keep_ratio=mill / 1000, budget_tokens=None)
    target = config.target_live_tokens(num_tokens)
    exact = -(-num_tokens * mill // 1000)
    assert exact <= target <= exact + 1 or target == 1
    assert 1 <= target <= max(1, num_tokens)


def test_target_live_tokens_is_the_budget() -> None:
    """With a budget the length does not matter."""
    config = VTokenConfig(budget_tokens=100)
    assert {config.target_live_tokens(n) for n in (1, 100, 10_000)} == {100}


@pytest.mark.parametrize("changes", [{}, {"keep_ratio": 0.5}, {"policy_args": {"a": [1]}}])
def test_to_dict_is_json_and_inverse_of_from_dict(changes: dict[str, Any]) -> None:
    """A configuration survives the way through JSON between two processes."""
    config = VTokenConfig.from_dict(changes)
    assert VTokenConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_to_dict_shares_no_mutable_part() -> None:
    """Writing into the copy does not change the configuration."""
    config = VTokenConfig(policy_args={"layers": 2})
    config.to_dict()["policy_args"]["layers"] = 3
    assert config.policy_args == {"layers": 2}


def test_from_dict_suggests_nearest_field() -> None:
    """A typo is answered with the name that was probably meant."""
    with pytest.raises(ConfigError, match="did you mean 'theta_f'"):
        VTokenConfig.from_dict({"thetaf": 0.5})


def test_from_dict_keep_ratio_drops_default_budget_only() -> None:
    """``keep_ratio`` alone is enough, together with an explicit budget it is an error."""
    assert VTokenConfig.from_dict({"keep_ratio": 0.5}).budget_tokens is None
    with pytest.raises(ConfigError, match="exactly one"):
        VTokenConfig.from_dict({"keep_ratio": 0.5, "budget_tokens": 100})


@pytest.mark.parametrize("field", ["record_evictions", "seed", "thetaf"])
def test_patched_refuses_unknown_and_fixed_fields(field: str) -> None:
    """What cannot change while the engine runs is refused, with the fields that can."""
    with pytest.raises(ConfigError, match=r"known fields are .*theta_f"):
        VTokenConfig().patched({field: 1})


def test_patched_switches_between_naive_and_lazy_but_never_off() -> None:
    """The token layer can stop relocating at run time; it cannot take itself out."""
    assert VTokenConfig(mode="lazy").patched({"mode": "naive"}).mode == "naive"
    with pytest.raises(ConfigError, match="naive or lazy while the engine runs"):
        VTokenConfig().patched({"mode": "off"})


def test_live_fields_are_fields() -> None:
    """The set of live fields names nothing that does not exist."""
    assert {f.name for f in dataclasses.fields(VTokenConfig)} > LIVE_FIELDS


@pytest.mark.parametrize(
    ("start", "changes", "expected"),
    [
        ({}, {"keep_ratio": 0.5}, (0.5, None)),
        ({}, {"keep_ratio": 0.5, "budget_tokens": None}, (0.5, None)),
        ({}, {"budget_tokens": 99}, (None, 99)),
        ({"budget_tokens": 99}, {"budget_tokens": None}, (None, 1024)),
        ({"budget_tokens": 99}, {"keep_ratio": None}, (None, 99)),
        ({"keep_ratio": 0.5}, {"budget_tokens": 99}, (None, 99)),
        ({"keep_ratio": 0.5}, {"budget_tokens": 99, "keep_ratio": None}, (None, 99)),
        ({"keep_ratio": 0.5}, {"budget_tokens": None}, (0.5, None)),
        ({"keep_ratio": 0.5}, {"keep_ratio": None}, (None, 1024)),
        ({"keep_ratio": 0.5}, {"keep_ratio": None, "budget_tokens": None}, (None, 1024)),
        ({"keep_ratio": 0.5}, {"theta_f": 0.1}, (0.5, None)),
    ],
)
def test_patched_keeps_exactly_one_budget(
    start: dict[str, Any], changes: dict[str, Any], expected: tuple[float | None, int | None]
) -> None:
    """Setting one budget clears the other; resetting the one in use restores the default."""
    config = VTokenConfig.from_dict(start).patched(changes)
    assert (config.keep_ratio, config.budget_tokens) == expected


def test_patched_refuses_two_budgets() -> None:
    """Setting both in one patch is ambiguous."""
    with pytest.raises(ConfigError, match="exactly one"):
        VTokenConfig().patched({"keep_ratio": 0.5, "budget_tokens": 99})


def test_patched_null_resets_to_default() -> None:
    """JSON merge patch: null removes what was set."""
    config = VTokenConfig(theta_f=0.7, policy_args={"a": 1})
    assert config.patched({"theta_f": None}).theta_f == VTokenConfig().theta_f
    assert config.patched({"policy_args": None}).policy_args == {}
    assert config.patched({"policy": None}).policy == VTokenConfig().policy


def test_patched_new_policy_drops_old_arguments() -> None:
    """Arguments belong to the policy they were given for."""
    config = VTokenConfig(policy="random", policy_args={"a": 1})
    assert config.patched({"policy": "none"}).policy_args == {}
    assert config.patched({"policy": "random"}).policy_args == {"a": 1}
    assert config.patched({"policy": "none", "policy_args": {"b": 2}}).policy_args == {"b": 2}


def test_patched_leaves_the_original_alone() -> None:
    """A refused or accepted patch makes a new object or none."""
    config = VTokenConfig()
    assert config.patched({"theta_f": 0.5}).theta_f == 0.5
    with pytest.raises(ConfigError):
        config.patched({"theta_f": 2})
    assert config == VTokenConfig()
