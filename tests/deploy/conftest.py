"""The real helm 3 and helm 4 for every chart test."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.deploy import tools
from tests.deploy.helm import Helm


def obtain(get: Callable[[], Path]) -> Path:
    """A tool, or a skip with the reason; in CI a missing tool is a failure."""
    try:
        return get()
    except tools.ToolMissingError as error:
        if os.environ.get("CI") == "true":
            raise
        pytest.skip(str(error))


@pytest.fixture(scope="session", params=["helm3", "helm4"])
def helm(request: pytest.FixtureRequest) -> Helm:
    """Each of the two supported major versions in turn."""
    return Helm(obtain(lambda: tools.helm(request.param)))


@pytest.fixture(scope="session")
def helm4() -> Helm:
    """The newest helm, where one is enough."""
    return Helm(obtain(lambda: tools.helm("helm4")))
