"""Starts ``vtoken-serve serve`` as a person would, and ends it with all its children."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

START_SECONDS = 600.0
STOP_SECONDS = 60.0
ENGINE_TIMEOUT_SECONDS = 120  # a busy machine: an answer between two steps may take long

_READY = re.compile(r"vtoken-serve ready on (http://\S+)")


class StartError(Exception):
    """The service did not become ready; the message has the end of its log."""


def console_command() -> str:
    """The console command of this environment, else the first on the path.

    Raises:
        StartError: it is not installed.
    """
    beside = Path(sys.executable).with_name("vtoken-serve")
    found = str(beside) if beside.exists() else shutil.which("vtoken-serve")
    if found is None:
        raise StartError("vtoken-serve is not installed in this environment")
    return found


def flag_list(flags: Mapping[str, str | bool]) -> list[str]:
    """``{"block-size": "16", "enforce-eager": True}`` as arguments; ``False`` is ``--no-…``."""
    arguments = []
    for name, value in flags.items():
        if isinstance(value, bool):
            arguments.append(f"--{name}" if value else f"--no-{name}")
        else:
            arguments += [f"--{name}", value]
    return arguments


class Server:
    """A service on a free port, with admin routes open to :attr:`admin_key` alone.

    Args:
        arguments: everything after ``vtoken-serve serve``.
        log: file for its output.
        environment: variables besides the present ones.
        python_path: folder put before the present ``PYTHONPATH``.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        log: Path,
        environment: Mapping[str, str] | None = None,
        python_path: str = "",
    ) -> None:
        self.admin_key = secrets.token_hex(16)
        self._log = log
        variables = {
            **os.environ,
            "VTOKEN_ADMIN_KEY": self.admin_key,
            "VTOKEN_ENGINE_TIMEOUT_SECONDS": str(ENGINE_TIMEOUT_SECONDS),
            **(environment or {}),
        }
        if python_path:
            folders = [python_path, variables.get("PYTHONPATH", "")]
            variables["PYTHONPATH"] = os.pathsep.join(filter(None, folders))
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [console_command(), "serve", "--port", "0", *arguments],
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a group of its own, to be ended as a whole
            )

    def wait_ready(self, seconds: float = START_SECONDS) -> str:
        """Block until it accepts requests; its address.

        Raises:
            StartError: it ended or took too long.
        """
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and self._process.poll() is None:
            if found := _READY.search(self._text()):
                return found[1]
            time.sleep(0.1)
        ended = self._process.poll()
        why = f"after {seconds:.0f} s" if ended is None else f"it ended with {ended}"
        raise StartError(f"the service is not ready: {why}\n{self._text()[-3000:]}")

    def stop(self) -> None:
        """End it, gently first; nothing of its process group is left."""
        if self._process.poll() is None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_SECONDS)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(STOP_SECONDS)

    def _text(self) -> str:
        return self._log.read_text(errors="replace")
