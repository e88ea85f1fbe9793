"""Limits: what is refused, with which answer, and what is left alone; the estimate of the queue."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from service.admission import WINDOW_SECONDS, QueueEstimate
from service.limits import LimitRules, Limits
from service.operations import Operations
from service.pulse import Pulse


class House:
    """An application behind the limits whose requests stay open until they are let go."""

    def __init__(self, **rules: Any) -> None:
        self.bodies: list[bytes] = []
        self.may_end = asyncio.Event()
        self.may_end.set()
        self.app = Starlette(
            routes=[Route("/{path:path}", self._answer, methods=["GET", "POST"])],
            middleware=[Middleware(Limits, rules=LimitRules(**rules))],
        )
        self.operations = Operations()
        self.app.state.vtoken = SimpleNamespace(operations=self.operations)

    @property
    def refused(self) -> dict[str, int]:
        """What was counted, without the zeros."""
        return {name: count for name, count in self.operations.refusals.totals().items() if count}

    async def _answer(self, request: Request) -> Response:
        self.bodies.append(await request.body())
        await self.may_end.wait()
        return JSONResponse("served")

    async def post(self, path: str = "/v1/completions", **options: Any) -> httpx.Response:
        """POST."""
        transport = httpx.ASGITransport(self.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.post(path, **options)


def test_body_within_the_limit_arrives_whole() -> None:
    """Byte by byte what was sent, in one piece or in several."""

    async def chunks() -> Any:
        for part in (b"ab", b"cd", b"ef"):
            yield part

    async def run() -> House:
        house = House(max_body_bytes=6)
        assert (await house.post(content=b"abcdef")).status_code == 200
        assert (await house.post(content=chunks())).status_code == 200
        return house

    assert asyncio.run(run()).bodies == [b"abcdef", b"abcdef"]


@pytest.mark.parametrize("declared", [True, False])
def test_longer_body_is_413_and_never_arrives(declared: bool) -> None:
    """By its declared length, or as soon as it is too long."""

    async def endless() -> Any:
        while True:
            yield b"x" * 4

    async def run() -> None:
        house = House(max_body_bytes=6)
        answer = await house.post(content=b"abcdefg" if declared else endless())
        assert answer.status_code == 413
        assert answer.json()["error"]["message"] == "the body may have at most 6 bytes"
        assert house.bodies == []
        assert house.refused == {"max_body_bytes": 1}

    asyncio.run(run())


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens", "max_output_tokens"])
@pytest.mark.parametrize(
    ("value", "status"),
    [
        *((value, 200) for value in (10, 10.0, "10", None, "x", True, "nan", [11])),
        *((value, 400) for value in (11, 11.0, "11", " 1_1 ", 1e300, 10**400, "9" * 5000)),
    ],
)
def test_output_bound(name: str, value: object, status: int) -> None:
    """The field is named; what is not a number is vLLM's to refuse."""

    async def run() -> None:
        house = House(max_output_tokens=10)
        answer = await house.post(json={name: value})
        assert answer.status_code == status
        assert house.refused == ({"max_output_tokens": 1} if status == 400 else {})
        if status == 400:
            assert answer.json()["error"]["param"] == name
            assert len(answer.content) < 2000

    asyncio.run(run())


def test_output_bound_of_sampling_parameters_and_forms() -> None:
    """Where ``/inference/v1/generate`` and the audio routes have it; vLLM's default stays."""

    async def run() -> None:
        house = House(max_output_tokens=10)
        for value, status in ((10, 200), (11, 400), (None, 200)):
            body = {"token_ids": [1], "sampling_params": {"max_tokens": value}}
            answer = await house.post("/inference/v1/generate", json=body)
            assert answer.status_code == status
            given = {} if value is None else {"max_completion_tokens": str(value)}
            files = {"file": ("a.wav", b"\0max_tokens")}
            answer = await house.post("/v1/audio/transcriptions", data=given, files=files)
            assert answer.status_code == status
        assert house.refused == {"max_output_tokens": 2}

    asyncio.run(run())


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff", b"[" * 100_000])
def test_body_that_cannot_be_read_is_left_to_vllm(content: bytes) -> None:
    """It has better words for it."""

    async def run() -> None:
        house = House(max_output_tokens=10)
        assert (await house.post(content=content)).status_code == 200
        assert house.bodies == [content]

    asyncio.run(run())


def test_requests_of_one_key_at_once() -> None:
    """One too many is 429; other keys, and what is no work, are not touched; room comes back."""

    async def run() -> None:
        house = House(max_requests_per_key=2)
        house.may_end.clear()
        alice = {"headers": {"Authorization": "Bearer alice"}}
        first = [asyncio.create_task(house.post(**alice)) for _ in range(2)]
        while len(house.bodies) < 2:
            await asyncio.sleep(0.001)
        refused = await house.post(**alice)
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        assert "alice" not in refused.text
        others = [asyncio.create_task(house.post(headers={"Authorization": "Bearer bob"}))]
        others += [asyncio.create_task(house.post()), asyncio.create_task(house.post("/admin/x"))]
        while len(house.bodies) < 5:
            await asyncio.sleep(0.001)
        house.may_end.set()
        assert [r.status_code for r in await asyncio.gather(*first, *others)] == [200] * 5
        assert (await house.post(**alice)).status_code == 200
        assert house.refused == {"max_requests_per_key": 1}

    asyncio.run(run())


def test_key_is_known_by_its_name() -> None:
    """Two keys of one name share the bound."""
    from service.limits import _key_of

    def scope(name: str | None, token: bytes) -> dict[str, Any]:
        return {"state": {"vtoken_key_name": name}, "headers": [(b"authorization", token)]}

    assert _key_of(scope("a", b"x")) == _key_of(scope("a", b"y"))
    assert _key_of(scope(None, b"x")) != _key_of(scope(None, b"y"))


def test_long_queue_is_429_with_the_time_to_wait() -> None:
    """Retry-After is what the wait exceeds the bound by."""

    async def run() -> None:
        house = House(max_queue_seconds=5)
        assert (await house.post()).status_code == 200
        feed(house.operations.queue, sent=40, waiting=[0, 36, 32, 28])
        answer = await house.post()
        assert answer.status_code == 429
        wait = house.operations.queue.wait_seconds()
        assert int(answer.headers["retry-after"]) >= wait - 5
        assert house.refused == {"max_queue_seconds": 1}

    asyncio.run(run())


def feed(queue: QueueEstimate, sent: int, waiting: list[int]) -> None:
    """Send everything at once, then answer with these queue lengths, one per second."""
    for second, length in enumerate(waiting):
        if second == 1:
            queue.sent(sent)
        queue.note(Pulse(running=4, waiting=length, steps=second), float(second))


def test_empty_queue_is_no_wait() -> None:
    """However many run, and whatever was before."""
    queue = QueueEstimate()
    assert queue.wait_seconds() == 0
    feed(queue, sent=4, waiting=[0, 0, 0])
    assert queue.wait_seconds() == 0
    feed(queue, sent=40, waiting=[0, 36, 30, 0])
    assert queue.wait_seconds() == 0


def test_wait_is_the_queue_over_the_rate() -> None:
    """40 came, 4 began at once and then 4 a second: (28 waiting + 1) / (12 started / 3 s)."""
    queue = QueueEstimate()
    feed(queue, sent=40, waiting=[0, 36, 32, 28])
    assert queue.wait_seconds() == pytest.approx(29 / 4)


def test_requests_since_the_last_answer_count() -> None:
    """A burst between two answers of the engine does not slip in."""
    queue = QueueEstimate()
    feed(queue, sent=40, waiting=[0, 36, 32, 28])
    before = queue.wait_seconds()
    queue.sent(8)
    assert queue.wait_seconds() == pytest.approx(before + 2)


def test_queue_that_stands_still_has_a_growing_wait() -> None:
    """Nothing starts: the wait is at least as long as it was watched, times the queue."""
    queue = QueueEstimate()
    feed(queue, sent=12, waiting=[0, *[10] * 20])
    assert queue.wait_seconds() > 20


def test_only_the_window_counts() -> None:
    """A fast minute ago is no promise."""
    queue = QueueEstimate()
    feed(queue, sent=1000, waiting=[0, *range(900, 100, -20), *[100] * 60])
    assert queue.wait_seconds() >= 101 * (WINDOW_SECONDS - 1)


def test_withdrawn_requests_are_no_starts() -> None:
    """Clients that give up while waiting shorten the queue, not the engine's time."""
    queue = QueueEstimate()
    feed(queue, sent=20, waiting=[0, 16, 16])
    stuck = queue.wait_seconds()
    queue.withdrawn(8)
    queue.note(Pulse(running=4, waiting=8, steps=9), 3.0)
    assert queue.wait_seconds() == pytest.approx(9 * 3 / 4)
    assert stuck == pytest.approx(17 * 2 / 4)
