"""Flags beat variables, variables beat defaults, and every field has both."""

from __future__ import annotations

import argparse
import dataclasses

import pytest

from service import flags
from service.errors import UsageError
from service.settings import (
    FIELD_NAMES,
    load_config,
    load_service_settings,
    unknown_settings,
    vllm_environment,
)
from vtoken.config import VTokenConfig
from vtoken.errors import ConfigError

SAMPLES = {
    "mode": "naive",
    "policy": "random",
    "policy_args": '{"a": 1}',
    "keep_ratio": "0.5",
    "budget_tokens": "512",
    "sink_tokens": "2",
    "recent_tokens": "8",
    "evict_interval_tokens": "32",
    "evict_during_prefill": "true",
    "evict_free_ratio": "0.5",
    "theta_f": "0.5",
    "theta_f_mode": "adaptive",
    "theta_f_min": "0.01",
    "theta_f_max": "0.75",
    "low_watermark_ratio": "0.75",
    "headroom_blocks": "9",
    "max_source_blocks": "16",
    "check_interval_steps": "3",
    "verify": "full",
    "record_evictions": "true",
    "relocate_shared": "true",
    "relocate_into_cached": "true",
    "max_blocks_per_request": "64",
    "score_layers": "9,0",
    "score_interval_steps": "5",
    "score_window_tokens": "3",
    "seed": "7",
}
EXPECTED = {
    **{n: int(v) for n, v in SAMPLES.items() if v.isdigit()},
    **{n: float(v) for n, v in SAMPLES.items() if "." in v},
    **{n: SAMPLES[n] for n in ("mode", "policy", "theta_f_mode", "verify")},
    "policy_args": {"a": 1},
    "score_layers": (0, 9),
    "evict_during_prefill": True,
    "record_evictions": True,
    "relocate_shared": True,
    "relocate_into_cached": True,
    "max_blocks_per_request": 64,
}


def flag_arguments(name: str) -> list[str]:
    if EXPECTED[name] is True:
        return [flags.flag_name(name)]
    return [flags.flag_name(name), SAMPLES[name]]


def test_samples_cover_every_field():
    """A new field of VTokenConfig needs a line in this file."""
    assert set(SAMPLES) == {f.name for f in dataclasses.fields(VTokenConfig)}
    assert all(EXPECTED[n] != getattr(VTokenConfig(), n) for n in SAMPLES)


@pytest.mark.parametrize("name", FIELD_NAMES)
def test_every_field_has_a_variable(monkeypatch, name):
    """Its text is converted to the field's type."""
    monkeypatch.setenv("VTOKEN_" + name.upper(), SAMPLES[name])
    assert getattr(load_config({}), name) == EXPECTED[name]


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


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--vtoken-policy-args", "[1]"], "valid dictionary"),
        (["--vtoken-policy-args", "x"], "policy_args='x' is not allowed: not JSON"),
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


def test_admin_keys_come_from_variable_and_file(monkeypatch, tmp_path):
    """All of them count; comments and blank lines do not."""
    assert load_service_settings().admin_keys().is_empty
    path = tmp_path / "keys"
    path.write_text("# team\nsecond \n\nthird\n")
    monkeypatch.setenv("VTOKEN_ADMIN_KEY_FILE", str(path))
    monkeypatch.setenv("VTOKEN_ADMIN_KEY", "first")
    ring = load_service_settings().admin_keys()
    assert [ring.name_of(key) for key in ("first", "second", "third", "# team")] == [
        "admin",
        "admin-1",
        "admin-2",
        None,
    ]


@pytest.mark.parametrize("content", [None, "", "# only a comment\n", b"\xff\xfe"])
def test_useless_key_file_is_refused(monkeypatch, tmp_path, content):
    """A key file that was named but gives no key is a mistake, not a closed door."""
    path = tmp_path / "keys"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    monkeypatch.setenv("VTOKEN_ADMIN_KEY_FILE", str(path))
    with pytest.raises(ConfigError, match="VTOKEN_ADMIN_KEY_FILE"):
        load_service_settings().admin_keys()


def test_admin_key_is_not_shown(monkeypatch):
    """Neither by repr nor by an error about another variable."""
    monkeypatch.setenv("VTOKEN_ADMIN_KEY", "hush-hush")
    assert "hush" not in repr(load_service_settings())
    monkeypatch.setenv("VTOKEN_METRICS_POLL_SECONDS", "0")
    with pytest.raises(ConfigError, match="VTOKEN_METRICS_POLL_SECONDS") as caught:
        load_service_settings()
    assert "hush" not in str(caught.value)


def test_unknown_variables_are_refused(monkeypatch):
    """With the nearest setting, where there is one; known variables of others are left alone."""
    monkeypatch.setenv("VTOKEN_THETAF", "0.5")
    monkeypatch.setenv("VTOKEN_ADMIN_KEYS", "hush")
    monkeypatch.setenv("VTOKEN_XYZZY", "x")
    for known in ("THETA_F", "METRICS_POLL_SECONDS", "URL", "CACHE_DIR", "TEST_JOBS"):
        monkeypatch.setenv("VTOKEN_" + known, "1")
    sentences = [str(error) for error in unknown_settings()]
    assert len(sentences) == 3
    assert "did you mean VTOKEN_ADMIN_KEY" in sentences[0]
    assert "hush" not in sentences[0]
    assert "did you mean VTOKEN_THETA_F?" in sentences[1]
    assert sentences[2] == "VTOKEN_XYZZY='…' is not allowed: no such setting"


def test_variables_that_kubernetes_makes_are_left_alone(monkeypatch):
    """A Service named vtoken or vtoken-serve puts such into every pod beside it."""
    links = {
        "VTOKEN_SERVICE_HOST": "10.0.0.7",
        "VTOKEN_SERVICE_PORT": "8000",
        "VTOKEN_SERVE_SERVICE_PORT_HTTP": "8000",
        "VTOKEN_PORT": "tcp://10.0.0.7:8000",
        "VTOKEN_SERVE_PORT_8000_TCP": "tcp://10.0.0.7:8000",
        "VTOKEN_SERVE_PORT_8000_TCP_ADDR": "10.0.0.7",
        "VTOKEN_SERVE_PORT_8000_TCP_PROTO": "tcp",
        "VTOKEN_ADMN_PORT": "x",
    }
    for name, value in links.items():
        monkeypatch.setenv(name, value)
    assert [error.field for error in unknown_settings()] == ["VTOKEN_ADMN_PORT"]


@pytest.mark.parametrize(
    ("theirs", "expected"),
    [
        ("a,b", "a,b,vtoken,vtoken_http"),
        ("vtoken", "vtoken,vtoken_http"),
        ("", "vtoken,vtoken_http"),
    ],
)
def test_plugin_list_is_merged_with_the_users(monkeypatch, theirs, expected):
    """vLLM's list gates every plugin: ours are added, the user's are kept."""
    monkeypatch.setenv("VLLM_PLUGINS", theirs)
    assert vllm_environment()["VLLM_PLUGINS"] == expected


def test_idle_connections_outlast_the_clients_idea_of_them(monkeypatch):
    """The server that closes first resets requests that are on their way; the user may say so."""
    name = "VLLM_HTTP_TIMEOUT_KEEP_ALIVE"
    monkeypatch.delenv(name, raising=False)
    assert int(vllm_environment()[name]) > 60
    monkeypatch.setenv(name, "7")
    assert vllm_environment()[name] == "7"


def test_without_a_plugin_list_other_plugins_stay(monkeypatch):
    """Those that vLLM would load by default are named too."""
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    names = vllm_environment()["VLLM_PLUGINS"].split(",")
    assert {"vtoken", "vtoken_http", "lora_filesystem_resolver"} <= set(names)
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("variable", "value"), [("PROMETHEUS_MULTIPROC_DIR", "/x"), ("VLLM_USE_V2_MODEL_RUNNER", "1")]
)
def test_environment_that_cannot_be_served_is_refused(monkeypatch, variable, value):
    """Rather than serving with wrong metrics or without evictions."""
    monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigError, match=variable):
        vllm_environment()
