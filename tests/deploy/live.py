"""The CPU preset as a running pod with a real Prometheus beside it, under a bounded load.

The Prometheus has another vLLM to scrape, too, as those that many teams share have.
"""

from __future__ import annotations

import contextlib
import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deploy.grafana.model import Dashboard
from tests.deploy.grafana import all_selected, filled
from tests.deploy.helm import Helm, find
from tests.deploy.load import Stream
from tests.deploy.neighbour import neighbour_of
from tests.deploy.pod import Pod, free_port
from tests.deploy.prometheus import Prometheus, Target

API_KEY, ADMIN_KEY = "live-api-key", "live-admin-key"
LOAD_SECONDS = 45
OWN_JOB, POD_NAME = "vtoken", "demo-vtoken-serve-6d4b75cb6d-x2kzp"
VALUES: dict[str, Any] = {
    "vtoken": {
        "policy": "random",
        "budgetTokens": 64,
        "recentTokens": 16,
        "thetaF": 0.05,
        "lowWatermarkRatio": 1.0,
        "headroomBlocks": 16,
        "verify": "sampled",
    },
    "server": {"metricsPollSeconds": 0.2, "drainSeconds": 90},
    "vllm": {"kvCacheMemoryBytes": 40_000_000, "maxModelLen": 1024, "maxNumSeqs": 8},
    "auth": {
        "apiKey": {"value": API_KEY},
        "adminKeys": {"value": f"# named for the audit\n{ADMIN_KEY}\n"},
    },
    "shutdown": {"preStopSeconds": 1},
    "probes": {"startup": {"periodSeconds": 1, "failureThreshold": 400}},
    "prometheusRule": {"enabled": True},
}
GRAFANA = {
    "$__rate_interval": "10s",
    "$__range": "1m",
    "$compare": "5s",
    "offset 1m": "offset 2s",
}
"""What a short run needs instead of Grafana's own variables."""


@dataclass
class Live:
    """The running service, the Prometheus that scrapes it, and the time of the load."""

    pod: Pod
    prometheus: Prometheus
    objects: list[dict[str, Any]]
    start: float = 0
    end: float = 0
    _values: dict[str, dict[str, str]] = field(default_factory=dict)

    def fill(self, dashboard: Dashboard) -> Callable[[str], str]:
        """Fills the dashboard's variables into a text, with All selected."""
        if dashboard.uid not in self._values:
            variables = dashboard.to_json()["templating"]["list"]
            self._values[dashboard.uid] = all_selected(
                variables, GRAFANA, self.prometheus, self.start, self.end
            )
        return lambda text: filled(text, self._values[dashboard.uid])


@contextmanager
def running(helm: Helm, prometheus_binary: Path, folder: Path) -> Iterator[Live]:
    """Start the pod and Prometheus, send the load, change the policy in its middle."""
    for name in ("pod", "prometheus"):
        (folder / name).mkdir()
    objects = helm.template(VALUES, ["values-cpu.yaml"])
    pod = Pod(objects, folder / "pod")
    with neighbour_of(pod.url) as neighbour:
        prometheus = Prometheus(
            prometheus_binary,
            folder / "prometheus",
            port=free_port(),
            targets=[
                Target(OWN_JOB, f"127.0.0.1:{pod.port}", {"namespace": "llm", "pod": POD_NAME}),
                Target("neighbour", neighbour, {"namespace": "llm", "pod": "neighbour-0"}),
            ],
            groups=find(objects, "PrometheusRule")["spec"]["groups"],
        )
        try:
            assert not pod.probe("startup"), "loading a model takes longer than this"
            prometheus.wait_until_ready()
            pod.wait_until_started()
            state = Live(pod, prometheus, objects, start=time.time())
            send_load(pod)
            state.end = time.time()
            yield state
        finally:
            pod.kill()
            prometheus.stop()


def send_load(pod: Pod) -> None:
    """Conversations of several lengths for a bounded time, refusals and one policy change."""
    deadline = time.monotonic() + LOAD_SECONDS
    is_changed = False
    while time.monotonic() < deadline:
        ask_for_nothing(pod)
        streams = [Stream(pod.url, API_KEY, 40 + 60 * n, 120 + 20 * n) for n in range(10)]
        for thread in [stream.start() for stream in streams]:
            thread.join(timeout=300)
        assert all(stream.is_whole for stream in streams), [s.error for s in streams]
        if not is_changed:
            patch(pod, {"theta_f": 0.1})
            is_changed = True


def ask_for_nothing(pod: Pod) -> None:
    """A request that is refused with 400."""
    headers = {"Authorization": f"Bearer {API_KEY}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{pod.url}/v1/completions", data=b"{}", headers=headers)
    with contextlib.suppress(urllib.error.HTTPError):
        urllib.request.urlopen(request, timeout=30)


def patch(pod: Pod, changes: dict[str, Any]) -> None:
    """PATCH /admin/policy."""
    headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
    data = json.dumps(changes).encode()
    request = urllib.request.Request(
        f"{pod.url}/admin/policy", data=data, headers=headers, method="PATCH"
    )
    urllib.request.urlopen(request, timeout=30).close()
