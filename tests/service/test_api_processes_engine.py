"""A real server with two API processes (``--api-server-count 2``) is one server to all who look.

One server serves all tests; they run in order, and the last one stops it.
"""

from __future__ import annotations

import itertools
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import pytest

from service.metrics import PREFIX, SERVICE_METRICS
from tests.service.doors import NAMES, OPEN, Doors, scrape
from tests.service.server_process import Samples, are_gone, total, wait_for
from tests.service.tiny_server import ADMIN_KEY, TinyServer, body, events, words
from vtoken.stats import METRICS

pytestmark = pytest.mark.engine

MAX_PER_KEY = 4
LONG = 30_000
ADMIN = {"Authorization": f"Bearer {ADMIN_KEY}"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinyServer]:
    server = TinyServer(
        tmp_path_factory.mktemp("processes"),
        *("--api-server-count", "2"),
        VTOKEN_MAX_REQUESTS_PER_KEY=str(MAX_PER_KEY),
        VTOKEN_METRICS_POLL_SECONDS="0.1",
        **OPEN,
    )
    try:
        server.wait_until_ready()
        yield server
    finally:
        server.kill_all()


def sent(samples: Samples) -> dict[str, float]:
    """What clients have asked for so far."""
    return {
        "requests": total(samples, "vllm:request_success_total"),
        "prompt": total(samples, "vllm:prompt_tokens_total"),
        "generated": total(samples, "vllm:generation_tokens_total"),
        "http": total(samples, "http_requests_total", handler="/v1/completions", status="2xx"),
        "evicted": total(samples, "vtoken_evicted_tokens_total"),
    }


def settled(doors: list[httpx.Client]) -> dict[str, float]:
    """What all say, once they go on saying it: a request may be counted after its answer."""
    readings: list[dict[str, float]] = []

    def are_the_same() -> bool:
        readings.extend(sent(scrape(door)) for door in doors)
        return len(readings) > 9 and readings[-10:] == [readings[-1]] * 10

    wait_for(are_the_same, 120)
    return readings[-1]


def test_two_processes_serve_behind_one_ready_line(server: TinyServer) -> None:
    """Both answer requests and every probe, over one socket, and stand before one engine."""
    with Doors(server) as doors:
        for door in doors:
            for probe in ("startup", "live", "ready"):
                assert door.get(f"/health/{probe}").status_code == 200
            assert door.get("/health").status_code == 200
    assert server.text().count("vtoken-serve ready on") == 1
    assert len(server.named("APIServer")) == 2
    assert len(server.named("EngineCore")) == 1


def test_metrics_are_of_the_whole_server_whoever_answers(server: TinyServer) -> None:
    """Requests and tokens as sent, eviction as the engine's receipts say, each series once."""
    with Doors(server) as doors:
        before = settled(doors)
        evicted = 0
        for number, door in enumerate([doors[0], doors[0], doors[1], doors[0], doors[1]]):
            document = body(words(150, number), 20, vllm_xargs={"vtoken_receipt": True})
            answer = door.post("/v1/completions", json=document).raise_for_status().json()
            evicted += answer["vtoken"]["evicted_tokens"]
        assert evicted > 0
        added = {"requests": 5, "prompt": 750, "generated": 100, "http": 5, "evicted": evicted}
        expected = {name: before[name] + more for name, more in added.items()}
        for door in doors:
            wait_for(lambda door=door: sent(scrape(door)) == expected, 120)
        for _ in range(10):
            assert [sent(scrape(door)) for door in doors] == [expected, expected]
        samples = scrape(doors[1])
        for spec in [*METRICS.values(), *SERVICE_METRICS]:
            suffix = "_count" if spec.kind == "histogram" else ""
            assert PREFIX + spec.name + suffix in samples
        assert total(samples, "vtoken_poll_failures_total") == 0
        state = server.state()
        pool = {name: total(samples, PREFIX + name) for name in ("total_blocks", "headroom_blocks")}
        assert pool.items() <= state["pool"].items()


def test_counters_never_fall_from_one_process_to_the_other(server: TinyServer) -> None:
    """Prometheus would take that for a restart; scraped in turns, under load."""
    with Doors(server, each=2) as doors, ExitStack() as stack:
        streams = []  # one that is collected hangs up
        for number in range(2):
            document = body(words(50, number), LONG, stream=True)
            stream = httpx.stream(
                "POST", server.url + "/v1/completions", json=document, timeout=300
            )
            streams.append(stack.enter_context(stream).iter_lines())
            next(streams[-1])
        scrapes = [scrape(door) for door in doors]

        def has_grown() -> bool:
            scrapes.extend(scrape(door) for door in doors)
            return len({total(one, "vtoken_evicted_tokens_total") for one in scrapes}) > 5

        wait_for(has_grown, 120)
    for earlier, later in itertools.pairwise(scrapes):
        for name, series in earlier.items():
            if name.endswith(("_total", "_count", "_bucket", "_sum")):
                fallen = {k: (v, later[name][k]) for k, v in series.items() if later[name][k] < v}
                assert not fallen, f"{name} {fallen}"
    wait_for(server.is_quiet, 120)


def test_policy_is_one_whoever_changes_it(server: TinyServer) -> None:
    """Version, history, preview, rollback, and the bounds of the next request."""
    with Doors(server) as doors:
        first, second = doors

        def ask(door: httpx.Client, method: str, path: str = "", **options: Any) -> Any:
            return door.request(method, f"/admin/policy{path}", headers=ADMIN, **options)

        start = ask(second, "GET").json()
        changed = ask(first, "PATCH", json={"sink_tokens": 40}).raise_for_status().json()
        assert ask(second, "GET").json()["version"] == changed["version"] == start["version"] + 1
        too_small = body(words(20), 2, vllm_xargs={"vtoken_budget_tokens": 48})
        for door in doors:
            assert door.post("/v1/completions", json=too_small).status_code == 400
        preview = ask(second, "PATCH", params={"dry_run": "true"}, json={"sink_tokens": 8})
        assert preview.json()["dry_run"]
        history = [ask(door, "GET", "/history").json() for door in doors]
        assert history[0] == history[1]
        back = ask(second, "POST", "/rollback").raise_for_status().json()
        assert back["document"] == start["document"]
        assert ask(first, "GET").json()["version"] == back["version"]
        assert first.post("/v1/completions", json=too_small).status_code == 200
        for door in doors:
            wait_for(lambda door=door: versions_shown(door) == [str(back["version"])], 120)


def versions_shown(door: httpx.Client) -> list[str]:
    """Of the policy document, on ``/metrics``."""
    return [dict(series)["version"] for series in scrape(door)["vtoken_policy_info"]]


def test_a_key_is_limited_over_both_processes(server: TinyServer) -> None:
    """Its streams are spread over them; one more is refused by either, and counted once."""
    own = {"Authorization": "Bearer crowded"}
    spread = Doors(server, each=3)
    with spread as doors, ExitStack() as stack:
        before = total(scrape(doors[0]), "vtoken_refused_requests_total")
        for name in NAMES:
            for client in spread.of[name][1:3]:
                document = body(words(20), LONG, stream=True)
                stream = client.stream("POST", "/v1/completions", json=document, headers=own)
                answer = stack.enter_context(stream)
                assert answer.status_code == 200
        assert MAX_PER_KEY == 4
        for door in doors:
            refused = door.post("/v1/completions", json=body("w5", 1), headers=own)
            assert (refused.status_code, refused.headers["Retry-After"]) == (429, "1")
            other = {"Authorization": "Bearer other"}
            assert door.post("/v1/completions", json=body("w5", 1), headers=other).is_success
        for door in doors:
            samples = scrape(door)
            name = "vtoken_refused_requests_total"
            assert total(samples, name) == before + 2
            assert total(samples, name, reason="max_requests_per_key") == before + 2
    again = {"json": body("w5", 1), "headers": own}
    wait_for(lambda: server.post(**again).status_code == 200, 120)


def test_stop_loses_no_stream_and_leaves_no_process(server: TinyServer) -> None:
    """SIGTERM to the supervisor: both processes refuse new work and finish theirs; code 0.

    The worker stands still until all that is seen, so that no stream ends too early.
    """
    wait_for(server.is_quiet, 120)
    processes, worker = server.descendants(), server.worker()
    spread, ended = Doors(server, each=3), []

    def read(client: httpx.Client, number: int) -> None:
        options = {"include_usage": True}
        document = body(words(20, number), 60, stream=True, stream_options=options)
        with client.stream("POST", "/v1/completions", json=document) as answer:
            begun.release()
            ended.append([one["usage"] for one in events(answer) if one.get("usage")])

    with spread as doors:
        clients = [client for name in NAMES for client in spread.of[name][1:3]]
        begun = threading.Semaphore(0)
        worker.send_signal(signal.SIGSTOP)
        try:
            threads = [
                threading.Thread(target=read, args=(client, number), daemon=True)
                for number, client in enumerate(clients)
            ]
            for thread in threads:
                thread.start()
            for _ in threads:
                assert begun.acquire(timeout=300)
            server.terminate()
            for door in doors:
                wait_for(lambda door=door: door.get("/health/ready").status_code == 503, 120)
                assert "draining" in door.get("/health/ready").text
                assert door.get("/health/live").status_code == 200
                refused = door.post("/v1/completions", json=body("w5", 1))
                assert (refused.status_code, refused.headers["Retry-After"]) == (503, "5")
        finally:
            worker.send_signal(signal.SIGCONT)
        for thread in threads:
            thread.join(timeout=120)
    assert [usage["completion_tokens"] for [usage] in ended] == [60] * len(clients)
    assert server.process.wait(timeout=300) == 0
    wait_for(lambda: are_gone(processes), 120)
