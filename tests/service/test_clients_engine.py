"""Real clients against the real service: OpenAI's own, and LangChain's.

One server with the embedded model and an API key; ``test_serve_engine.py`` goes on with it. What a
client cannot read is a failure, whatever the answer says. The page and the commands are looked at
under the same traffic.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any, Literal

import httpx
import openai
import pytest
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
from pydantic import BaseModel, ConfigDict

from service import cli
from tests.deploy.conftest import obtain
from tests.service.browser import Browser, chromium
from tests.service.embedded_server import API_KEY, KEY, MODEL, Server
from tests.service.server_process import wait_for

pytestmark = pytest.mark.engine

HELLO: list[Any] = [{"role": "user", "content": "Say hello to a sailor."}]
STORY = "Once upon a time, in a small village by the sea, there lived an old fisherman. "


class Weather(BaseModel):
    """What the structured answers look like."""

    model_config = ConfigDict(extra="forbid")

    city: Literal["Paris", "Rome"]
    celsius: int


TOOL: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture(scope="module")
def server(embedded_server) -> Server:
    return embedded_server


@pytest.fixture
def client(server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key=API_KEY, max_retries=0) as client:
        yield client


def chat(client: openai.OpenAI, **options: Any) -> Any:
    request = {"model": MODEL, "messages": HELLO, "max_tokens": 16, "temperature": 0}
    return client.chat.completions.create(**{**request, **options})


# -- OpenAI's client -----------------------------------------------------------------------------


def test_chat_and_models(client):
    """An answer with role, reason and usage that add up; the model can be asked for by name."""
    answer = chat(client)
    choice = answer.choices[0]
    assert choice.message.role == "assistant"
    assert choice.message.content
    assert choice.finish_reason in ("stop", "length")
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert client.models.retrieve(MODEL).id == MODEL


def test_stream_ends_with_usage(client):
    """The last event has the usage and no choice; the others have none."""
    stream = chat(client, stream=True, stream_options={"include_usage": True})
    *events, last = list(stream)
    assert last.choices == []
    assert last.usage.completion_tokens > 0
    assert all(event.usage is None for event in events)
    assert events[0].choices[0].delta.role == "assistant"
    assert [e.choices[0].finish_reason for e in events if e.choices[0].finish_reason] in (
        ["stop"],
        ["length"],
    )


def test_async_client_may_leave_a_stream(server):
    """Requests of one client run side by side; a closed stream is aborted in the engine."""

    async def run() -> list[str]:
        async with openai.AsyncOpenAI(
            base_url=server.url + "/v1", api_key=API_KEY, max_retries=0
        ) as client:
            request: Any = {"model": MODEL, "messages": HELLO, "max_tokens": 12}
            stream = await client.chat.completions.create(
                **{**request, "max_tokens": 1500}, stream=True
            )
            await anext(aiter(stream))
            await stream.close()
            jobs = [client.chat.completions.create(**request) for _ in range(4)]
            return [a.choices[0].message.content or "" for a in await asyncio.gather(*jobs)]

    assert all(asyncio.run(run()))


@pytest.mark.parametrize("stream", [False, True])
def test_named_tool_is_called(client, stream):
    """One call with arguments of its schema, whole or in pieces."""
    named = {"type": "function", "function": {"name": "get_weather"}}
    answer = chat(client, tools=[TOOL], tool_choice=named, max_tokens=100, stream=stream)
    if stream:
        deltas = [e.choices[0].delta for e in answer if e.choices]
        calls = [call for delta in deltas for call in delta.tool_calls or ()]
        name = next(call.function.name for call in calls if call.function.name)
        arguments = "".join(call.function.arguments or "" for call in calls)
    else:
        (call,) = answer.choices[0].message.tool_calls
        assert call.type == "function"
        assert call.id
        name, arguments = call.function.name, call.function.arguments
    assert name == "get_weather"
    assert json.loads(arguments)["city"] in ("Paris", "Rome")


def test_required_tool_and_its_result(client):
    """A call is forced, its result is sent back, and an answer comes."""
    question = {"role": "user", "content": "How warm is it in Rome?"}
    first = chat(
        client, messages=[question], tools=[TOOL], tool_choice="required", max_tokens=100
    ).choices[0]
    call = first.message.tool_calls[0]
    messages = [
        question,
        first.message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": '{"celsius": 21}'},
    ]
    assert chat(client, messages=messages, tools=[TOOL]).choices[0].message.content is not None


def test_logprobs(client):
    """Of chat and completions: as many as tokens, with alternatives, none above zero."""
    answer = chat(client, logprobs=True, top_logprobs=3)
    content = answer.choices[0].logprobs.content
    assert len(content) == answer.usage.completion_tokens
    assert all(len(token.top_logprobs) == 3 and token.logprob <= 0 for token in content)
    text = client.completions.create(model=MODEL, prompt="One, two,", max_tokens=4, logprobs=2)
    logprobs = text.choices[0].logprobs
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == text.usage.completion_tokens
    assert all(len(top) >= 2 for top in logprobs.top_logprobs)


def test_json_schema(client):
    """The client's own parser gets an object of the type; JSON mode gives some JSON."""
    question: Any = [{"role": "user", "content": "The weather in Paris as JSON."}]
    parsed = client.chat.completions.parse(
        model=MODEL, messages=question, response_format=Weather, max_tokens=60, temperature=0
    )
    weather = parsed.choices[0].message.parsed
    assert isinstance(weather, Weather)
    free = chat(client, response_format={"type": "json_object"}, max_tokens=40).choices[0]
    assert free.message.content.lstrip().startswith("{")


def test_several_answers(client):
    """n=3, in order of their indices, drawn apart; usage counts all of them."""
    answer = chat(client, n=3, temperature=1.5, max_tokens=12)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in answer.choices}) > 1
    assert answer.usage.completion_tokens > 12
    stream = chat(client, n=2, temperature=1, stream=True)
    assert {event.choices[0].index for event in stream if event.choices} == {0, 1}


def test_stop(client):
    """The stop string ends the answer and is not in it."""
    counted = client.completions.create(
        model=MODEL, prompt="1, 2, 3, 4, 5, 6,", max_tokens=40, temperature=0, stop=[" 9", "\n"]
    )
    assert counted.choices[0].finish_reason == "stop"
    assert " 9" not in counted.choices[0].text


def test_completions(client):
    """Several prompts at once, echo, and a stream whose pieces are the whole."""
    request: Any = {"model": MODEL, "max_tokens": 8, "temperature": 0}
    both = client.completions.create(prompt=["The sea is", "The sky is"], **request)
    assert [choice.index for choice in both.choices] == [0, 1]
    echo = client.completions.create(prompt="The sea is", echo=True, **request)
    assert echo.choices[0].text.startswith("The sea is")
    pieces = client.completions.create(prompt="The sea is", stream=True, **request)
    assert "".join(piece.choices[0].text for piece in pieces if piece.choices)


def test_responses(client):
    """The newer API, plain and streamed."""
    answer = client.responses.create(model=MODEL, input="Say hello.", max_output_tokens=16)
    assert answer.output_text
    events = client.responses.create(
        model=MODEL, input="Say hello.", max_output_tokens=16, stream=True
    )
    assert {event.type for event in events} >= {"response.created", "response.output_text.delta"}


def refusal(status: int, call: Any) -> openai.APIStatusError:
    """What a refused call raised, with OpenAI's error body."""
    with pytest.raises(openai.APIStatusError) as caught:
        call()
    error = caught.value
    assert error.status_code == status, error
    document = error.response.json()["error"]
    assert isinstance(document["message"], str)
    assert document["message"]
    assert {"type", "param", "code"} <= document.keys()
    return error


def test_refusals_have_openais_form(server, client):
    """Status, and a body with message, type, param and code, as the client reads it."""
    refusal(404, lambda: chat(client, model="no-such-model"))
    refusal(400, lambda: chat(client, messages=[{"role": "user", "content": "word " * 4000}]))
    refusal(400, lambda: chat(client, max_tokens=-1))
    refusal(400, lambda: chat(client, temperature=-1))
    refusal(400, lambda: chat(client, messages=[{"content": "x"}]))
    refusal(400, lambda: chat(client, n=2))
    refusal(400, lambda: chat(client, response_format={"type": "json_schema"}))
    refusal(404, lambda: client.embeddings.create(model=MODEL, input="x"))
    with openai.OpenAI(base_url=server.url + "/v1", api_key="wrong", max_retries=0) as stranger:
        assert isinstance(refusal(401, lambda: chat(stranger)), openai.AuthenticationError)


def test_unreadable_body_is_refused(server):
    """No client sends it, but a proxy may cut one."""
    answer = httpx.post(
        server.url + "/v1/chat/completions",
        content=b'{"model": "',
        headers={"Authorization": f"Bearer {API_KEY}", "Content-Type": "application/json"},
        timeout=300,
    )
    assert answer.status_code == 400
    assert answer.json()["error"]["message"]


# -- LangChain -----------------------------------------------------------------------------------


def make_model(server: Server, **options: Any) -> ChatOpenAI:
    """LangChain's chat model of this service."""
    fixed = {"model": MODEL, "base_url": server.url + "/v1", "api_key": API_KEY, "max_retries": 0}
    given = {"temperature": 0, "max_tokens": 16, "stream_usage": True, **options}
    return ChatOpenAI(**fixed, **given)


@pytest.fixture
def model(server) -> ChatOpenAI:
    return make_model(server)


def test_langchain_chat(model):
    """invoke, batch and async, with usage."""
    messages = [SystemMessage("You are brief."), HumanMessage("Say hello.")]
    answer = model.invoke(messages)
    assert isinstance(answer, AIMessage)
    assert answer.content
    assert answer.usage_metadata["output_tokens"] > 0
    assert len(model.batch(["One?", "Two?"])) == 2
    assert asyncio.run(model.ainvoke(messages)).content


def test_langchain_stream(model):
    """Chunks add up to one message with usage and a finish reason."""
    chunks = list(model.stream("Name three colours."))
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk
    assert whole.content
    assert whole.usage_metadata["output_tokens"] > 0
    assert whole.response_metadata["finish_reason"] in ("stop", "length")


def test_langchain_tools(server):
    """A bound tool is called, and its result goes back."""
    model = make_model(server, max_tokens=100)
    answer = model.bind_tools([TOOL], tool_choice="get_weather").invoke("How warm is it in Rome?")
    (call,) = answer.tool_calls
    assert call["name"] == "get_weather"
    assert call["args"]["city"] in ("Paris", "Rome")
    result = ToolMessage('{"celsius": 21}', tool_call_id=call["id"])
    assert model.invoke([HumanMessage("How warm is it?"), answer, result]).content is not None


def test_langchain_structured_output(server):
    """By JSON schema, as an object of the type."""
    model = make_model(server, max_tokens=100)
    structured = model.with_structured_output(Weather, method="json_schema")
    assert isinstance(structured.invoke("The weather in Paris."), Weather)


def test_langchain_logprobs_n_and_stop(server, model):
    """What clients pass on as it is."""
    answer = model.bind(logprobs=True, top_logprobs=2).invoke("Hello")
    assert answer.response_metadata["logprobs"]["content"]
    several = make_model(server, n=2, temperature=1).generate([[HumanMessage("Hello")]])
    assert len(several.generations[0]) == 2
    assert "." not in model.invoke("Tell me about the sea.", stop=["."]).content


def test_langchain_completions(server):
    """The older class."""
    model = OpenAI(
        model=MODEL, base_url=server.url + "/v1", api_key=API_KEY, max_tokens=8, max_retries=0
    )
    assert model.invoke("The sea is")


def test_langchain_refusals(server, model):
    """Raise what OpenAI's client raises."""
    with pytest.raises(openai.NotFoundError):
        model.bind(model="no-such-model").invoke("Hello")
    with pytest.raises(openai.BadRequestError):
        model.invoke("word " * 4000)
    embeddings = OpenAIEmbeddings(
        model=MODEL,
        base_url=server.url + "/v1",
        api_key=API_KEY,
        max_retries=0,
        check_embedding_ctx_length=False,
    )
    with pytest.raises(openai.NotFoundError):
        embeddings.embed_query("x")


# -- the page and the commands, under traffic ----------------------------------------------------


def test_commands_look_at_the_service(server, client, capsys, monkeypatch):
    """status, policy and top, while a stream runs."""
    monkeypatch.setenv("VTOKEN_ADMIN_KEY", KEY)
    monkeypatch.setenv("VTOKEN_URL", server.url)
    stream = chat(client, max_tokens=1500, stream=True, extra_body={"ignore_eos": True})
    next(stream)
    assert cli.main(["status"]) == 0
    text = capsys.readouterr().out
    assert "1 running, 0 waiting" in text
    assert "streaming_llm" in text

    def frame_of_progress() -> str | None:
        assert cli.main(["top", "--once", "--interval", "1"]) == 0
        frame = capsys.readouterr().out
        return frame if "tokens/s 0 " not in frame else None

    frame = wait_for(frame_of_progress, 60)
    assert frame.splitlines()[-2].split()[-1].startswith("chatcmpl-")
    assert cli.main(["policy", "set", "theta_f=0.2", "--dry-run"]) == 0
    assert "1 running requests would lose" in capsys.readouterr().out
    stream.close()


@pytest.mark.browser
def test_page_shows_real_traffic(server, client):
    """Requests, blocks and F of a running engine, as the admin routes tell them."""
    obtain(lambda: chromium()[0])
    browser = Browser()
    try:
        with ExitStack() as streams:  # closed when they were looked at: they would last longer
            for number in range(4):
                stream = client.completions.create(
                    model=MODEL,
                    prompt=f"{number}. " + STORY * 8,
                    max_tokens=1700,
                    stream=True,
                    extra_body={"ignore_eos": True},
                )
                next(streams.enter_context(stream))
            watch(browser, server)
        browser.wait_for("document.querySelectorAll('#requests tbody tr').length == 0")
        assert browser.text("#requests-note") == "No request is running."
        assert browser.problems == []
    finally:
        browser.close()


def watch(browser: Browser, server: Server) -> None:
    """Until the page has shown four requests that lost tokens, and blocks for them."""
    browser.open(server.url + "/vtoken/ui")
    browser.type("#key", KEY)
    browser.press("Enter", 13)
    rows = "document.querySelectorAll('#requests tbody tr')"
    browser.wait_for(f"{rows}.length == 4")
    browser.wait_for(f"[...{rows}].every(row => +row.cells[5].innerText > 0)")
    drawn = "document.getElementById('map').vtokenMap.drawn.map"
    held = browser.run(f"{drawn}.held.reduce((a, b) => a + b)")
    live = browser.run(f"{drawn}.live.reduce((a, b) => a + b)")
    assert 4 * 3 <= held < browser.run(f"{drawn}.num_blocks")
    assert 0 < live <= held * 16
    browser.wait_for("document.querySelectorAll('#chart-waste polyline').length >= 2")
