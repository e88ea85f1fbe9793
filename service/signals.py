"""SIGINT and SIGTERM while the service starts.

    the command         end the process at once: nothing was started yet
    service.serve.run   unwind, so that the engine's processes are stopped on the way
    serving             as vLLM's HTTP server and :mod:`service.drain` have it

A process that handles neither dies of them, but not the first of a container: the kernel keeps them
from it until it does. So they are handled before the import of vLLM, which takes seconds.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import NoReturn

SIGNALS = (signal.SIGINT, signal.SIGTERM)


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


def exit_on_signals(clean_up: Callable[[], object] = bool) -> None:
    """End the process at once, after ``clean_up``; from the main thread.

    An exception would come out in the middle of somebody's import, which may swallow it or break:
    PyTorch was seen to recurse.
    """

    def leave(number: int, _: object) -> NoReturn:
        clean_up()
        os.write(2, f"vtoken-serve: {StoppedWhileStarting(number)}\n".encode())
        os._exit(128 + number)

    for number in SIGNALS:
        signal.signal(number, leave)


def leave_on_signals() -> None:
    """Raise :class:`StoppedWhileStarting`, until others handle them; from the main thread."""
    for number in SIGNALS:
        signal.signal(number, _leave)


def _leave(number: int, _: object) -> NoReturn:
    raise StoppedWhileStarting(number)
