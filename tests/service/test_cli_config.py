"""``config check``: the whole configuration with its sources, and every refusal at once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from unittest import mock

import pytest

from service import cli, cli_config
from service.settings.http_process import ServiceSettings
from service.settings.token_layer import FIELD_NAMES


def check(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """Exit code and report, vLLM left out."""
    code = cli.main(["config", "check", "--settings-only", *arguments])
    captured = capsys.readouterr()
    assert captured.err == ""
    return code, captured.out


@pytest.fixture
def file(monkeypatch, tmp_path):
    """A settings file; what the command puts into the environment is taken out again."""
    monkeypatch.setenv("VTOKEN_CONFIG_FILE", "")
    path = tmp_path / "settings.toml"
    path.write_text('sink_tokens = 2\nadmin_key = "hush"\n')
    return str(path)


def test_every_setting_has_its_value_and_source(capsys, monkeypatch, file):
    """Flag, variable, file or default; keys are not shown."""
    monkeypatch.setenv("VTOKEN_THETA_F", "0.5")
    arguments = ["--vtoken-mode=naive", "--vtoken-config", file, "--port", "1", "some/model"]
    code, text = check(capsys, *arguments)
    assert code == 0
    rows = {line.split()[0]: line.split()[1:] for line in text.splitlines() if line}
    assert rows["mode"] == ["naive", "--vtoken-mode"]
    assert rows["theta_f"] == ["0.5", "VTOKEN_THETA_F"]
    assert rows["sink_tokens"] == ["2", "settings.toml"]
    assert rows["recent_tokens"] == ["32", "default"]
    assert rows["keep_ratio"] == ["-", "default"]
    assert {*FIELD_NAMES, *ServiceSettings.model_fields} <= rows.keys()
    assert "hush" not in text
    assert text.splitlines()[-1] == "nothing is refused"


def test_json_is_for_programs(capsys, file):
    """The same, one object."""
    found = json.loads(check(capsys, "--json", "--vtoken-config", file)[1])
    by_name = {one["name"]: one for one in found["settings"]}
    assert by_name["sink_tokens"] == {"name": "sink_tokens", "value": 2, "source": "settings.toml"}
    assert by_name["admin_key"]["value"] == "(set, not shown)"
    assert found["refusals"] == []


def test_every_refusal_is_listed(capsys, monkeypatch, tmp_path):
    """Flags, variables, file, keys and the environment of vLLM, in one go, with exit code 2."""
    path = tmp_path / "settings.yaml"
    path.write_text("thetaf: 1\nlow_watermark_ratio: 3\n")
    monkeypatch.setenv("VTOKEN_CONFIG_FILE", str(path))
    monkeypatch.setenv("VTOKEN_SINK_TOKNES", "4")
    monkeypatch.setenv("VTOKEN_METRICS_POLL_SECONDS", "0")
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", "/x")
    code, text = check(capsys, "--vtoken-mode", "fast", "--vtoken-thta-f", "1")
    assert code == 2
    refusals = text.partition("refused:\n")[2].splitlines()
    expected = [
        "did you mean --vtoken-theta-f?",
        "did you mean VTOKEN_SINK_TOKENS?",
        "did you mean theta_f?",
        "one of off, naive, lazy (from --vtoken-mode)",
        "low_watermark_ratio <= 1 (from settings.yaml)",
        "VTOKEN_METRICS_POLL_SECONDS",
        "PROMETHEUS_MULTIPROC_DIR",
    ]
    assert len(refusals) == len(expected)
    for part in expected:
        assert any(part in line for line in refusals), (part, refusals)


def test_unreadable_key_file_is_refused(capsys, monkeypatch):
    """Before a service would find out."""
    monkeypatch.setenv("VTOKEN_ADMIN_KEY_FILE", "/nowhere/keys")
    code, text = check(capsys)
    assert code == 2
    assert "/nowhere/keys" in text


def test_unreadable_settings_file_is_the_only_refusal(capsys, monkeypatch):
    """Nothing can be said beyond it."""
    monkeypatch.setenv("VTOKEN_CONFIG_FILE", "/nowhere/settings.yaml")
    code, text = check(capsys)
    assert code == 2
    assert "/nowhere/settings.yaml" in text


def test_help_and_unknown_subcommand(capsys):
    """As everywhere."""
    assert cli.main(["config", "--help"]) == 0
    assert "config check" in capsys.readouterr().out
    assert cli.main(["config", "chekc"]) == 2
    assert "try vtoken-serve config check" in capsys.readouterr().err


@pytest.fixture
def _own_environment():
    """Checking with vLLM sets variables that it must find."""
    with mock.patch.dict(os.environ, {"HF_HUB_OFFLINE": "1"}):
        yield


@pytest.mark.usefixtures("_own_environment")
def test_servable_command_line_passes():
    """With the embedded model, up to vLLM's own configuration."""
    assert cli_config.check_engine(["--port", "0", "--max-model-len", "2048"]) == []


@pytest.mark.usefixtures("_own_environment")
def test_vllms_refusals_are_told():
    """Of a flag that it does not know, and of a model that is not there."""
    assert (
        "unrecognized arguments: --no-such-flag" in cli_config.check_engine(["--no-such-flag"])[0]
    )
    (refusal,) = cli_config.check_engine(["/nowhere/model", "--port", "0"])
    assert "vLLM cannot serve this" in refusal


def test_whole_command_prints_the_report_alone():
    """The token layer's refusal is in it, standard output is JSON, and no engine starts."""
    arguments = ["--json", "--port", "0", "--pipeline-parallel-size", "2"]
    done = subprocess.run(
        [sys.executable, "-m", "service.cli", "config", "check", *arguments],
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert "pipeline_parallel_size=2" in json.loads(done.stdout)["refusals"][0]
    assert "EngineCore" not in done.stderr
