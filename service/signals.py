"""SIGINT and SIGTERM while the service starts: leave, with what was started stopped on the way.

A process that handles neither dies of them, but not the first of a container: the kernel keeps them
from it until it does. So they are handled before the import of vLLM, which takes seconds.
"""

from __future__ import annotations

import signal
from typing import NoReturn


class StoppedWhileStarting(SystemExit):
    """Ends the process with 128 + the signal's number, wherever it is raised.

    Not a KeyboardInterrupt: vLLM's ``zmq_socket_ctx`` swallows that while the engine starts, and
    then waits ten minutes for an engine that was abandoned.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        super().__init__(128 + number)

    def __str__(self) -> str:
        return f"stopped by {signal.Signals(self.number).name} while starting"


def leave_on_signals() -> None:
    """Until vLLM's HTTP server handles them; from the main thread."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _leave)


def _leave(number: int, _: object) -> NoReturn:
    raise StoppedWhileStarting(number)
