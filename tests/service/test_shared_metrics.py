"""``/metrics`` of several processes: sums of what each counted, one reading of the engine."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from prometheus_client.parser import text_string_to_metric_families

from service.metrics import Reading, VTokenCollector
from service.shared_metrics import SharedReading, attach
from vtoken.config import VTokenConfig
from vtoken.stats import VTokenStats

CHILD = """
import sys
from prometheus_client import Counter, Gauge
Counter("answers", "Answers.").inc(int(sys.argv[1]))
Gauge("running", "Running.", multiprocess_mode="mostrecent").set(int(sys.argv[1]))
"""


def make_collector(path: Path, now: list[float] | None = None, **options: Any) -> VTokenCollector:
    clock = (lambda: now[0]) if now else (lambda: 0.0)
    config = VTokenConfig().to_dict()
    return VTokenCollector("m", config, store=SharedReading(path), clock=clock, **options)


def make_snapshot(evicted: int, policy: str = "streaming_llm") -> dict[str, Any]:
    """As the engine replies."""
    stats = VTokenStats()
    stats.inc("evicted_tokens_total", evicted, policy)
    for num_blocks in (1, 5):
        stats.observe("request_retained_blocks", num_blocks)
    config = {**VTokenConfig().to_dict(), "policy": policy}
    snapshot = {"stats": stats.snapshot(), "config": config, "policy_version": 1}
    return dict(json.loads(json.dumps(snapshot)))


def shown(collector: VTokenCollector) -> dict[str, list[tuple[dict[str, str], float]]]:
    """Sample names to labels and values."""
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in collector.collect():
        for sample in family.samples:
            found.setdefault(sample.name, []).append((dict(sample.labels), sample.value))
    return found


def test_all_processes_show_the_reading_of_one(tmp_path: Path) -> None:
    """Values, age, failures and the series of policies that are gone; also before the first."""
    now = [0.0]
    reader, other = (make_collector(tmp_path / "x", now) for _ in range(2))
    assert shown(reader) == shown(other)
    reader.update(make_snapshot(5, "random"))
    reader.update(make_snapshot(7))
    reader.count_failure()
    now[0] = 4.0
    found = shown(other)
    assert found == shown(reader)
    assert found["vtoken_snapshot_age_seconds"][0][1] == 4
    assert found["vtoken_poll_failures_total"][0][1] == 1
    evicted = {labels["policy"]: n for labels, n in found["vtoken_evicted_tokens_total"]}
    assert evicted == {"streaming_llm": 7, "random": 0}


def test_reading_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    """A folder that cannot be written to ends nothing; what was shown stays, and ages."""
    store = SharedReading(tmp_path / "gone" / "x")
    store.write(Reading({}, [], 1.0))
    assert store.read() is None
    store = SharedReading(tmp_path / "x")
    for number in range(3):
        store.write(Reading({"a": number}, ["p"], 1.5, number))
        assert store.read() == Reading({"a": number}, ["p"], 1.5, number)
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_scrape_adds_up_and_has_ours_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counters of two processes are summed, the token layer's are as read; before vLLM's route."""
    folder = tmp_path / "metrics"
    folder.mkdir()
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(folder))
    for count in ("3", "4"):
        subprocess.run([sys.executable, "-c", CHILD, count], check=True)
    app = FastAPI()
    app.add_api_route("/metrics", lambda: "vLLM's own")
    collector = make_collector(tmp_path / "x")
    collector.update(make_snapshot(7))
    attach(app, collector)

    async def get() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.get("/metrics")

    answer = asyncio.run(get())
    assert answer.headers["content-type"].startswith("text/plain; version=")
    families = list(text_string_to_metric_families(answer.text))
    assert len({family.name for family in families}) == len(families)
    samples = {s.name: s.value for family in families for s in family.samples}
    assert (samples["answers_total"], samples["running"]) == (7, 4)
    assert samples["vtoken_evicted_tokens_total"] == 7
