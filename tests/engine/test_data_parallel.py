"""Two engines behind one server of two API processes: a policy for both, the numbers of each.

Tests run in order, and the last one kills an API process.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.service.doors import NAMES, OPEN, Doors, scrape
from tests.service.faults import inject
from tests.service.server_process import are_gone, total, wait_for
from tests.service.tiny_server import ADMIN_KEY, LASTING_TOKENS, TinyServer, body, events, words

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

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
        *("--api-server-count", "2"),
        VTOKEN_METRICS_POLL_SECONDS="0.2",
        **OPEN,
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
    return httpx.patch(server.url + "/admin/policy", json=changes, headers=headers, timeout=300)


def series(server: TinyServer, name: str, label: str | None = None) -> dict[str, str | float]:
    """Value, or ``label``, of a metric per engine."""
    found = [(dict(labels), value) for labels, value in server.metrics().get(name, {}).items()]
    return {labels["engine"]: labels[label] if label else value for labels, value in found}


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
        120,
    )
    assert set(evicted) == set(series(server, "vllm:num_requests_running")) == {"0", "1"}


def test_a_change_of_policy_reaches_both_engines(server: TinyServer) -> None:
    """One version; each engine reports that it is in force."""
    answer = policy(server, {"policy": "h2o", "budget_tokens": 80})
    assert answer.status_code == 200, answer.text
    version = str(answer.json()["version"])
    both = {"0": version, "1": version}
    wait_for(lambda: series(server, "vtoken_policy_info", "version") == both, 120)
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
    wait_for(lambda: server.complete(words(100), 20) and server.state()["relocation_disabled"], 120)
    wait_for(server.is_quiet, 120)
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
    histories = server.get("/admin/policy/history", headers=ADMIN).json()["engines"]
    actions = [{change["action"] for change in one["history"]} for one in histories]
    assert sorted("safety" in found for found in actions) == [False, True]
    assert policy(server, {"theta_f": 0.2}, if_match=before + 2).status_code == 200


def test_both_processes_stand_before_both_engines(server: TinyServer) -> None:
    """A change through one is in force for the other, on each engine; metrics are the same."""
    with Doors(server) as doors:
        first, second = doors
        start = second.get("/admin/policy", headers=ADMIN).json()
        changed = first.patch("/admin/policy", json={"sink_tokens": 40}, headers=ADMIN)
        version = changed.raise_for_status().json()["version"]
        assert second.get("/admin/policy", headers=ADMIN).json()["version"] == version
        too_small = body(words(20), 2, vllm_xargs={"vtoken_budget_tokens": 48})
        for door in doors:
            assert door.post("/v1/completions", json=too_small).status_code == 400
            wait_for(
                lambda door=door: versions(door) == {"0": str(version), "1": str(version)}, 120
            )
        back = second.post("/admin/policy/rollback", headers=ADMIN).raise_for_status().json()
        assert back["document"] == start["document"]
        assert first.get("/admin/policy", headers=ADMIN).json()["version"] == back["version"]
        for door in doors:
            state = door.get("/admin/state", headers=ADMIN).json()
            assert len(state["engines"]) == 2
            samples = scrape(door)
            for engine, part in enumerate(state["engines"]):
                blocks = total(samples, "vtoken_total_blocks", engine=str(engine))
                assert blocks == part["pool"]["total_blocks"]


def test_of_changes_at_once_that_expect_one_version_one_is_made(server: TinyServer) -> None:
    """Two connections to each process: the other three get 412, and engines agree."""
    with (spread := Doors(server, each=2)) as (first, _):
        doors = [client for clients in spread.of.values() for client in clients[:2]]
        version = first.get("/admin/policy", headers=ADMIN).json()["version"]
        headers = {**ADMIN, "If-Match": f'"{version}"'}

        def change(number: int) -> httpx.Response:
            document = {"theta_f": 0.3 + number / 100}
            return doors[number].patch("/admin/policy", json=document, headers=headers)

        with ThreadPoolExecutor(len(doors)) as pool:
            answers = list(pool.map(change, range(len(doors))))
        assert sorted(answer.status_code for answer in answers) == [200, 412, 412, 412]
        (made,) = (answer.json() for answer in answers if answer.status_code == 200)
        after = first.get("/admin/policy", headers=ADMIN).json()
        assert (after["version"], "engines" in after) == (version + 1, False)
        assert after["document"] == made["document"]


def versions(door: httpx.Client) -> dict[str, str]:
    """Of each engine's policy document, on ``/metrics``."""
    shown = map(dict, scrape(door)["vtoken_policy_info"])
    return {labels["engine"]: labels["version"] for labels in shown}


class Reading:
    """A stream that is read in the background until its end, or until it is enough."""

    def __init__(self, client: httpx.Client, max_tokens: int) -> None:
        self.num_events = self.usage = 0
        self.is_enough = False
        self.error: Exception | None = None
        self._client, self._max_tokens = client, max_tokens
        self.begun = threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        options = {"include_usage": True}
        document = body(words(60), self._max_tokens, stream=True, stream_options=options)
        try:
            with self._client.stream("POST", "/v1/completions", json=document) as answer:
                self.begun.set()
                for event in events(answer):
                    self.num_events += 1
                    self.usage = (event.get("usage") or {}).get("completion_tokens", 0)
                    if self.is_enough:
                        return
        except httpx.HTTPError as error:
            self.error = error

    def join(self) -> None:
        """Until nobody reads any more."""
        self._thread.join(timeout=120)
        assert not self._thread.is_alive()


def test_killed_process_costs_its_own_streams_only(server: TinyServer) -> None:
    """SIGKILL to one API process. What it had open runs on unread and leaves no block and no table;
    the other's streams end whole; new requests are refused, and the server leaves with code 1.

    Workers stand still until the kill is seen, so that no stream ends before.
    """
    wait_for(server.is_quiet, 120)
    processes, workers, spread = server.descendants(), server.workers(), Doors(server, each=3)
    (victim,) = server.named(NAMES[1])
    with spread as (survivor, _):
        before = total(scrape(survivor), "vtoken_refused_requests_total", reason="draining")
        for worker in workers:
            worker.send_signal(signal.SIGSTOP)
        try:
            kept = spread.of[NAMES[0]][1:3]
            whole, lasting = Reading(kept[0], 60), Reading(kept[1], LASTING_TOKENS)
            lost = [Reading(client, 200) for client in spread.of[NAMES[1]][1:3]]
            for reading in (whole, lasting, *lost):
                assert reading.begun.wait(300)
            victim.kill()
            for reading in lost:
                reading.join()
                assert isinstance(reading.error, httpx.TransportError)
            died = f"{NAMES[1].replace('APIServer', 'ApiServer')} died with exit code -9"
            wait_for(lambda: f"{died}; the server stops" in server.text(), 120)
            wait_for(lambda: survivor.get("/health/ready").status_code == 503, 120)
            assert survivor.post("/v1/completions", json=body("w5", 1)).status_code == 503
        finally:
            for worker in workers:
                worker.send_signal(signal.SIGCONT)
        samples = scrape(survivor)
        assert total(samples, "vtoken_not_ready", reason="draining") == 1
        refused = total(samples, "vtoken_refused_requests_total", reason="draining")
        assert refused == before + 1
        whole.join()
        assert (whole.error, whole.usage) == (None, 60)

        def only_lasting_is_left() -> bool:
            state = survivor.get("/admin/state", headers=ADMIN).raise_for_status().json()
            held = [one["retained_blocks"] for one in state["requests"]]
            pool = state["pool"]
            return len(held) == 1 and pool["free_blocks"] + held[0] == pool["total_blocks"]

        wait_for(only_lasting_is_left, 120)
        num_events = lasting.num_events
        wait_for(lambda: lasting.num_events > num_events, 120)
        lasting.is_enough = True
        lasting.join()
        assert lasting.error is None
    assert server.process.wait(timeout=300) == 1
    wait_for(lambda: are_gone(processes), 120)
