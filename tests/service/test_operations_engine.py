"""A real server with the tiny model as operators see it: ids, log, traces, limits, leaks, drain.

One server serves all tests; they run in order, and the last one stops it.
"""

from __future__ import annotations

import asyncio
import json
import re
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import psutil
import pytest

from service.refusals import REASONS
from tests.service.otlp import Receiver, attributes
from tests.service.server_process import are_gone, wait_for
from tests.service.tiny_server import TinyServer, body, events, words

pytestmark = pytest.mark.engine

MAX_PROMPT, MAX_OUTPUT, MAX_BODY, MAX_PER_KEY = 400, 1200, 20_000, 20
NUM_STREAMS = 200
PARENT = "0af7651916cd43dd8448eb211c80319c"


@pytest.fixture(scope="module")
def receiver() -> Iterator[Receiver]:
    with Receiver() as receiver:
        yield receiver


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, receiver: Receiver) -> Iterator[TinyServer]:
    server = TinyServer(
        tmp_path_factory.mktemp("operations"),
        VTOKEN_LOG_FORMAT="json",
        VTOKEN_MAX_PROMPT_TOKENS=str(MAX_PROMPT),
        VTOKEN_MAX_OUTPUT_TOKENS=str(MAX_OUTPUT),
        VTOKEN_MAX_BODY_BYTES=str(MAX_BODY),
        VTOKEN_MAX_REQUESTS_PER_KEY=str(MAX_PER_KEY),
        **receiver.environment,
    )
    try:
        with ThreadPoolExecutor(1) as pool:
            seen = pool.submit(watch_the_start, server)
            server.wait_until_ready()
            server.start_states = seen.result(300)  # type: ignore[attr-defined]
        yield server
    finally:
        server.kill_all()


def watch_the_start(server: TinyServer) -> list[tuple[dict[str, Any], int, int, Any]]:
    """Startup state, liveness and the answer to a request, at each phase until it serves."""
    port = wait_for(lambda: port_of(server.process.pid))
    url, seen = f"http://127.0.0.1:{port}", []
    with httpx.Client(base_url=url, timeout=300) as client:
        while True:
            answer = client.get("/health/startup")
            if answer.status_code == 200:
                return seen
            state = answer.json()
            if not seen or seen[-1][0]["phase"] != state["phase"]:
                live = client.get("/health/live")
                work = client.post("/v1/completions", json=body("w5", 1))
                seen.append((state, answer.status_code, live.status_code, work))
            time.sleep(0.05)


def port_of(pid: int) -> int | None:
    """Where the process listens."""
    listening = psutil.Process(pid).net_connections("tcp4")
    return next((c.laddr.port for c in listening if c.status == psutil.CONN_LISTEN), None)


def test_startup_is_answered_while_the_model_loads(server: TinyServer) -> None:
    """503 with phase and percent, alive, no refused connection, and no 503 any more once ready."""
    states = server.start_states  # type: ignore[attr-defined]
    assert states[0][0]["phase"] == "starting_server"
    assert "starting_engine" in [state["phase"] for state, *_ in states]
    percents = [state["percent"] for state, *_ in states]
    assert percents == sorted(percents)
    for _, startup, live, work in states:
        if startup == 503 and work.status_code == 503:  # the last one may see the handover
            assert live == 200
            assert work.headers["Retry-After"] == "5"
            assert "the model is loading" in work.json()["error"]["message"]
    assert server.get("/health/startup").json()["phase"] == "serving"
    assert server.get("/health/live").status_code == server.get("/health").status_code == 200


def test_request_id_goes_in_and_out(server: TinyServer) -> None:
    """Kept if it is plain, else made; on answers, streams, errors and unknown paths."""
    answer = server.complete(words(5), 3, headers={"X-Request-Id": "order-66:a"})
    assert answer.headers["X-Request-Id"] == "order-66:a"
    assert answer.json()["id"] == "cmpl-order-66:a"
    for bad in ("x" * 129, 'a"b', "ä"):
        headers = {"X-Request-Id": bad.encode()}
        found = server.post(json={"model": "none", "prompt": "w5"}, headers=headers)
        assert found.status_code == 404
        assert re.fullmatch(r"[0-9a-f]{32}", found.headers["X-Request-Id"])
    stream = server.post(json=body(words(5), 3, stream=True), headers={"X-Request-Id": "s-1"})
    assert stream.headers["X-Request-Id"] == "s-1"
    assert all(event["id"] == "cmpl-s-1" for event in events(stream))
    assert server.get("/none", headers={"X-Request-Id": "n"}).headers["X-Request-Id"] == "n"


def test_every_log_line_is_json_and_none_has_a_prompt(server: TinyServer) -> None:
    """Ours, vLLM's and uvicorn's, of all three processes; one line for the request."""
    server.complete(words(7, 500), 20, headers={"X-Request-Id": "log-1"})
    line = server.access("log-1")
    assert {n: line[n] for n in ("method", "path", "status", "prompt_tokens", "output_tokens")} == {
        "method": "POST",
        "path": "/v1/completions",
        "status": 200,
        "prompt_tokens": 7,
        "output_tokens": 20,
    }
    assert 0 < line["duration_seconds"] < 120
    lines = server.lines()
    assert {"APIServer", "EngineCore", "Worker"} <= {one["process"] for one in lines}
    loggers = {one["logger"].split(".")[0] for one in lines}
    assert {"vllm", "service", "uvicorn"} <= loggers
    assert not [one for one in lines if "w503" in one["message"]]
    assert [one["path"] for one in lines if one.get("path", "").startswith("/health")] == []


def test_trace_joins_caller_server_and_engine(server: TinyServer, receiver: Receiver) -> None:
    """Our span under the caller's, vLLM's under ours, evictions as events, its id in the log."""
    headers = {"traceparent": f"00-{PARENT}-b7ad6b7169203331-01", "X-Request-Id": "trace-1"}
    answer = server.complete(words(200), 100, headers=headers)
    assert answer.status_code == 200
    name = "POST /v1/completions"
    spans = wait_for(lambda: len(s := receiver.trace(PARENT)) == 2 and s, 120)
    ours, theirs = spans[name], spans["llm_request"]
    assert ours.parent_span_id.hex() == "b7ad6b7169203331"
    assert theirs.parent_span_id == ours.span_id
    found = attributes(ours)
    assert found["vtoken.request_id"] == "trace-1"
    assert (found["gen_ai.usage.prompt_tokens"], found["gen_ai.usage.completion_tokens"]) == (
        200,
        100,
    )
    happened = {event.name: attributes(event) for event in ours.events}
    assert happened["vtoken.evictions"]["tokens"] >= 100
    assert happened["vtoken.evictions"]["policy"] == "streaming_llm"
    assert happened["vtoken.evictions"]["count"] >= 2
    assert server.access("trace-1")["trace_id"] == PARENT


def test_trace_has_the_numbers_of_evictions_relocations_and_stalls(
    server: TinyServer, receiver: Receiver
) -> None:
    """Of a request that runs alone: its receipt's, the metric's and those of the engine's list."""
    wait_for(server.is_quiet, 120)
    last = max([batch["ticket"] for batch in server.state()["relocations"]], default=0)
    trace_id = "1bf7651916cd43dd8448eb211c80319c"
    headers = {"traceparent": f"00-{trace_id}-b7ad6b7169203331-01"}
    xargs = {"vtoken_policy": "random", "vtoken_budget_tokens": 64, "vtoken_receipt": True}
    request = body(words(250, 100), 300, vllm_xargs=xargs)
    receipt = server.post(json=request, headers=headers).json()["vtoken"]
    span = wait_for(lambda: receiver.trace(trace_id).get("POST /v1/completions"), 120)
    happened = {event.name: attributes(event) for event in span.events}
    evictions, relocations = happened["vtoken.evictions"], happened["vtoken.relocations"]
    assert evictions["tokens"] == receipt["evicted_tokens"] > 0
    assert evictions["policy"] == receipt["policy"] == "random"
    assert relocations["freed_blocks"] == receipt["freed_blocks"] > 0
    wait_for(lambda: evicted_at_random(server) == evictions["tokens"], 120)
    batches = [batch for batch in server.state()["relocations"] if batch["ticket"] > last]
    assert relocations["count"] == len(batches) > 0
    assert [batch["error"] for batch in batches] == [None] * len(batches)
    stalls = happened["vtoken.stalls"]["seconds"]
    assert stalls == pytest.approx(sum(batch["stall_seconds"] for batch in batches))


def evicted_at_random(server: TinyServer) -> float:
    """What the metric has counted for this policy, which no other request here has."""
    series = server.metrics().get("vtoken_evicted_tokens_total", {}).items()
    return sum(value for labels, value in series if dict(labels)["policy"] == "random")


def test_receipt_is_the_clients_also_while_traced(server: TinyServer) -> None:
    """Who asks for a receipt gets it, without what is for the trace only."""
    xargs = {"vtoken_receipt": True}
    answer = server.post(json=body(words(200), 50, vllm_xargs=xargs)).json()
    assert answer["vtoken"]["evicted_tokens"] > 0
    assert "work" not in answer["vtoken"]


@pytest.mark.parametrize(
    ("status", "param", "prompt", "max_tokens"),
    [
        (400, "prompt", words(MAX_PROMPT + 1), 5),
        (400, "max_tokens", words(5), MAX_OUTPUT + 1),
        (413, None, "w5 " * MAX_BODY, 5),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_limits_of_one_request(
    server: TinyServer, status: int, param: str | None, prompt: str, max_tokens: int, stream: bool
) -> None:
    """OpenAI's error body with the field, for streams too, and before anything is streamed."""
    answer = server.post(json=body(prompt, max_tokens, stream=stream))
    assert answer.status_code == status
    error = answer.json()["error"]
    assert (error["code"], error["param"]) == (status, param)
    assert answer.headers["X-Request-Id"]


def test_answer_without_bound_ends_at_the_servers(server: TinyServer) -> None:
    """A request that names no max_tokens gets what the server allows."""
    chat = {"model": "tiny", "messages": [{"role": "user", "content": words(5)}]}
    answer = server.post("/v1/chat/completions", json={**chat, "ignore_eos": True}).json()
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == MAX_OUTPUT


def test_body_without_length_is_limited(server: TinyServer) -> None:
    """Chunks are counted as they come."""
    chunks = (b"x" * 1000 for _ in range(MAX_BODY // 1000 + 2))
    assert server.post(content=chunks).status_code == 413


class Streams:
    """Many streams of one key at once, read in one event loop."""

    def __init__(self, server: TinyServer, count: int, max_tokens: int, key: str = "k") -> None:
        self.server, self.count, self.max_tokens, self.key = server, count, max_tokens, key
        self.statuses: list[int] = []
        self.tokens: list[int] = []
        self.headers: list[httpx.Headers] = []

    def run(self) -> None:
        """Until all have ended."""
        asyncio.run(self._run())

    def start(self) -> threading.Thread:
        """In the background."""
        thread = threading.Thread(target=self.run, daemon=True)
        thread.start()
        return thread

    async def _run(self) -> None:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(timeout=300, limits=limits) as client:
            await asyncio.gather(*(self._one(client, number) for number in range(self.count)))

    async def _one(self, client: httpx.AsyncClient, number: int) -> None:
        options = {"include_usage": True}
        document = body(words(20, 7 * number), self.max_tokens, stream=True, stream_options=options)
        headers = {"Authorization": f"Bearer {self.key}-{number % 10}"}
        url = self.server.url + "/v1/completions"
        async with client.stream("POST", url, json=document, headers=headers) as answer:
            self.statuses.append(answer.status_code)
            self.headers.append(answer.headers)
            if answer.status_code != 200:
                return
            *events, done, _ = (await answer.aread()).split(b"\n\n")
            assert done == b"data: [DONE]"
            usage = json.loads(events[-1].removeprefix(b"data: "))["usage"]["completion_tokens"]
            self.tokens.append(usage)


def test_a_key_has_so_many_requests_at_once(server: TinyServer) -> None:
    """The others are a 429 with Retry-After; another key is not touched; then there is room."""
    before = refused_requests(server)
    streams = Streams(server, 10 * MAX_PER_KEY + 20, 30)
    streams.key = "same"
    streams.run()
    refused = [h for h, s in zip(streams.headers, streams.statuses, strict=True) if s == 429]
    assert all(headers["Retry-After"] == "1" for headers in refused)
    assert len(streams.tokens) + len(refused) == streams.count
    assert len(streams.tokens) >= 10 * MAX_PER_KEY
    assert set(streams.tokens) == {30}
    assert server.complete(words(5), 2).status_code == 200
    counted = refused_requests(server)
    more = {reason: counted[reason] - before[reason] for reason in counted}
    assert more == {**dict.fromkeys(REASONS, 0), "max_requests_per_key": len(refused)}


def refused_requests(server: TinyServer) -> dict[str, int]:
    """What /metrics says, by reason."""
    found = re.findall(
        r'^vtoken_refused_requests_total\{.*reason="(\w+)".*\} (\S+)$',
        server.get("/metrics").text,
        re.MULTILINE,
    )
    return {reason: int(float(count)) for reason, count in found}


def test_two_hundred_streams_leak_nothing(server: TinyServer) -> None:
    """After a first round: all blocks free, as many open files, and memory grows by noise."""
    processes = [psutil.Process(server.process.pid), *server.descendants()]

    def round_of_streams() -> tuple[int, float]:
        streams = Streams(server, NUM_STREAMS, 40)
        streams.run()
        assert streams.tokens == [40] * NUM_STREAMS
        wait_for(server.is_quiet, 120)
        files = sum(process.num_fds() for process in processes)
        return files, sum(process.memory_info().rss for process in processes) / 2**20

    wait_for(server.is_quiet, 120)
    round_of_streams()
    files, memory = round_of_streams()
    wait_for(lambda: open_connections(server) <= 1, 120)
    files = sum(process.num_fds() for process in processes)
    _, memory_after = round_of_streams()
    wait_for(lambda: open_connections(server) <= 1, 120)
    files_after = sum(process.num_fds() for process in processes)
    print(f"files {files} -> {files_after}, MiB {memory:.0f} -> {memory_after:.0f}")
    assert files_after <= files + 2
    assert memory_after - memory < 64


def open_connections(server: TinyServer) -> int:
    """Clients' connections that the server holds."""
    held = psutil.Process(server.process.pid).net_connections("tcp4")
    return sum(c.status == psutil.CONN_ESTABLISHED for c in held if c.raddr)


def test_drain_finishes_what_was_accepted(server: TinyServer) -> None:
    """SIGTERM: not ready, 503 with Retry-After for new requests, 20 streams end whole, code 0, and
    no process is left.

    The worker stands still from before they come until all that is seen, so none ends too early.
    """
    wait_for(server.is_quiet, 120)
    streams, worker = Streams(server, 20, 100), server.worker()
    processes = server.descendants()
    worker.send_signal(signal.SIGSTOP)
    try:
        thread = streams.start()
        wait_for(lambda: streams.statuses == [200] * 20, 120)
        server.terminate()
        wait_for(lambda: server.ready()[1] >= {"draining"}, 120)
        refused = server.complete(words(5), 2)
        assert server.get("/health/live").status_code == 200
        assert thread.is_alive()
    finally:
        worker.send_signal(signal.SIGCONT)
    assert refused.status_code == 503
    assert int(refused.headers["Retry-After"]) >= 1
    assert refused.headers["X-Request-Id"]
    assert "stopping" in refused.json()["error"]["message"]
    thread.join(timeout=120)
    assert streams.tokens == [100] * 20
    assert server.process.wait(timeout=300) == 0
    wait_for(lambda: are_gone(processes), 120)
