"""A process that ends soon after the one that started it, whatever killed that one."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable

SECONDS_BETWEEN_SIGNALS = 2.0
EXIT_ORPHANED = 1

logger = logging.getLogger(__name__)


def follow_parent() -> None:
    """From a thread, once the parent is gone: SIGTERM to this process until it ends.

    The second cuts off what the first lets finish: nobody is left to stop or restart it.
    """
    _once_orphaned(_terminate)


def leave_with_parent() -> None:
    """From a thread, once the parent is gone: end this process at once, as if it were killed.

    For engines. A signal would let them finish their requests first, whose answers nobody reads;
    their workers end with them.
    """
    _once_orphaned(_leave)


def _once_orphaned(act: Callable[[], None]) -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None, "only a process that multiprocessing started has one"

    def follow() -> None:
        parent.join()
        act()

    threading.Thread(target=follow, name="parent-watch", daemon=True).start()


def _terminate() -> None:
    while True:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(SECONDS_BETWEEN_SIGNALS)


def _leave() -> None:
    logger.error("the process that started this one is gone; leaving")
    os._exit(EXIT_ORPHANED)
