"""Settings of all tests."""

import pytest
from hypothesis import settings

# Machines that run tests are shared and slow at times: a slow example is no failure.
settings.register_profile("vtoken", deadline=None)
settings.load_profile("vtoken")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out ``slow`` tests unless ``-m`` or the command line asks for them by name."""
    if "slow" in config.option.markexpr or any("::" in arg for arg in config.args):
        return
    slow = [item for item in items if item.get_closest_marker("slow")]
    if slow:
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if item not in set(slow)]
