"""Kernel tests need a process of their own: Triton decides at import whether it interprets."""

import importlib.util
import os
from pathlib import Path

INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"

if INTERPRETING:
    collect_ignore = ["test_kernels.py"]
    _spec = importlib.util.spec_from_file_location(
        "gpu_interpreter", Path(__file__).with_name("interpreter.py")
    )
    _module = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(_module)
    _module.install()
else:
    collect_ignore = ["kernels"]
