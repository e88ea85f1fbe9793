"""A real server with the embedded model, as a stranger starts it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families

from tests.service.tiny_server import wait_for

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


class Server:
    """A ``vtoken-serve serve`` process on a free port."""

    def __init__(self, log: Path, *flags: str) -> None:
        self.log = log
        environment = {n: v for n, v in os.environ.items() if not n.startswith("VTOKEN_ADMIN")}
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "service.cli", "serve", "--port", "0", *FLAGS, *flags],
                env={
                    **environment,
                    "VTOKEN_ADMIN_KEY": KEY,
                    "VTOKEN_METRICS_POLL_SECONDS": "0.2",
                    "VTOKEN_ENGINE_TIMEOUT_SECONDS": "300",  # a loaded machine is not a fault
                },
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.url = ""

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def wait_until_ready(self) -> None:
        found = wait_for(lambda: re.search(r"ready on (http://\S+)", self.text()) or self.has_ended)
        assert not self.has_ended, self.text()[-3000:]
        assert isinstance(found, re.Match)
        self.url = found[1]

    @property
    def has_ended(self) -> bool:
        return self.process.poll() is not None

    def descendants(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def find(self, name: str) -> psutil.Process:
        return next(p for p in self.descendants() if name in " ".join(p.cmdline()))

    def kill_all(self) -> None:
        if not self.has_ended:
            for process in [*self.descendants(), self.process]:
                process.kill()
        self.process.wait(timeout=30)

    def get(self, path: str, **options) -> httpx.Response:
        return httpx.get(self.url + path, timeout=30, **options)

    def admin(self, method: str, path: str, *, key: str | None = KEY, **options) -> httpx.Response:
        headers = {**options.pop("headers", {})}
        if key is not None:
            headers["Authorization"] = f"Bearer {key}"
        return httpx.request(method, self.url + path, headers=headers, timeout=30, **options)

    def metrics(self) -> dict[str, dict[tuple, float]]:
        samples: dict[str, dict[tuple, float]] = {}
        for family in text_string_to_metric_families(self.get("/metrics").text):
            for sample in family.samples:
                samples.setdefault(sample.name, {})[tuple(sorted(sample.labels.items()))] = (
                    sample.value
                )
        return samples

    def total(self, name: str, **labels: str) -> float:
        """Sum of one counter over the series that have ``labels``."""
        series = self.metrics()[name].items()
        return sum(value for key, value in series if labels.items() <= dict(key).items())
