"""A real Prometheus on this machine, and its HTTP API."""

from __future__ import annotations

import json
import math
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.service.server_process import wait_for


@dataclass(frozen=True)
class Target:
    """``address`` has ``/metrics``; ``labels`` are what the operator's monitors would set."""

    job: str
    address: str
    labels: Mapping[str, str]


class Prometheus:
    """Scrapes each target every second."""

    def __init__(
        self,
        binary: Path,
        folder: Path,
        *,
        port: int,
        targets: Sequence[Target],
        groups: list[dict[str, Any]],
    ) -> None:
        config = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": ["rules.yaml"],
            "scrape_configs": [
                {
                    "job_name": target.job,
                    "static_configs": [
                        {"targets": [target.address], "labels": dict(target.labels)}
                    ],
                }
                for target in targets
            ],
        }
        (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
        (folder / "rules.yaml").write_text(yaml.safe_dump({"groups": groups}))
        self._url = f"http://127.0.0.1:{port}"
        self._log = (folder / "prometheus.log").open("wb")
        self.process = subprocess.Popen(
            [
                *(str(binary), f"--config.file={folder}/prometheus.yaml"),
                *(f"--storage.tsdb.path={folder}/data", f"--web.listen-address=127.0.0.1:{port}"),
            ],
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )

    def wait_until_ready(self) -> None:
        """Until its own readiness page answers."""
        wait_for(self._is_ready, what="Prometheus did not start")

    def _is_ready(self) -> bool:
        assert self.process.poll() is None, Path(self._log.name).read_text()[-3000:]
        try:
            urllib.request.urlopen(self._url + "/-/ready", timeout=60).close()
        except OSError:
            return False
        return True

    def get(self, path: str, **parameters: object) -> Any:
        """``data`` of an API answer; an error of Prometheus is an exception."""
        query = urllib.parse.urlencode(parameters)
        with urllib.request.urlopen(f"{self._url}/api/v1/{path}?{query}", timeout=120) as answer:
            return json.load(answer)["data"]

    def query_range(self, expr: str, start: float, end: float, step: float = 1) -> list[Any]:
        """The series of an expression over a time."""
        answer = self.get("query_range", query=expr, start=start, end=end, step=step)
        series: list[Any] = answer["result"]
        return series

    def stop(self) -> None:
        """End it."""
        self.process.terminate()
        self.process.wait(timeout=120)
        self._log.close()


def has_number(series: list[Any]) -> bool:
    """Whether any series has a sample that is a number."""
    return any(math.isfinite(float(value)) for one in series for _, value in one["values"])
