"""A process that ends soon after the one that started it, whatever killed that one."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time

SECONDS_BETWEEN_SIGNALS = 2.0


def follow_parent() -> None:
    """From a thread, once the parent is gone: SIGTERM to this process until it ends.

    The second cuts off what the first lets finish: nobody is left to stop or restart it.
    """
    threading.Thread(target=_follow, name="parent-watch", daemon=True).start()


def _follow() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None, "only a process that multiprocessing started has one"
    parent.join()
    while True:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(SECONDS_BETWEEN_SIGNALS)
