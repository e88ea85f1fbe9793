"""A service without an engine for every test of this folder that wants one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.loadtest.fake_service import FakeService, running


@pytest.fixture
def service() -> Iterator[FakeService]:
    with running() as found:
        yield found
