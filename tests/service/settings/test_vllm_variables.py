"""What vLLM finds in its environment; what the user set is kept."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError

import pytest

from service.settings import vllm_variables
from service.settings.vllm_variables import vllm_api_keys, vllm_environment
from vtoken.errors import ConfigError


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
    monkeypatch.setenv(name, "long")
    with pytest.raises(ConfigError, match=name):
        vllm_environment()


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


RUNNER = "VLLM_USE_V2_MODEL_RUNNER"


@pytest.mark.parametrize("built", ["0.32.0+cpu", None])
def test_cpus_get_the_v1_runner(monkeypatch, built):
    """Whichever of its two names the package has."""
    monkeypatch.delenv(RUNNER, raising=False)
    monkeypatch.setattr(vllm_variables, "version", built_as(built))
    assert vllm_environment()[RUNNER] == "0"


@pytest.mark.parametrize("asked", [None, "0", "1"])
def test_gpus_get_the_runner_that_vllm_or_the_user_chooses(monkeypatch, asked):
    """vLLM prefers V2 there, unless a variable says otherwise."""
    monkeypatch.delenv(RUNNER, raising=False)
    if asked is not None:
        monkeypatch.setenv(RUNNER, asked)
    monkeypatch.setattr(vllm_variables, "version", built_as("0.32.0"))
    assert vllm_environment().get(RUNNER) == asked
    monkeypatch.setenv("VLLM_TARGET_DEVICE", "cpu")
    monkeypatch.setenv(RUNNER, "0")
    assert vllm_environment()[RUNNER] == "0"


@pytest.mark.parametrize(
    ("given", "variable", "keys"),
    [
        (None, None, []),
        (None, "", []),
        (None, "secret\n", ["secret"]),
        (None, " a secret \r\n", ["a secret"]),
        ([], "secret", ["secret"]),
        (["one\n", "", None, "two"], "secret", ["one", "two"]),
    ],
)
def test_keys_are_as_clients_can_send_them(monkeypatch, given, variable, keys):
    """A Secret made from a file ends with a newline, which no header can hold; a flag wins."""
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    if variable is not None:
        monkeypatch.setenv("VLLM_API_KEY", variable)
    assert vllm_api_keys(given) == keys


def test_blank_key_is_refused(monkeypatch):
    """Taken for none it would open the model to everybody."""
    monkeypatch.setenv("VLLM_API_KEY", " \n")
    with pytest.raises(ConfigError, match=r"VLLM_API_KEY=.*not blank"):
        vllm_api_keys(None)
    with pytest.raises(ConfigError, match="--api-key="):
        vllm_api_keys(["secret", "\t"])


def built_as(version):
    """Of the package ``vllm``, which may not be there."""

    def found(name):
        if version is None:
            raise PackageNotFoundError(name)
        return version

    return found
