"""Where files are looked for."""

from __future__ import annotations

from pathlib import Path

from service.settings.environment import (
    config_file,
    default_cache_dir,
    embedded_gguf,
    our_variables,
)


def test_our_variables_are_told_without_their_prefix(monkeypatch):
    """In small letters, as the settings are named; those of others are not among them."""
    monkeypatch.setenv("VTOKEN_THETA_F", "0.5")
    monkeypatch.setenv("VLLM_THETA_F", "1")
    assert our_variables()["theta_f"] == "0.5"
    assert "0.5" not in {v for n, v in our_variables().items() if n != "theta_f"}


def test_files_are_named_or_not(monkeypatch):
    """An empty variable names none; a model's home folder is expanded."""
    for text in (None, ""):
        for name in ("VTOKEN_CONFIG_FILE", "VTOKEN_EMBEDDED_GGUF"):
            monkeypatch.delenv(name, raising=False)
            if text is not None:
                monkeypatch.setenv(name, text)
        assert (config_file(), embedded_gguf()) == (None, None)
    monkeypatch.setenv("HOME", "/home/x")
    monkeypatch.setenv("VTOKEN_CONFIG_FILE", "a/b.yaml")
    monkeypatch.setenv("VTOKEN_EMBEDDED_GGUF", "~/m.gguf")
    assert (config_file(), embedded_gguf()) == (Path("a/b.yaml"), Path("/home/x/m.gguf"))


def test_cache_folder_follows_the_environment(monkeypatch):
    """Own variable first, then XDG's, then the home folder."""
    monkeypatch.setenv("VTOKEN_CACHE_DIR", "/a")
    monkeypatch.setenv("XDG_CACHE_HOME", "/b")
    assert default_cache_dir() == Path("/a")
    monkeypatch.delenv("VTOKEN_CACHE_DIR")
    assert default_cache_dir() == Path("/b/vtoken-serve")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/x")
    assert default_cache_dir() == Path("/home/x/.cache/vtoken-serve")
