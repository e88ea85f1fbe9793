"""Two engines behind one server: a policy for both, and the numbers of each."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.service.tiny_server import ADMIN_KEY, TinyServer, body, wait_for, words

pytestmark = pytest.mark.engine

ADMIN = {"Authorization": f"Bearer {ADMIN_KEY}"}
NUM_REQUESTS = 8


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinyServer]:
    """The one server of this file, after requests that both engines had a share of."""
    folder = tmp_path_factory.mktemp("data_parallel")
    server = TinyServer(folder, "--data-parallel-size", "2", VTOKEN_METRICS_POLL_SECONDS="0.2")
    try:
        server.wait_until_ready()
        with ThreadPoolExecutor(NUM_REQUESTS) as pool:
            prompts = [words(150, start=40 * i) for i in range(NUM_REQUESTS)]
            answers = list(pool.map(lambda prompt: server.complete(prompt, 64), prompts))
        assert all(answer.status_code == 200 for answer in answers), server.text()[-3000:]
        yield server
    finally:
        server.kill_all()


def policy(server: TinyServer, changes: dict[str, object]) -> httpx.Response:
    """PATCH /admin/policy."""
    return httpx.patch(server.url + "/admin/policy", json=changes, headers=ADMIN, timeout=60)


def series(server: TinyServer, name: str, label: str | None = None) -> dict[str, str | float]:
    """Value, or ``label``, of a metric per engine."""
    families = text_string_to_metric_families(server.get("/metrics").text)
    samples = [s for family in families for s in family.samples if s.name == name]
    return {s.labels["engine"]: s.labels[label] if label else s.value for s in samples}


def test_state_shows_both_engines(server: TinyServer) -> None:
    """Both worked, and what is shown for the whole is their sum."""
    wait_for(server.is_quiet)
    state = server.state()
    steps = [part["engine"]["steps"] for part in state["engines"]]
    assert len(steps) == 2
    assert min(steps) > 0
    assert state["engine"]["steps"] == sum(steps)
    total = sum(part["pool"]["total_blocks"] for part in state["engines"])
    assert state["pool"]["total_blocks"] == total


def test_metrics_are_labelled_by_engine(server: TinyServer) -> None:
    """As vLLM's own are; both engines evicted."""
    evicted = wait_for(
        lambda: (
            (found := series(server, "vtoken_evicted_tokens_total"))
            and min(found.values()) > 0
            and found
        ),
        60,
    )
    assert set(evicted) == set(series(server, "vllm:num_requests_running")) == {"0", "1"}


def test_a_change_of_policy_reaches_both_engines(server: TinyServer) -> None:
    """One version; each engine reports that it is in force."""
    answer = policy(server, {"policy": "h2o", "budget_tokens": 80})
    assert answer.status_code == 200, answer.text
    version = str(answer.json()["version"])
    both = {"0": version, "1": version}
    wait_for(lambda: series(server, "vtoken_policy_info", "version") == both, 60)
    assert series(server, "vtoken_policy_info", "policy") == {"0": "h2o", "1": "h2o"}


def test_a_refused_change_reaches_none(server: TinyServer) -> None:
    """Refused with the bound, and the version stays."""
    before = server.get("/admin/policy", headers=ADMIN).json()["version"]
    assert policy(server, {"headroom_blocks": 100_000}).status_code == 422
    assert server.get("/admin/policy", headers=ADMIN).json()["version"] == before


def test_a_receipt_adds_up_over_engines(server: TinyServer) -> None:
    """The sequences of one answer, wherever they ran."""
    request = body(words(150), 40, n=4, temperature=1.0, vllm_xargs={"vtoken_receipt": True})
    answer = server.post(json=request)
    assert answer.status_code == 200, answer.text
    receipt = answer.json()["vtoken"]
    assert receipt["num_sequences"] == 4
    assert receipt["evicted_tokens"] + receipt["live_tokens"] == 4 * (150 + 40 - 1)
