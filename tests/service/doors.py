"""Asking one of a server's two API processes: a connection that stays open belongs to one of them.

The server must log JSON, and not close connections that are idle during a test (:data:`OPEN`).
"""

from __future__ import annotations

import itertools
from contextlib import ExitStack

import httpx

from tests.service.server_process import Samples, read_metrics
from tests.service.tiny_server import TinyServer, body

NAMES = ("APIServer_0", "APIServer_1")
OPEN = {"VTOKEN_LOG_FORMAT": "json", "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "600"}
"""Environment of the server."""
_NUMBERS = itertools.count()


class Doors:
    """Connections to each of the processes, all open at once."""

    def __init__(self, server: TinyServer, each: int = 1) -> None:
        self._stack = ExitStack()
        self.of: dict[str, list[httpx.Client]] = {name: [] for name in NAMES}
        for _ in range(100):
            if all(len(clients) >= each for clients in self.of.values()):
                return
            limits = httpx.Limits(max_connections=1, keepalive_expiry=None)
            client = httpx.Client(base_url=server.url, timeout=120, limits=limits)
            self._stack.enter_context(client)
            request_id = f"door-{next(_NUMBERS)}"
            answer = client.post(
                "/v1/completions", json=body("w5", 1), headers={"X-Request-Id": request_id}
            )
            assert answer.status_code == 200
            self.of[server.access(request_id)["process"]].append(client)
        raise AssertionError(f"one process takes all connections: {self.of}")

    def __enter__(self) -> list[httpx.Client]:
        """One of each process."""
        return [clients[0] for clients in self.of.values()]

    def __exit__(self, *_: object) -> None:
        self._stack.close()


def scrape(door: httpx.Client) -> Samples:
    """What ``/metrics`` says through this connection."""
    return read_metrics(door.get("/metrics").raise_for_status().text)
