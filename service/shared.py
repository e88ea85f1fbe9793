"""What several API processes of one server (``--api-server-count``) have in common.

The supervisor makes it, and each process gets it as it is spawned: counts in shared memory, locks,
the file with the engine's statistics, and the socket of the admin port. A process that dies takes
the server down with it, so nothing here has to outlive one.
"""

from __future__ import annotations

import multiprocessing
from argparse import Namespace
from collections.abc import MutableSequence
from dataclasses import dataclass, field
from multiprocessing.synchronize import Lock
from pathlib import Path
from socket import socket
from typing import Any

from service.open_requests import SharedOpenRequests, make_table
from service.refusals import REASONS
from service.tally import Tally

Cells = MutableSequence[int]


@dataclass
class Shared:
    """See the module; it can be pickled while a process is spawned, and then only.

    Attributes:
        num_processes: how many there are.
        metrics_file: of :class:`~service.shared_metrics.SharedReading`.
        change_lock: held while the policy documents of several engines are changed.
        index: which process this is; set in it.
        admin_sock: bound, if the admin routes have a port of their own.
    """

    num_processes: int
    metrics_file: Path
    change_lock: Lock
    index: int = 0
    admin_sock: socket | None = None
    _sent: Cells = field(default_factory=list)
    _started: Cells = field(default_factory=list)
    _refused: dict[str, Cells] = field(default_factory=dict)
    _open_lock: Any = None
    _open_table: Any = None

    @property
    def is_first(self) -> bool:
        """Whether this process does what one has to do for all."""
        return self.index == 0

    @property
    def sent(self) -> Tally:
        """Sequences that were sent to the engine."""
        return Tally(self._sent, self.index)

    @property
    def started(self) -> Tally:
        """Processes that accept connections."""
        return Tally(self._started, self.index)

    @property
    def refused(self) -> dict[str, Tally]:
        """Refused requests by reason."""
        return {reason: Tally(cells, self.index) for reason, cells in self._refused.items()}

    def open_requests(self) -> SharedOpenRequests:
        """Requests by key."""
        return SharedOpenRequests(self._open_lock, self._open_table)


def make_shared(num_processes: int, folder: Path) -> Shared:
    """In the supervisor; ``folder`` is for the file."""
    context = multiprocessing.get_context("spawn")

    def cells() -> Any:
        return context.RawArray("q", num_processes)

    return Shared(
        num_processes,
        folder / "engine-statistics.json",
        context.Lock(),
        _sent=cells(),
        _started=cells(),
        _refused={reason: cells() for reason in REASONS},
        _open_lock=context.Lock(),
        _open_table=make_table(context),
    )


def shared_of(args: Namespace | None) -> Shared | None:
    """What the supervisor gave this process with its arguments; None where it is the only one."""
    return getattr(args, "vtoken_shared", None)
