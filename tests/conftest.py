"""Settings of all tests."""

import logging

import pytest
from hypothesis import settings

# Machines that run tests are shared and slow at times: a slow example is no failure.
settings.register_profile("vtoken", deadline=None)
settings.load_profile("vtoken")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Files with engines first, since they last; ``slow`` tests only by ``-m`` or by name."""
    with_engine = {item.path for item in items if item.get_closest_marker("engine")}
    items.sort(key=lambda item: item.path not in with_engine)
    if "slow" in config.option.markexpr or any("::" in arg for arg in config.args):
        return
    slow = [item for item in items if item.get_closest_marker("slow")]
    if slow:
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if item not in set(slow)]


def pytest_runtest_setup() -> None:
    """Each test begins with Python's own level of the root logger.

    A package that vLLM's app imports (model_hosting_container_standards) raises it to ERROR.
    """
    logging.getLogger().setLevel(logging.WARNING)
