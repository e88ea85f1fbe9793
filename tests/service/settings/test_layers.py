"""Which source wins, and how a file is read, without an environment."""

from __future__ import annotations

from service.settings.layers import Given, read_file, resolve


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
