"""Another object under one of vLLM's names, where vLLM offers no other way in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def replaced(owner: Any, name: str, value: object) -> Iterator[None]:
    """Let ``owner.name`` be ``value`` inside the block; then it is again exactly what it was.

    Args:
        owner: a module, class or object that holds the name itself.
    """
    before = vars(owner)[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
