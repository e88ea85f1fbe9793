"""Runs a real promtool."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.deploy import tools
from tests.deploy.conftest import obtain


def promtool(*arguments: str | Path) -> None:
    """Run it; its output is the failure's text."""
    binary = obtain(lambda: tools.debian_tool("promtool"))
    command = [str(binary), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
