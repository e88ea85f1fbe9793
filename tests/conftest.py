"""Settings of all tests."""

import logging
from typing import Any

import pytest
from hypothesis import settings

SHARED = {
    "tests/service/test_clients_engine.py": "tests/service/test_serve_engine.py",
    "tests/engine/test_free_ratio.py": "tests/engine/test_faults.py",
    "tests/engine/test_identity.py": "tests/engine/test_faults.py",
    "tests/engine/test_long_prompts.py": "tests/engine/test_faults.py",
    "tests/engine/test_pressure.py": "tests/engine/test_faults.py",
    "tests/engine/test_oracle.py": "tests/engine/test_stock.py",
    "tests/engine/test_policies.py": "tests/engine/test_stock.py",
    "tests/engine/test_prefix_sharing.py": "tests/engine/test_stock.py",
    "tests/engine/test_per_request.py": "tests/engine/test_verification.py",
}
"""Files that run in one process where several share the tests: they use the same engine."""

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


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """By file, as ``--dist loadfile``, but files that share an engine together."""
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class SharedEngines(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return SHARED.get(file, file)

    return SharedEngines(config, log)


def pytest_runtest_setup() -> None:
    """Each test begins with Python's own level of the root logger.

    A package that vLLM's app imports (model_hosting_container_standards) raises it to ERROR.
    """
    logging.getLogger().setLevel(logging.WARNING)
