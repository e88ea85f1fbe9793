"""``/metrics`` of several API processes: each answers for all of them.

vLLM's own metrics, and those of its HTTP layer, are in prometheus_client's files, one set for each
process, and are added up at every scrape. The token layer's are the engine's: one process reads
them, and every scrape shows that last reading, whichever process answers. (Were each to show its
own, a counter could fall from one scrape to the next, which Prometheus takes for a restart.)
"""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import asdict
from pathlib import Path

from fastapi import FastAPI
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from service.metrics import Reading


class SharedReading:
    """The last reading, in a file that one process writes."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, reading: Reading) -> None:
        """Replace what is there, whole; if that fails, the age of what is shown grows."""
        part = self._path.with_suffix(".part")
        with contextlib.suppress(OSError):
            part.write_text(json.dumps(asdict(reading)))
            os.replace(part, self._path)

    def read(self) -> Reading | None:
        """The last one; None before the first."""
        try:
            return Reading(**json.loads(self._path.read_text()))
        except FileNotFoundError:
            return None


def attach(app: FastAPI, collector: Collector) -> None:
    """Answer ``/metrics`` for all processes, before vLLM's own routes do; mutates ``app``.

    Needs ``PROMETHEUS_MULTIPROC_DIR``, as prometheus_client does.
    """
    registry = CollectorRegistry()
    MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
    registry.register(collector)

    def scrape(_: Request) -> Response:
        headers = {"Content-Type": CONTENT_TYPE_LATEST}
        return Response(generate_latest(registry), headers=headers)

    app.router.routes.insert(0, Route("/metrics", scrape))
