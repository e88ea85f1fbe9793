"""The settings file, and which source wins."""

from __future__ import annotations

import pytest

from service import flags
from service.cli_config import check_settings
from service.setting_layers import Given, read_file, resolve
from service.settings import (
    ServiceSettings,
    check_config,
    check_service_settings,
    is_secret,
    load_config,
    load_service_settings,
    unknown_settings,
)
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


@pytest.fixture
def use(monkeypatch, tmp_path):
    """Writes a settings file and names it in the environment."""

    def write(text: str, name: str = "settings.yaml") -> None:
        path = tmp_path / name
        path.write_text(text)
        monkeypatch.setenv("VTOKEN_CONFIG_FILE", str(path))

    return write


@pytest.mark.parametrize(("text", "name"), [(YAML, "a.yml"), (TOML, "b.toml"), (JSON, "c.json")])
def test_file_may_be_yaml_toml_or_json(use, text, name):
    """The same settings, of the engine and of the HTTP process; null is the default."""
    use(text, name)
    assert load_config({}) == EXPECTED
    assert load_service_settings().metrics_poll_seconds == 2
    assert unknown_settings() == []


def test_flag_beats_variable_beats_file_beats_default(use, monkeypatch):
    """Each setting on its own."""
    use("sink_tokens: 1\nrecent_tokens: 1\ntheta_f: 0.1\nmetrics_poll_seconds: 7\n")
    monkeypatch.setenv("VTOKEN_RECENT_TOKENS", "2")
    monkeypatch.setenv("VTOKEN_THETA_F", "0.2")
    config = load_config(flags.parse_early(["--vtoken-theta-f=0.3"]))
    assert (config.sink_tokens, config.recent_tokens, config.theta_f) == (1, 2, 0.3)
    assert config.headroom_blocks == VTokenConfig().headroom_blocks
    monkeypatch.setenv("VTOKEN_METRICS_POLL_SECONDS", "3")
    assert load_service_settings().metrics_poll_seconds == 3


@pytest.fixture
def own_environment(monkeypatch):
    """What flags put into the environment is gone afterwards."""
    for name in flags.SERVICE_NAMES:
        monkeypatch.setenv(f"VTOKEN_{name.upper()}", "")


def test_flag_of_the_service_beats_variable_and_file(use, monkeypatch, own_environment):
    """Of whatever kind; where none is given, the variable counts, then the file."""
    use("log_format: json\ndrain_seconds: 1\nadmin_host: file\nmax_body_bytes: 1\n")
    monkeypatch.setenv("VTOKEN_DRAIN_SECONDS", "2")
    monkeypatch.setenv("VTOKEN_ADMIN_HOST", "variable")
    monkeypatch.setenv("VTOKEN_METRICS_KEY_REQUIRED", "true")
    given = ["model", "--vtoken-admin-host=flag", "--no-vtoken-metrics-key-required"]
    flags.use_flags([*given, "--vtoken-max-body-bytes", "7", "--vtoken-ready-when-degraded"])
    found = load_service_settings()
    assert (found.log_format, found.drain_seconds, found.admin_host) == ("json", 2, "flag")
    assert (found.max_body_bytes, found.metrics_key_required) == (7, False)
    assert found.ready_when_degraded is True


def test_every_setting_of_the_service_but_keys_has_a_flag():
    """A key on a command line could be read by every user of the machine."""
    secrets = {name for name in ServiceSettings.model_fields if is_secret(name)}
    assert secrets == {"admin_key", "api_key"}
    assert set(flags.SERVICE_NAMES) == set(ServiceSettings.model_fields) - secrets
    text = flags.describe_flags()
    assert all(f"--vtoken-{name.replace('_', '-')}" in text for name in flags.SERVICE_NAMES)
    assert "--vtoken-log-format console|json" in text
    for name in ("admin-key", "api-key"):
        (refusal,) = flags.unknown_flags([f"--vtoken-{name}=secret"])
        assert "secret" not in str(refusal)


def test_check_tells_flag_variable_and_file_apart(use, monkeypatch, own_environment, tmp_path):
    """For settings of the service, as for the token layer's."""
    use("drain_seconds: 1\n")
    monkeypatch.setenv("VTOKEN_ADMIN_HOST", "::1")
    found, refusals = check_settings(["--vtoken-log-format=json", "--vtoken-theta-f", "0.3"])
    source = {one.name: one.source for one in found}
    assert refusals == []
    assert source["log_format"] == "--vtoken-log-format"
    assert source["theta_f"] == "--vtoken-theta-f"
    assert source["admin_host"] == "VTOKEN_ADMIN_HOST"
    assert source["drain_seconds"].endswith(".yaml")
    assert source["live_stall_seconds"] == "default"


def test_flag_names_the_file_and_beats_the_variable(use, tmp_path):
    """``--vtoken-config``."""
    use("theta_f: 0.1\n")
    other = tmp_path / "other.toml"
    other.write_text("theta_f = 0.2\n")
    flags.use_flags(["model", "--vtoken-config", str(other), "--port", "1"])
    assert load_config({}).theta_f == 0.2
    flags.use_flags(["model"])
    assert load_config({}).theta_f == 0.2


@pytest.mark.parametrize(
    ("file", "variable"),
    [("keep_ratio: 0.5", "budget_tokens"), ("budget_tokens: 64", "keep_ratio")],
)
def test_variable_for_one_budget_beats_the_file_for_the_other(use, monkeypatch, file, variable):
    """They exclude each other; precedence decides between them."""
    use(file)
    value = {"budget_tokens": "512", "keep_ratio": "0.25"}[variable]
    monkeypatch.setenv("VTOKEN_" + variable.upper(), value)
    config = load_config({})
    assert getattr(config, variable) == float(value)
    assert None in (config.keep_ratio, config.budget_tokens)


def test_arguments_of_policies_are_replaced_not_merged(use, monkeypatch):
    """A stronger source gives the whole object."""
    use("policy_args: {a: 1, b: 2}\n")
    monkeypatch.setenv("VTOKEN_POLICY_ARGS", '{"a": 3}')
    assert load_config({}).policy_args == {"a": 3}


def test_unknown_keys_are_refused_with_the_nearest(use):
    """And with the name of the file."""
    use("thetaf: 0.1\nurl: x\nmode: lazy\n")
    sentences = [str(error) for error in unknown_settings()]
    assert len(sentences) == 2
    assert "settings.yaml: thetaf='…'" in sentences[0]
    assert "did you mean theta_f?" in sentences[0]
    assert "settings.yaml: url='…'" in sentences[1]  # of the commands, not of the service


@pytest.mark.parametrize(
    ("text", "name", "reason"),
    [
        ("a: [", "a.yaml", "a readable settings file"),
        ("a = ", "a.toml", "a readable settings file"),
        ("- mode\n", "a.yaml", "must hold settings"),
        ("1: 2\n", "a.yaml", "must hold settings"),
        ("mode: lazy\n", "a.ini", "must end with one of .yaml"),
        ("a: " + "x" * (1 << 20), "a.yaml", "longer than"),
    ],
)
def test_useless_file_is_refused(use, text, name, reason):
    """With its name and what is wrong."""
    use(text, name)
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


def test_empty_file_changes_nothing(use):
    """As a ConfigMap that was not filled yet."""
    use("")
    assert load_config({}) == VTokenConfig()


def test_every_refusal_is_collected(use, monkeypatch):
    """Whatever its source; values that are beaten are nobody's mistake."""
    use("theta_f: high\nsink_tokens: -1\nrecent_tokens: lots\nmetrics_poll_seconds: 0\n")
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


def test_secrets_are_not_repeated(use):
    """Not even a wrong one in a file."""
    use("admin_key: [hush]\n")
    _, (refusal,) = check_service_settings()
    assert "hush" not in str(refusal)
    assert refusal.field == "settings.yaml: admin_key"


def test_sources_are_told():
    """What was given and where, the strongest alone."""
    found = resolve(
        ["a", "b", "c", "d", "e"],
        {"a": "1"},
        {"a": "2", "b": "2", "e": ""},
        {"a": 3, "b": 3, "c": 3, "e": 3},
        "f.yaml",
    )
    assert found == {
        "a": Given("1", "a", "--vtoken-a", 0),
        "b": Given("2", "VTOKEN_B", "VTOKEN_B", 1),
        "c": Given(3, "f.yaml: c", "f.yaml", 2),
        "e": Given(3, "f.yaml: e", "f.yaml", 2),
    }


def test_reading_needs_no_environment(tmp_path):
    """A file is a plain mapping."""
    path = tmp_path / "x.toml"
    path.write_text("a = 1\n[b]\nc = 2\n")
    assert read_file(path) == {"a": 1, "b": {"c": 2}}
