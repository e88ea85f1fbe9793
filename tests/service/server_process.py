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

SECONDS = 500.0
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
        found = wait_for(
            lambda: re.search(r"ready on (http://[\w.:]+) ", self.text()) or self.ended
        )
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
        return [p for p in self.descendants() if title in title_of(p)]

    def get(self, path: str, **options: Any) -> httpx.Response:
        """GET."""
        return httpx.get(self.url + path, timeout=60, **options)

    def metrics(self) -> Samples:
        """What ``/metrics`` says."""
        return read_metrics(self.get("/metrics").raise_for_status().text)

    def fresh_metrics(self) -> Samples:
        """The same, once the engine has been read since this call."""
        started = time.monotonic()

        def read_since() -> Samples | None:
            asked, samples = time.monotonic(), self.metrics()
            age = max(samples["vtoken_snapshot_age_seconds"].values())
            return samples if age < asked - started else None

        found: Samples = wait_for(read_since)
        return found

    def total(self, name: str, **labels: str) -> float:
        """Sum of the series of one name that have these labels."""
        return total(self.metrics(), name, **labels)

    def terminate(self) -> None:
        """SIGTERM to the server's process alone, as Kubernetes does."""
        self.process.send_signal(signal.SIGTERM)

    def kill_all(self) -> None:
        """Leave nothing behind."""
        if not self.ended:
            kill(self.descendants())
            self.process.kill()
        self.process.wait(timeout=120)


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

    Where the whole machine stood still, that counts as a second at most.

    Raises:
        AssertionError: it stayed false for so long; the message has ``what``.
    """
    left = seconds
    while left > 0:
        started = time.monotonic()
        if result := condition():
            return result
        time.sleep(0.05)
        left -= min(time.monotonic() - started, 1.0)
    raise AssertionError(f"not within {seconds} s: {what}")


def are_gone(processes: list[psutil.Process]) -> bool:
    """Ended, or waiting as zombies for the init process of this container."""
    return all(map(is_gone, processes))


def is_gone(process: psutil.Process) -> bool:
    """Whether it has ended; it may do so while it is looked at."""
    try:
        states = (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
        return not process.is_running() or process.status() in states
    except psutil.NoSuchProcess:
        return True


def title_of(process: psutil.Process) -> str:
    """Its command line; empty if it has ended meanwhile."""
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""


def kill(processes: list[psutil.Process]) -> None:
    """Whichever are left."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
