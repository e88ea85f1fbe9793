"""The settings file, and which source wins."""

from __future__ import annotations

import pytest

from service import flags
from service.settings.http_process import check_service_settings, load_service_settings
from service.settings.token_layer import check_config, load_config
from service.settings.unknown import unknown_settings
from vtoken.config import VTokenConfig
from vtoken.errors import ConfigError

YAML = """\
# evening
mode: naive
keep_ratio: 0.5
policy_args: {a: 1}
score_layers: [3, 1]
relocate_shared: true
metrics_poll_seconds: 2
theta_f: null
"""
TOML = """\
mode = "naive"
keep_ratio = 0.5
score_layers = [3, 1]
relocate_shared = true
metrics_poll_seconds = 2
[policy_args]
a = 1
"""
JSON = """\
{"mode": "naive", "keep_ratio": 0.5, "policy_args": {"a": 1}, "score_layers": [3, 1],
 "relocate_shared": true, "metrics_poll_seconds": 2}
"""
EXPECTED = VTokenConfig(
    mode="naive",
    keep_ratio=0.5,
    budget_tokens=None,
    policy_args={"a": 1},
    score_layers=(1, 3),
    relocate_shared=True,
)


@pytest.mark.parametrize(("text", "name"), [(YAML, "a.yml"), (TOML, "b.toml"), (JSON, "c.json")])
def test_file_may_be_yaml_toml_or_json(settings_file, text, name):
    """The same settings, of the engine and of the HTTP process; null is the default."""
    settings_file(text, name)
    assert load_config({}) == EXPECTED
    assert load_service_settings().metrics_poll_seconds == 2
    assert unknown_settings() == []


def test_flag_beats_variable_beats_file_beats_default(settings_file, monkeypatch):
    """Each setting on its own."""
    settings_file("sink_tokens: 1\nrecent_tokens: 1\ntheta_f: 0.1\nmetrics_poll_seconds: 7\n")
    monkeypatch.setenv("VTOKEN_RECENT_TOKENS", "2")
    monkeypatch.setenv("VTOKEN_THETA_F", "0.2")
    config = load_config(flags.parse_early(["--vtoken-theta-f=0.3"]))
    assert (config.sink_tokens, config.recent_tokens, config.theta_f) == (1, 2, 0.3)
    assert config.headroom_blocks == VTokenConfig().headroom_blocks
    monkeypatch.setenv("VTOKEN_METRICS_POLL_SECONDS", "3")
    assert load_service_settings().metrics_poll_seconds == 3


@pytest.mark.parametrize(
    ("file", "variable"),
    [("keep_ratio: 0.5", "budget_tokens"), ("budget_tokens: 64", "keep_ratio")],
)
def test_variable_for_one_budget_beats_the_file_for_the_other(
    settings_file, monkeypatch, file, variable
):
    """They exclude each other; precedence decides between them."""
    settings_file(file)
    value = {"budget_tokens": "512", "keep_ratio": "0.25"}[variable]
    monkeypatch.setenv("VTOKEN_" + variable.upper(), value)
    config = load_config({})
    assert getattr(config, variable) == float(value)
    assert None in (config.keep_ratio, config.budget_tokens)


@pytest.mark.parametrize(
    ("text", "name", "reason"),
    [
        ("a: [", "a.yaml", "a readable settings file"),
        ("a = ", "a.toml", "a readable settings file"),
        ("- mode\n", "a.yaml", "must hold settings"),
        ("1: 2\n", "a.yaml", "must hold settings"),
        ("theta_f: 0.1\nmode: lazy\ntheta_f: 0.9\n", "a.yaml", "'theta_f' is given twice"),
        ('{"policy_args": {"a": 1, "a": 2}}', "a.json", "'a' is given twice"),
        ("theta_f = 0.1\ntheta_f = 0.9\n", "a.toml", "a readable settings file"),
        ("mode: lazy\n", "a.ini", "must end with one of .yaml"),
        ("a: " + "x" * (1 << 20), "a.yaml", "longer than"),
    ],
)
def test_useless_file_is_refused(settings_file, text, name, reason):
    """With its name and what is wrong."""
    settings_file(text, name)
    with pytest.raises(ConfigError, match=reason) as caught:
        load_config({})
    assert name in str(caught.value)
    with pytest.raises(ConfigError, match=reason):
        load_service_settings()


def test_missing_file_is_refused(monkeypatch, tmp_path):
    """A file that was named is a promise."""
    monkeypatch.setenv("VTOKEN_CONFIG_FILE", str(tmp_path / "none.yaml"))
    with pytest.raises(ConfigError, match=r"none\.yaml"):
        load_config({})


def test_empty_file_changes_nothing(settings_file):
    """As a ConfigMap that was not filled yet."""
    settings_file("")
    assert load_config({}) == VTokenConfig()


def test_every_refusal_is_collected(settings_file, monkeypatch):
    """Whatever its source; values that are beaten are nobody's mistake."""
    settings_file("theta_f: high\nsink_tokens: -1\nrecent_tokens: lots\nmetrics_poll_seconds: 0\n")
    monkeypatch.setenv("VTOKEN_SINK_TOKENS", "many")
    monkeypatch.setenv("VTOKEN_ENGINE_TIMEOUT_SECONDS", "-1")
    _, refusals = check_config({"recent_tokens": "8", "mode": "fast", "theta_f_min": "0.9"})
    assert sorted(error.field for error in refusals) == [
        "VTOKEN_SINK_TOKENS",
        "mode",
        "settings.yaml: theta_f",
        "theta_f_min",
    ]
    settings, refusals = check_service_settings()
    assert settings is None
    assert {error.field for error in refusals} == {
        "VTOKEN_ENGINE_TIMEOUT_SECONDS",
        "settings.yaml: metrics_poll_seconds",
    }
