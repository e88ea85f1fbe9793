"""What the processes of an engine do first: engine cores and, with several of them, a coordinator.

vLLM looks the functions that they run up on two classes when it starts them.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from vtoken.integration.vllm.compat.replaced import replaced

_TARGETS = {
    "vllm.v1.engine.core": ("EngineCoreProc", "run_engine_core"),
    "vllm.v1.engine.coordinator": ("DPCoordinatorProc", "run_coordinator"),
}


@contextmanager
def engine_processes_begin_with(first: Callable[[], None]) -> Iterator[None]:
    """Let every such process that is started meanwhile call ``first``, then go on as vLLM's.

    Args:
        first: a function of a module; it is called in the main thread of the new process.
    """
    with ExitStack() as stack:
        for module in _TARGETS:
            ours = staticmethod(functools.partial(_run, first, module))
            stack.enter_context(replaced(*_target(module), ours))
        yield


def _run(first: Callable[[], None], module: str, *args: Any, **kwargs: Any) -> None:
    """In the new process, where vLLM's function is in its place."""
    first()
    owner, name = _target(module)
    getattr(owner, name)(*args, **kwargs)


def _target(module: str) -> tuple[Any, str]:
    """The class that holds the function, and the function's name."""
    owner, name = _TARGETS[module]
    return getattr(importlib.import_module(module), owner), name
