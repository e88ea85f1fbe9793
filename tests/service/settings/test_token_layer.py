"""What is given for the token layer becomes its configuration, or is refused by name."""

from __future__ import annotations

import dataclasses

import pytest

from service import flags
from service.settings.token_layer import FIELD_NAMES, load_config
from tests.service.settings.samples import EXPECTED, SAMPLES, flag_arguments
from vtoken.config import VTokenConfig
from vtoken.errors import ConfigError


def test_samples_cover_every_field():
    """A new field of VTokenConfig needs a line in this file."""
    assert set(SAMPLES) == {f.name for f in dataclasses.fields(VTokenConfig)}
    assert all(EXPECTED[n] != getattr(VTokenConfig(), n) for n in SAMPLES)


@pytest.mark.parametrize("name", FIELD_NAMES)
def test_every_field_has_a_variable(monkeypatch, name):
    """Its text is converted to the field's type."""
    monkeypatch.setenv("VTOKEN_" + name.upper(), SAMPLES[name])
    assert getattr(load_config({}), name) == EXPECTED[name]


def test_flag_beats_variable_beats_default(monkeypatch):
    """Each field on its own."""
    assert load_config({}) == VTokenConfig()
    monkeypatch.setenv("VTOKEN_THETA_F", "0.5")
    monkeypatch.setenv("VTOKEN_SINK_TOKENS", "2")
    config = load_config(flags.parse_early(["--vtoken-theta-f", "0.75"]))
    assert (config.theta_f, config.sink_tokens) == (0.75, 2)


@pytest.mark.parametrize(
    ("variable", "flag"), [("keep_ratio", "budget_tokens"), ("budget_tokens", "keep_ratio")]
)
def test_flag_for_one_budget_beats_a_variable_for_the_other(monkeypatch, variable, flag):
    """keep_ratio and budget_tokens exclude each other; precedence decides between them."""
    monkeypatch.setenv("VTOKEN_" + variable.upper(), SAMPLES[variable])
    config = load_config(flags.parse_early(flag_arguments(flag)))
    assert getattr(config, flag) == EXPECTED[flag]
    assert getattr(config, variable) is None


def test_both_budgets_on_one_level_are_refused(monkeypatch):
    """Two flags, or two variables, contradict each other."""
    for name in ("keep_ratio", "budget_tokens"):
        monkeypatch.setenv("VTOKEN_" + name.upper(), SAMPLES[name])
    with pytest.raises(ConfigError, match="exactly one"):
        load_config({})


def test_empty_variable_is_unset(monkeypatch):
    """As in a Compose file that passes a variable on."""
    monkeypatch.setenv("VTOKEN_THETA_F", "")
    assert load_config({}) == VTokenConfig()


@pytest.mark.parametrize(
    ("variable", "text"),
    [("VTOKEN_THETA_F", "abc"), ("VTOKEN_SINK_TOKENS", "1.5"), ("VTOKEN_POLICY_ARGS", "{")],
)
def test_unreadable_variable_is_named(monkeypatch, variable, text):
    """The error names the variable that has to be corrected."""
    monkeypatch.setenv(variable, text)
    with pytest.raises(ConfigError, match=variable):
        load_config({})


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--vtoken-policy-args", "[1]"], "valid dictionary"),
        (["--vtoken-policy-args", "x"], "policy_args='x' is not allowed: not JSON"),
        (["--vtoken-policy-args", '{"a": 1, "a": 2}'], "'a' is given twice"),
        (["--vtoken-score-layers", "1,x"], "valid integer"),
        (["--vtoken-score-layers", ""], "valid integer"),
        (["--vtoken-score-layers", "1,1"], "distinct"),
    ],
)
def test_unreadable_objects_and_lists_are_refused(arguments, expected):
    """With the setting's name, like every other value."""
    with pytest.raises(ConfigError, match=expected):
        load_config(flags.parse_early(arguments))


@pytest.mark.parametrize("text", ["0,9", "[0, 9]", " 9 , 0 "])
def test_lists_are_written_as_people_do(monkeypatch, text):
    """With commas, or as JSON."""
    monkeypatch.setenv("VTOKEN_SCORE_LAYERS", text)
    assert load_config({}).score_layers == (0, 9)


def test_arguments_of_policies_are_replaced_not_merged(settings_file, monkeypatch):
    """A stronger source gives the whole object."""
    settings_file("policy_args: {a: 1, b: 2}\n")
    monkeypatch.setenv("VTOKEN_POLICY_ARGS", '{"a": 3}')
    assert load_config({}).policy_args == {"a": 3}
