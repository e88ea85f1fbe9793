"""``docs/configuration.md`` is what the code says."""

from __future__ import annotations

from pathlib import Path

from service import settings_docs
from service.settings.client import ClientSettings
from service.settings.http_process import ServiceSettings, is_secret
from service.settings.token_layer import FIELD_NAMES

DOCUMENT = Path(__file__).parents[2] / "docs" / "configuration.md"


def test_document_is_fresh():
    """Otherwise: ``python -m service.settings_docs --write docs/configuration.md``."""
    assert settings_docs.main(["--check", str(DOCUMENT)]) == 0


def test_every_setting_has_a_row():
    """With its variable and, where there is one, its flag."""
    text = settings_docs.render()
    for name in FIELD_NAMES:
        assert f"| `{name}` | `--vtoken-{name.replace('_', '-')}` `VTOKEN_{name.upper()}` |" in text
    for name in ServiceSettings.model_fields:
        flag = "" if is_secret(name) else f"`--vtoken-{name.replace('_', '-')}` "
        assert f"| `{name}` | {flag}`VTOKEN_{name.upper()}` |" in text
    for name in (*ClientSettings.model_fields, "config_file", "cache_dir"):
        assert f"| `VTOKEN_{name.upper()}` |" in text


def test_rows_tell_default_bounds_and_whether_live():
    """Some of them by hand."""
    rows = {
        line.split("`")[1]: line for line in settings_docs.render().splitlines() if "| `" in line
    }
    assert "| `0.25` | yes | ≥ 0, < 1 |" in rows["theta_f"]
    assert "| none | yes | > 0, ≤ 1 |" in rows["keep_ratio"]
    assert "| `lazy` | yes | `off` or `naive` or `lazy` |" in rows["mode"]
    assert "| `streaming_llm` | yes |  |" in rows["policy"]
    assert "| `0` | no | ≥ 0, ≤ 4294967295 |" in rows["seed"]
    assert "| `1.0` | ≥ 0.05, ≤ 3600 |" in rows["metrics_poll_seconds"]


def test_stale_document_is_told(tmp_path, capsys):
    """With the command that renews it; a missing one is stale too."""
    path = tmp_path / "configuration.md"
    assert settings_docs.main(["--check", str(path)]) == 1
    assert f"--write {path}" in capsys.readouterr().err
    assert settings_docs.main(["--write", str(path)]) == 0
    assert settings_docs.main(["--check", str(path)]) == 0
