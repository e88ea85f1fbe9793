"""How far the start is, told across processes by what vLLM logs while it loads.

The engine and its workers log at known moments; a handler in each of them writes the phase into a
small file that the server's process made, and the server's start page reads it. While weights load,
vLLM counts the files of the checkpoint for its progress bar: that count is the percentage.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from pathlib import Path
from typing import Any

PHASES: tuple[tuple[str, str, int], ...] = (
    ("Initializing a V1 LLM engine", "starting_engine", 5),
    ("Starting to load model", "loading_weights", 10),
    ("Loading weights took", "weights_loaded", 80),
    ("Model loading took", "weights_loaded", 80),
    ("%s KV cache size", "kv_cache", 85),
    ("Warming up model", "warming_up", 90),
    ("Graph capturing finished", "warming_up", 98),
    ("init engine", "engine_ready", 99),
)
"""Beginning of vLLM's message, phase, percent of the whole start at that moment."""

_WEIGHTS = ("loading_weights", 10, 80)


class StartProgress:
    """Reads and writes the file; phases only ever go forward."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._last: dict[str, Any] = {"phase": "starting_server", "percent": 0}

    def write(self, phase: str, percent: int) -> None:
        """Set the phase, unless a later one was reached; a failure is nobody's harm."""
        if percent < self.read()["percent"]:
            return
        with contextlib.suppress(OSError):
            part = self.path.with_suffix(f".{os.getpid()}")  # several workers write at once
            part.write_text(json.dumps({"phase": phase, "percent": percent}))
            os.replace(part, self.path)

    def read(self) -> dict[str, Any]:
        """``{"phase": …, "percent": …}``; what was read last where there is nothing to read."""
        with contextlib.suppress(OSError, ValueError):
            self._last = json.loads(self.path.read_text())
        return self._last

    def remove(self) -> None:
        """Delete the file."""
        self.path.unlink(missing_ok=True)


def make_handler(path: str) -> StartProgressHandler:
    """For Python's ``dictConfig``."""
    return StartProgressHandler(Path(path))


class StartProgressHandler(logging.Handler):
    """Turns vLLM's messages into phases; writes nothing once the file is gone."""

    def __init__(self, path: Path) -> None:
        super().__init__(logging.INFO)
        self._progress = StartProgress(path)

    def emit(self, record: logging.LogRecord) -> None:
        """Look at the message's beginning."""
        for start, phase, percent in PHASES:
            if str(record.msg).startswith(start):
                if self._progress.path.exists():
                    self._progress.write(phase, percent)
                    if phase == _WEIGHTS[0]:
                        watch_checkpoint_files(self._progress)
                return


def watch_checkpoint_files(progress: StartProgress) -> None:
    """Report each checkpoint file that vLLM's progress bar counts, in this process."""
    from vllm.model_executor.model_loader import weight_utils

    bar: Any = weight_utils.tqdm
    if getattr(bar, "reports", None) is not None:
        return

    class ReportingBar(bar):
        """vLLM's bar, telling how many files are done."""

        reports = progress

        def __iter__(self) -> Any:
            phase, first, last = _WEIGHTS
            for number, item in enumerate(super().__iter__()):
                progress.write(phase, first + (last - first) * number // max(1, self.total or 1))
                yield item

    weight_utils.tqdm = ReportingBar
