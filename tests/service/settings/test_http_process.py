"""Settings of the HTTP process; keys are never shown."""

from __future__ import annotations

import pytest

from service.settings.http_process import check_service_settings, load_service_settings
from vtoken.errors import ConfigError


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


@pytest.mark.parametrize("kind", ["admin", "api"])
def test_key_is_as_clients_can_send_it(monkeypatch, kind):
    """Without the newline of a Secret made from a file; a blank one is a mistake, an empty none."""
    variable = f"VTOKEN_{kind.upper()}_KEY"
    for given, name in (("secret\n", kind), ("", None)):
        monkeypatch.setenv(variable, given)
        settings = load_service_settings()
        ring = settings.admin_keys() if kind == "admin" else settings.api_keys(["theirs"])
        assert ring.name_of("secret") == name
    monkeypatch.setenv(variable, " \n")
    settings = load_service_settings()
    with pytest.raises(ConfigError, match=f"{variable}=.*not blank"):
        settings.admin_keys() if kind == "admin" else settings.api_keys()


def test_admin_key_is_not_shown(monkeypatch):
    """Neither by repr nor by an error about another variable."""
    monkeypatch.setenv("VTOKEN_ADMIN_KEY", "hush-hush")
    assert "hush" not in repr(load_service_settings())
    monkeypatch.setenv("VTOKEN_METRICS_POLL_SECONDS", "0")
    with pytest.raises(ConfigError, match="VTOKEN_METRICS_POLL_SECONDS") as caught:
        load_service_settings()
    assert "hush" not in str(caught.value)


def test_secrets_are_not_repeated(settings_file):
    """Not even a wrong one in a file."""
    settings_file("admin_key: [hush]\n")
    _, (refusal,) = check_service_settings()
    assert "hush" not in str(refusal)
    assert refusal.field == "settings.yaml: admin_key"
