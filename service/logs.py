"""One log for all processes: ours, vLLM's and uvicorn's lines in one format, console or JSON.

vLLM configures logging in the server, the engine core and each worker from a file of Python's
``dictConfig``; the server writes that file, and it names the two factories below. A JSON line has
``time`` (UTC), ``level``, ``logger``, ``process``, ``pid``, ``message``, and where a request is
known its ``request_id`` and ``trace_id``; the line that ends a request has its numbers as well.
Prompts and answers are never logged, unless ``--enable-log-requests`` asks vLLM to.
"""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from service import request_ids

REQUEST_FIELDS: tuple[str, ...] = (
    "request_id",
    "method",
    "path",
    "status",
    "duration_seconds",
    "key_name",
    "prompt_tokens",
    "output_tokens",
    "outcome",
    "trace_id",
)
"""What a line may say about a request, in this order."""

_IN_THE_MESSAGE = ("method", "path", "status")
_CONSOLE = (
    "(%(process_name)s pid=%(process)d) %(levelname)s %(asctime)s "
    "[%(filename)s:%(lineno)d] %(message)s"
)


def log_config(style: str, level: str, progress: Path) -> dict[str, Any]:
    """The ``dictConfig`` for every process.

    Args:
        style: ``console`` or ``json``.
        level: of vLLM's loggers and ours; libraries log warnings.
        progress: file of :class:`~service.start_progress.StartProgress`.
    """
    ours = {"handlers": ["vtoken"], "level": level, "propagate": False}
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "handlers": {
            "vtoken": {"()": "service.logs.make_handler", "style": style},
            "progress": {"()": "service.start_progress.make_handler", "path": str(progress)},
        },
        "root": {"handlers": ["vtoken"], "level": "WARNING"},
        "loggers": {
            "vllm": {**ours, "handlers": ["vtoken", "progress"]},
            "service": ours,
            "vtoken": ours,
            "uvicorn": {**ours, "level": "INFO"},
        },
    }


def make_handler(style: str) -> logging.Handler:
    """To standard output, as vLLM's own; ``style`` is ``console`` or ``json``."""
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(JsonFormatter() if style == "json" else ConsoleFormatter())
    return handler


class JsonFormatter(logging.Formatter):
    """One object per line, whatever is in the message."""

    def format(self, record: logging.LogRecord) -> str:
        """The line, without its end."""
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "process": _process_name(record),
            "pid": record.process,
            "message": record.getMessage(),
            **request_fields(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        if record.stack_info:
            line["stack"] = record.stack_info
        return json.dumps(line, ensure_ascii=False, default=str)


class ConsoleFormatter(logging.Formatter):
    """vLLM's order of things, with what is known of the request at the end."""

    def __init__(self) -> None:
        super().__init__(_CONSOLE, "%m-%d %H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        """The line or lines; the prefix is repeated on each, so that grep finds them."""
        record.process_name = _process_name(record)
        text = super().format(record)
        fields = request_fields(record)
        shown = [f"{k}={v}" for k, v in fields.items() if k not in _IN_THE_MESSAGE]
        first, *others = text.split("\n")
        first = " ".join([first, *shown])
        prefix = self.formatMessage(_without_message(record))
        return "\n".join([first, *(prefix + line for line in others)])


def request_fields(record: logging.LogRecord) -> dict[str, Any]:
    """What is known of the request: from the call itself, or from the task that it was made in."""
    found = {n: record.__dict__[n] for n in REQUEST_FIELDS if n in record.__dict__}
    request = request_ids.current.get()
    if request is not None:
        found.setdefault("request_id", request.request_id)
        if request.trace_id:
            found.setdefault("trace_id", request.trace_id)
    return found


def _process_name(record: logging.LogRecord) -> str:
    """As vLLM calls its processes; ``MainProcess`` before it has named this one."""
    return str(getattr(record, "vllm_process_name", record.processName))


def _without_message(record: logging.LogRecord) -> logging.LogRecord:
    bare = logging.makeLogRecord(record.__dict__)
    bare.message = ""
    return bare
