"""The client against a service that answers by rule."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from loadtest import client as client_module
from loadtest.client import Client, ServiceError
from loadtest.latency import Answer, summarize
from tests.loadtest.fake_service import KEY, FakeService


def ask(service: FakeService, call):
    async def run():
        async with Client(service.url, admin_key=KEY) as client:
            return await call(client)

    return asyncio.run(run())


def stream(service: FakeService, **body) -> Answer:
    body = {"prompt": [1, 2, 3], "max_tokens": 4, **body}
    return ask(service, lambda client: client.stream(**body))


@pytest.fixture
def ticking(monkeypatch) -> None:
    """A clock that moves by one second whenever the client looks at it."""
    ticks = itertools.count()

    class Clock:
        @staticmethod
        def monotonic() -> float:
            return float(next(ticks))

    monkeypatch.setattr(client_module, "time", Clock)


@pytest.mark.usefixtures("ticking")
def test_every_event_is_timed_when_it_arrives(service):
    """Sent at 0, tokens at 1, 2, 3 and 4: the figures follow exactly."""
    answer = stream(service)
    assert answer.start == 0
    assert answer.chunk_times == (1, 2, 3, 4)
    assert (answer.ttft, answer.latency, answer.tpot) == (1, 4, 1)
    assert summarize([answer])["mean_itl_ms"] == 1000


@pytest.mark.usefixtures("ticking")
def test_merged_tokens_count_as_tokens_not_as_events(service):
    """Four tokens in two events: TPOT is over tokens, ITL over events."""
    service.tokens_per_event = 2
    answer = stream(service)
    assert answer.chunk_times == (1, 2)
    assert answer.num_output_tokens == 4
    assert answer.tpot == pytest.approx(1 / 3)


def test_only_line_feeds_end_a_line_of_a_stream(service):
    """Answers may hold what Unicode calls the end of a line; JSON does not escape it."""
    service.text = "a\x85b\u2028c\u2029d"
    answer = stream(service)
    assert answer.error == ""
    assert answer.text == 4 * service.text


def test_answer_carries_tokens_usage_and_receipt(service):
    """What was asked for comes back, and only then."""
    answer = stream(service, vllm_xargs={"vtoken_receipt": True})
    assert answer.token_ids == (0, 1, 2, 3)
    assert (answer.num_prompt_tokens, answer.num_output_tokens) == (3, 4)
    assert answer.finish_reason == "length"
    assert answer.receipt["live_tokens"] + answer.receipt["evicted_tokens"] == 6
    assert stream(service).receipt == {}


def test_refusal_becomes_the_error_of_the_answer(service):
    """The status and the reason are in it."""
    service.broken = 503
    assert "503" in stream(service).error
    assert "out of order" in stream(service).error


def test_error_in_the_middle_of_a_stream_is_an_error(service):
    """Tokens that came before do not make the answer a good one."""
    service.error_event = True
    answer = stream(service)
    assert "the engine died" in answer.error
    assert len(answer.chunk_times) == 4


def test_unreachable_service_is_an_error():
    """Nobody listens: no exception, an answer with the reason."""

    async def run():
        async with Client("http://127.0.0.1:9", model="m") as client:
            return await client.stream(prompt=[1], max_tokens=1)

    assert asyncio.run(run()).error


def test_tokens_of_text_and_conversation(service):
    """A model without a chat template gets plain lines."""
    messages = [{"role": "user", "content": "hi"}]
    assert bytes(ask(service, lambda c: c.tokenize("ab"))) == b"ab"
    assert bytes(ask(service, lambda c: c.tokenize_chat(messages))) == b"<user>hi"
    service.has_chat_template = False
    plain = bytes(ask(service, lambda c: c.tokenize_chat(messages)))
    assert plain == b"user: hi\nassistant: "


def test_admin_routes_carry_the_key(service):
    """State, catalogue and policy with it; without it a refusal."""
    assert ask(service, lambda c: c.state())["engine"]["running"] == 1
    assert ask(service, lambda c: c.policies())[0]["name"] == "random"
    assert ask(service, lambda c: c.policy())["theta_f"] == 0.25

    async def run():
        async with Client(service.url) as client:
            await client.state()

    with pytest.raises(ServiceError, match="401"):
        asyncio.run(run())


def test_api_key_is_sent_where_one_is_given(service):
    """With every request but those to admin routes, which have their own."""

    async def run(api_key: str) -> None:
        async with Client(service.url, api_key=api_key) as client:
            await client.model()

    asyncio.run(run("secret"))
    asyncio.run(run(""))
    assert service.authorizations == ["Bearer secret", None]


def test_patch_returns_the_document_and_refusals_are_raised(service):
    """What is in force afterwards, or the reason."""
    document = ask(service, lambda c: c.patch_policy({"theta_f": 0.1}))
    assert document["theta_f"] == 0.1
    with pytest.raises(ServiceError, match="unknown field"):
        ask(service, lambda c: c.patch_policy({"no_such_field": 1}))


def test_model_comes_from_the_service(service):
    """No name has to be given."""
    assert ask(service, lambda c: c.model()) == "fake"
    stream(service)
    assert service.requests[-1]["model"] == "fake"
