"""Faults in a server's processes: Python code that runs once a module of ours is there."""

from __future__ import annotations

from pathlib import Path
from textwrap import indent

# Loaded by Python at the start of every process.
_HOOK = """
import importlib.abc, importlib.util, os, sys

class Fault(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != {module!r}:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        run = spec.loader.exec_module
        def exec_module(module):
            run(module)
{code}
        spec.loader.exec_module = exec_module
        return spec

sys.meta_path.insert(0, Fault())
"""


def inject(folder: Path, module: str, code: str) -> dict[str, str]:
    """Have ``code`` run in every process right after ``module`` was imported there.

    Args:
        folder: for the hook.
        module: name.
        code: knows the module as ``module``, and ``os``.

    Returns:
        The environment of the server's process.
    """
    hook = _HOOK.format(module=module, code=indent(code.strip("\n"), 12 * " "))
    (folder / "sitecustomize.py").write_text(hook)
    return {"PYTHONPATH": str(folder)}
