"""What the commands for a running service find in their environment."""

from __future__ import annotations

import pytest

from service.settings.client import load_client_settings
from vtoken.errors import ConfigError


def test_the_variable_beats_the_file_of_keys(monkeypatch, tmp_path):
    """Of a file, the first key is sent; without either, none."""
    assert load_client_settings().first_admin_key() is None
    path = tmp_path / "keys"
    path.write_text("# team\nann: first\nsecond\n")
    monkeypatch.setenv("VTOKEN_ADMIN_KEY_FILE", str(path))
    assert load_client_settings().first_admin_key() == "first"
    monkeypatch.setenv("VTOKEN_ADMIN_KEY", " own ")
    assert load_client_settings().first_admin_key() == "own"


def test_a_file_without_a_key_is_refused(monkeypatch, tmp_path):
    """By the name of its variable, without a key in the sentence."""
    path = tmp_path / "keys"
    path.write_text("# nobody\n")
    monkeypatch.setenv("VTOKEN_ADMIN_KEY_FILE", str(path))
    with pytest.raises(ConfigError, match="VTOKEN_ADMIN_KEY_FILE"):
        load_client_settings().first_admin_key()
