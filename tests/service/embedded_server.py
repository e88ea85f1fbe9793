"""A real server with the embedded model, as a stranger starts it."""

from __future__ import annotations

import os
from pathlib import Path

import httpx

from tests.service.server_process import ServerProcess

MODEL = "smollm2-135m-instruct"
KEY = "test-admin-key"
API_KEY = "compatibility"
FLAGS = [
    "--enforce-eager",
    *("--max-model-len", "2048"),
    *("--kv-cache-memory-bytes", "200M"),
    *("--vtoken-mode", "lazy"),
    *("--vtoken-budget-tokens", "96"),
    *("--vtoken-low-watermark-ratio", "1.0"),
    *("--vtoken-theta-f", "0.1"),
    *("--vtoken-verify", "full"),
]


class Server(ServerProcess):
    """With the embedded model, guarded by keys."""

    def __init__(self, log: Path, *flags: str) -> None:
        environment = {n: v for n, v in os.environ.items() if not n.startswith("VTOKEN_ADMIN")}
        environment |= {
            "VTOKEN_ADMIN_KEY": KEY,
            "VTOKEN_METRICS_POLL_SECONDS": "0.2",
            "VTOKEN_ENGINE_TIMEOUT_SECONDS": "300",  # a loaded machine is not a fault
        }
        super().__init__(log, [*FLAGS, *flags], environment)

    def admin(self, method: str, path: str, *, key: str | None = KEY, **options) -> httpx.Response:
        headers = {**options.pop("headers", {})}
        if key is not None:
            headers["Authorization"] = f"Bearer {key}"
        return httpx.request(method, self.url + path, headers=headers, timeout=300, **options)
