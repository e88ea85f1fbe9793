"""A real server whose engine is hurt on purpose: what readiness says, and what is refused.

One server with a tight pool serves all tests; they run in order, and the last one cuts it off.
"""

from __future__ import annotations

import http.client
import json
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.service.faults import inject
from tests.service.server_process import are_gone, wait_for
from tests.service.tiny_server import LASTING_TOKENS, TinyServer, body, events, words

pytestmark = pytest.mark.engine

RED_SECONDS = 10
SLACK_SECONDS = 50
"""On a busy machine: the probe itself and the test's clock have to get their turn."""
QUEUE_SECONDS = 1.0
NUM_ANSWERS = 20
"""Of the server, one after the other: a message between two of its processes takes less."""

FAULT = """
copy = module.KVPool.copy
def faulty(self, *args):
    if os.path.exists({flag!r}):
        raise MemoryError("injected fault")
    return copy(self, *args)
module.KVPool.copy = faulty
"""
"""In ``vtoken.kv_pool``, which only the worker has: each copy fails as long as a file is there."""


@pytest.fixture(scope="module")
def flag(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """While it exists, copies fail."""
    return tmp_path_factory.mktemp("fault") / "copies-fail"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, flag: Path) -> Iterator[TinyServer]:
    server = TinyServer(
        tmp_path_factory.mktemp("wedged"),
        *("--max-num-seqs", "4"),
        *("--vtoken-policy", "random"),
        *("--vtoken-budget-tokens", "64"),
        *("--vtoken-theta-f", "0.02"),
        **inject(flag.parent, "vtoken.kv_pool", FAULT.format(flag=str(flag))),
        VTOKEN_LOG_FORMAT="json",
        VTOKEN_MAX_QUEUE_SECONDS=str(QUEUE_SECONDS),
        VTOKEN_DRAIN_SECONDS="3600",
    )
    try:
        server.wait_until_ready()
        yield server
    finally:
        server.kill_all()


class Asking:
    """A stream in the background that ends when it ends."""

    def __init__(self, server: TinyServer, max_tokens: int) -> None:
        self.num_events = 0
        self.last: dict[str, Any] = {}
        self.status = self.usage = 0
        self.headers = httpx.Headers()
        self.is_enough = False
        self.error: Exception | None = None
        self._server, self._max_tokens = server, max_tokens
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        options = {"include_usage": True}
        document = body(words(20), self._max_tokens, stream=True, stream_options=options)
        try:
            url = self._server.url + "/v1/completions"
            with httpx.stream("POST", url, json=document, timeout=300) as answer:
                self.status, self.headers = answer.status_code, answer.headers
                for event in events(answer) if self.status == 200 else ():
                    self.num_events += 1
                    self.last = event
                    self.usage = (event.get("usage") or {}).get("completion_tokens", 0)
                    if self.is_enough:
                        return
        except (httpx.HTTPError, AssertionError) as error:
            self.error = error

    def join(self) -> None:
        """Until it has ended."""
        self._thread.join(timeout=300)
        assert not self._thread.is_alive()


def red_within_bound(server: TinyServer) -> set[str]:
    """The reasons, once readiness is red; checks that this did not take too long."""
    started = time.monotonic()
    reasons = wait_for(
        lambda: (r := server.ready())[0] == 503 and r[1], RED_SECONDS + SLACK_SECONDS
    )
    print(f"red after {time.monotonic() - started:.1f} s: {reasons}")
    return reasons


@pytest.mark.parametrize("name", ["worker", "core"])
def test_stopped_process_turns_readiness_red_and_back(server: TinyServer, name: str) -> None:
    """Neither hangs up nor dies: only its silence tells. The stream goes on when it does."""
    asking = Asking(server, LASTING_TOKENS)
    wait_for(lambda: asking.num_events)
    victim = server.worker() if name == "worker" else server.worker().parent()
    assert victim is not None
    victim.send_signal(signal.SIGSTOP)
    try:
        assert red_within_bound(server) == {"engine_unresponsive"}
        assert server.get("/health/live").status_code == 200
    finally:
        victim.send_signal(signal.SIGCONT)
    wait_for(lambda: server.ready()[0] == 200, 120)
    num_events = asking.num_events
    wait_for(lambda: asking.num_events > num_events, 120)
    asking.is_enough = True
    asking.join()
    assert asking.error is None


@pytest.mark.parametrize("stream", [False, True])
def test_client_that_goes_frees_its_blocks_within_two_steps(
    server: TinyServer, stream: bool
) -> None:
    """Counted from the tokens that the server had of the engine when it noticed, as the log says.

    The worker stands still while the client goes: no step is made that is not to be counted.
    """
    wait_for(server.is_quiet, 120)
    before = server.state()["engine"]["steps"]
    worker, request_id = server.worker(), f"gone-{stream}"
    document = json.dumps(body(words(150), LASTING_TOKENS, stream=stream))
    headers = {"X-Request-Id": request_id, "Content-Type": "application/json"}
    client = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=300)
    try:
        if stream:
            client.request("POST", "/v1/completions", document, headers)
            with client.getresponse() as answer:
                answer.readline()
                worker.send_signal(signal.SIGSTOP)
                wait_until_arrived(server)
        else:
            worker.send_signal(signal.SIGSTOP)
            client.request("POST", "/v1/completions", document, headers)
            wait_until_arrived(server)
        client.close()
        line = server.access(request_id)
        wait_until_arrived(server)
    finally:
        worker.send_signal(signal.SIGCONT)
    assert line["outcome"] == "disconnected"
    wait_for(server.is_quiet, 120)
    steps = server.state()["engine"]["steps"] - before - line.get("output_tokens", 0)
    assert 0 < steps <= 2


def wait_until_arrived(server: TinyServer) -> None:
    """What was on its way to the engine, and from it to the server, while no step is made.

    The server's processes have had their turns, however slow the machine is: it has answered so
    often, and had no token more in the end than at the beginning.
    """
    counts: list[float] = []

    def is_over() -> bool:
        counts.append(server.total("vllm:generation_tokens_total"))
        return len(counts) > NUM_ANSWERS and counts[-1] == counts[-1 - NUM_ANSWERS]

    wait_for(is_over, 120)


def test_failing_copies_turn_readiness_red_and_answers_go_on(
    server: TinyServer, flag: Path
) -> None:
    """Red with its reason while copies fail, although every answer is whole."""
    flag.touch()
    try:
        statuses = [server.complete(words(100, 30 * n), 150).status_code for n in range(3)]
        assert statuses == [200] * 3
        assert red_within_bound(server) == {"copies_failing"}
    finally:
        flag.unlink()


def test_queue_that_is_too_long_is_refused_and_the_accepted_finish(server: TinyServer) -> None:
    """Four run, some wait: 429 with Retry-After appears; who got in gets a whole answer."""
    asking: list[Asking] = []

    def refused() -> list[Asking]:
        asking.append(Asking(server, 400))
        time.sleep(0.05)
        return [one for one in asking if one.status == 429]

    wait_for(refused, 120)
    for one in asking:
        one.join()
    served = [one for one in asking if one.status == 200]
    assert [one.error for one in served] == [None] * len(served)
    assert [one.usage for one in served] == [400] * len(served)
    assert len(served) >= 4
    for one in (one for one in asking if one.status == 429):
        assert int(one.headers["Retry-After"]) >= 1
        assert len(one.headers["X-Request-Id"]) == 32
    wait_for(lambda: server.complete(words(5), 2).status_code == 200, 120)


def test_second_signal_ends_it_at_once(server: TinyServer) -> None:
    """An hour to drain and a stream to wait for: 143, the stream is told, no process is left."""
    processes = server.descendants()
    asking = Asking(server, LASTING_TOKENS)
    wait_for(lambda: asking.num_events)
    server.terminate()
    wait_for(lambda: "draining" in server.ready()[1], 120)
    server.terminate()
    assert server.process.wait(timeout=300) == 128 + signal.SIGTERM
    asking.join()
    assert asking.error is None
    assert asking.last["error"]["code"] == 503
    wait_for(lambda: are_gone(processes), 120)
