"""A name that is no setting is refused with the nearest that is."""

from __future__ import annotations

from service.settings.unknown import unknown_settings


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


def test_unknown_keys_are_refused_with_the_nearest(settings_file):
    """And with the name of the file."""
    settings_file("thetaf: 0.1\nurl: x\nmode: lazy\n")
    sentences = [str(error) for error in unknown_settings()]
    assert len(sentences) == 2
    assert "settings.yaml: thetaf='…'" in sentences[0]
    assert "did you mean theta_f?" in sentences[0]
    assert "settings.yaml: url='…'" in sentences[1]  # of the commands, not of the service
