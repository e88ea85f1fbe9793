"""Every setting but the keys has a flag, which beats its variable and the settings file."""

from __future__ import annotations

import argparse

import pytest

from service import flags
from service.cli_config import check_settings
from service.errors import UsageError
from service.settings.http_process import ServiceSettings, is_secret, load_service_settings
from service.settings.token_layer import FIELD_NAMES, load_config
from tests.service.settings.samples import EXPECTED, flag_arguments


@pytest.fixture
def own_environment(monkeypatch):
    """What flags put into the environment is gone afterwards."""
    for name in flags.SERVICE_NAMES:
        monkeypatch.setenv(f"VTOKEN_{name.upper()}", "")


@pytest.mark.parametrize("name", FIELD_NAMES)
def test_every_field_has_a_flag(name):
    """Its text is converted to the field's type; underscores are as good as dashes."""
    arguments = flag_arguments(name)
    assert getattr(load_config(flags.parse_early(arguments)), name) == EXPECTED[name]
    arguments[0] = arguments[0].replace("-", "_").replace("__", "--", 1)
    assert getattr(load_config(flags.parse_early(arguments)), name) == EXPECTED[name]


@pytest.mark.parametrize("name", FIELD_NAMES)
def test_every_flag_is_explained(name):
    """With the field's own docstring, default and variable."""
    text = " ".join(flags.describe_flags().split())
    assert flags.flag_name(name) in text
    assert f"VTOKEN_{name.upper()}" in text
    assert len(flags.field_docs()[name]) > 10


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--vtoken-thta-f", "1"], "did you mean --vtoken-theta-f"),
        (["--vtoken-theta", "0.5"], "unknown flag --vtoken-theta"),
        (["--vtoken_thta_f=1"], "did you mean --vtoken-theta-f"),
        (["--no-vtoken-mode"], "unknown flag --no-vtoken-mode"),
        (["--vtoken-theta-f"], "expected one argument"),
    ],
)
def test_bad_flags_are_one_sentence(arguments, expected):
    """Unknown names are not taken for abbreviations; the nearest name is suggested."""
    with pytest.raises(UsageError, match=expected):
        flags.parse_early(arguments)


def test_vllm_flags_pass_by():
    """Flags of vLLM and the model's name are nobody's business here."""
    arguments = ["org/model", "--port", "1", "--vtoken-theta-f=0.5", "-tp", "2", "--max-num-seqs=4"]
    assert flags.parse_early(arguments) == {"theta_f": "0.5"}


def test_flags_fit_into_another_parser():
    """As a group of vLLM's parser; a flag that was not given leaves no trace."""
    parser = argparse.ArgumentParser()
    flags.add_flags(parser)
    assert flags.flag_values(parser.parse_args([])) == {}
    assert flags.flag_values(parser.parse_args(["--no-vtoken-record-evictions"])) == {
        "record_evictions": False
    }


def test_flag_of_the_service_beats_variable_and_file(settings_file, monkeypatch, own_environment):
    """Of whatever kind; where none is given, the variable counts, then the file."""
    settings_file("log_format: json\ndrain_seconds: 1\nadmin_host: file\nmax_body_bytes: 1\n")
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


def test_check_tells_flag_variable_and_file_apart(
    settings_file, monkeypatch, own_environment, tmp_path
):
    """For settings of the service, as for the token layer's."""
    settings_file("drain_seconds: 1\n")
    monkeypatch.setenv("VTOKEN_ADMIN_HOST", "::1")
    found, refusals = check_settings(["--vtoken-log-format=json", "--vtoken-theta-f", "0.3"])
    source = {one.name: one.source for one in found}
    assert refusals == []
    assert source["log_format"] == "--vtoken-log-format"
    assert source["theta_f"] == "--vtoken-theta-f"
    assert source["admin_host"] == "VTOKEN_ADMIN_HOST"
    assert source["drain_seconds"].endswith(".yaml")
    assert source["live_stall_seconds"] == "default"


def test_flag_names_the_file_and_beats_the_variable(settings_file, tmp_path):
    """``--vtoken-config``."""
    settings_file("theta_f: 0.1\n")
    other = tmp_path / "other.toml"
    other.write_text("theta_f = 0.2\n")
    flags.use_flags(["model", "--vtoken-config", str(other), "--port", "1"])
    assert load_config({}).theta_f == 0.2
    flags.use_flags(["model"])
    assert load_config({}).theta_f == 0.2
