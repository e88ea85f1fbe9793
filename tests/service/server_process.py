"""A ``vtoken-serve serve`` process as tests start it, whatever model it has."""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families

SECONDS = 300.0
Samples = dict[str, dict[tuple[tuple[str, str], ...], float]]
"""By name, by labels."""


class ServerProcess:
    """On a free port, in a session of its own, with its output in a file."""

    def __init__(self, log: Path, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        self.log = log
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "service.cli", "serve", "--port", "0", *arguments],
                env=dict(environment),
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.url = ""

    def text(self) -> str:
        """All that it has logged."""
        return self.log.read_text(errors="replace")

    def wait_until_ready(self) -> None:
        """Until the ready line."""
        found = wait_for(lambda: re.search(r"ready on (http://[\w.:]+)", self.text()) or self.ended)
        assert not self.ended, self.text()[-3000:]
        self.url = found[1]

    @property
    def ended(self) -> bool:
        """Whether the process is gone."""
        return self.process.poll() is not None

    def descendants(self) -> list[psutil.Process]:
        """Its engine core, worker and helpers."""
        return psutil.Process(self.process.pid).children(recursive=True)

    def named(self, title: str) -> list[psutil.Process]:
        """Those of its processes that call themselves so."""
        return [p for p in self.descendants() if title in " ".join(p.cmdline())]

    def get(self, path: str, **options: Any) -> httpx.Response:
        """GET."""
        return httpx.get(self.url + path, timeout=60, **options)

    def metrics(self) -> Samples:
        """What ``/metrics`` says."""
        return read_metrics(self.get("/metrics").raise_for_status().text)

    def total(self, name: str, **labels: str) -> float:
        """Sum of the series of one name that have these labels."""
        return total(self.metrics(), name, **labels)

    def terminate(self) -> None:
        """SIGTERM to the server's process alone, as Kubernetes does."""
        self.process.send_signal(signal.SIGTERM)

    def kill_all(self) -> None:
        """Leave nothing behind."""
        if not self.ended:
            for process in [*self.descendants(), self.process]:
                process.kill()
        self.process.wait(timeout=30)


def read_metrics(text: str) -> Samples:
    """What a page says; every family and every series is there once."""
    samples: Samples = {}
    names: list[str] = []
    for family in text_string_to_metric_families(text):
        names.append(family.name)
        assert family.documentation, family.name
        for sample in family.samples:
            series = samples.setdefault(sample.name, {})
            labels = tuple(sorted(sample.labels.items()))
            assert labels not in series, f"{sample.name}{labels} is there twice"
            series[labels] = sample.value
    assert len(names) == len(set(names))
    return samples


def total(samples: Samples, name: str, **labels: str) -> float:
    """Sum of the series of one name that have these labels."""
    wanted = labels.items()
    return sum(v for series, v in samples[name].items() if wanted <= dict(series).items())


def wait_for(condition: Callable[[], object], seconds: float = SECONDS, what: str = "") -> Any:
    """Its first true result.

    Raises:
        AssertionError: it stayed false for so long; the message has ``what``.
    """
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if result := condition():
            return result
        time.sleep(0.05)
    raise AssertionError(f"not within {seconds} s: {what}")


def are_gone(processes: list[psutil.Process]) -> bool:
    """Ended, or waiting as zombies for the init process of this container."""
    gone = (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    return not any(p.is_running() and p.status() not in gone for p in processes)


def kill(processes: list[psutil.Process]) -> None:
    """Whichever are left."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
