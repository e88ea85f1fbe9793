"""Two engines behind one server: a policy for both, and the numbers of each."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.service.faults import inject
from tests.service.tiny_server import ADMIN_KEY, TinyServer, body, wait_for, words

pytestmark = pytest.mark.engine

ADMIN = {"Authorization": f"Bearer {ADMIN_KEY}"}
NUM_REQUESTS = 8

VIOLATION = """
plan = module.TokenLayer.plan_relocations
def violated(self, *args):
    try:
        os.rename({flag!r}, {flag!r} + ".taken")
    except OSError:
        return plan(self, *args)
    from vtoken.errors import InvariantViolationError
    self.control.stop_relocation(InvariantViolationError("I2", "injected"))
    return []
module.TokenLayer.plan_relocations = violated
"""
"""In ``vtoken.token_layer``: the engine that first finds a file takes it away and behaves as if a
check had found an invariant violated."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinyServer]:
    """The one server of this file, after requests that both engines had a share of."""
    folder = tmp_path_factory.mktemp("data_parallel")
    code = VIOLATION.format(flag=str(folder / "violated"))
    server = TinyServer(
        folder,
        *("--data-parallel-size", "2"),
        VTOKEN_METRICS_POLL_SECONDS="0.2",
        **inject(folder, "vtoken.token_layer", code),
    )
    server.violation = folder / "violated"  # type: ignore[attr-defined]
    try:
        server.wait_until_ready()
        with ThreadPoolExecutor(NUM_REQUESTS) as pool:
            prompts = [words(150, start=40 * i) for i in range(NUM_REQUESTS)]
            answers = list(pool.map(lambda prompt: server.complete(prompt, 64), prompts))
        assert all(answer.status_code == 200 for answer in answers), server.text()[-3000:]
        yield server
    finally:
        server.kill_all()


def policy(
    server: TinyServer, changes: dict[str, object], if_match: int | None = None
) -> httpx.Response:
    """PATCH /admin/policy."""
    headers = ADMIN if if_match is None else {**ADMIN, "If-Match": f'"{if_match}"'}
    return httpx.patch(server.url + "/admin/policy", json=changes, headers=headers, timeout=60)


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


def test_if_match_where_the_engines_differ(server: TinyServer) -> None:
    """A violation has changed one engine's document alone: 412 with both versions, whichever is
    expected; an unconditional change that makes the documents equal makes one version of them."""
    before = server.get("/admin/policy", headers=ADMIN).json()["version"]
    server.violation.touch()  # type: ignore[attr-defined]
    wait_for(lambda: server.complete(words(100), 20) and server.state()["relocation_disabled"], 60)
    wait_for(server.is_quiet, 60)
    differing = server.get("/admin/policy", headers=ADMIN).json()["engines"]
    versions = [one["version"] for one in differing]
    assert sorted(versions) == [before, before + 1]
    assert sorted(one["document"]["mode"] for one in differing) == ["lazy", "naive"]
    for version in (before, before + 1):
        answer = policy(server, {"mode": "lazy"}, if_match=version)
        assert answer.status_code == 412
        message = answer.json()["error"]["message"]
        assert f"engine 0 at {versions[0]}, engine 1 at {versions[1]}" in message
    assert policy(server, {"mode": "lazy"}).json()["version"] == before + 2
    after = server.get("/admin/policy", headers=ADMIN).json()
    assert (after["version"], "engines" in after) == (before + 2, False)
    assert server.state()["relocation_disabled"] is None
    assert policy(server, {"theta_f": 0.2}, if_match=before + 2).status_code == 200
