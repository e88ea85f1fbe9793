"""Assertions of vLLM about what a client sent are the client's fault; all others are ours."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from fastapi import FastAPI
from vllm.exceptions import VLLMValidationError

from service import openai_errors, vllm_faults
from service.vllm_faults import describe, is_about_the_request


def ask(filename: str, text: str = "", code: str = "assert False, {!r}") -> httpx.Response:
    """The answer of an app in which such an assertion fails, or such code."""
    app = FastAPI()
    vllm_faults.attach(app)

    @app.get("/x")
    async def fail() -> None:
        exec(compile(code.format(text), filename, "exec"))

    async def send() -> httpx.Response:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.get("/x")

    return asyncio.run(send())


def test_assertion_of_a_renderer_is_a_bad_request():
    """With its text, or a sentence where it has none, in OpenAI's form."""
    answer = ask("/lib/vllm/renderers/chat_utils.py")
    assert answer.status_code == answer.json()["error"]["code"] == 400
    assert "not of the form" in answer.json()["error"]["message"]
    named = ask("/lib/vllm/renderers/chat_utils.py", "type must be text")
    assert named.json()["error"]["message"] == "type must be text"


@pytest.mark.parametrize("code", ["[][0]", "{{}}['x']", "object().text"])
def test_what_a_reader_does_not_find_is_a_bad_request(code):
    """A message without parts, or a part without text; the words are not Python's."""
    answer = ask("/lib/vllm/entrypoints/openai/responses/utils.py", code=code)
    assert answer.status_code == 400
    assert "not of the form" in answer.json()["error"]["message"]
    other = ask("/lib/vllm/v1/engine/async_llm.py", code=code)
    assert other.status_code == 500


@pytest.mark.parametrize("file", ["/lib/vllm/v1/engine/async_llm.py", "/lib/service/admin.py"])
def test_other_assertions_stay_server_errors(file):
    """One of ours, or of vLLM's engine, is not blamed on the client, and has words all the same."""
    answer = ask(file)
    assert answer.status_code == 500
    assert answer.json()["error"]["message"] == "the server failed with AssertionError"


def test_the_service_has_the_handlers():
    """They are put in with the other errors of OpenAI's form."""
    app = FastAPI()
    openai_errors.attach(app)
    assert app.exception_handlers.keys() >= set(vllm_faults.KINDS)


def test_error_of_a_stream_is_found_in_what_wraps_it():
    """Starlette raises its own, and a task group puts it into a group; the client's is a 400."""
    theirs = VLLMValidationError("the prompt is empty")
    wrapped = RuntimeError("Caught handled exception, but response already started.")
    wrapped.__cause__ = ExceptionGroup("tasks", [theirs])
    assert describe(wrapped) == (400, "the prompt is empty")
    assert describe(KeyError()) == (500, "the server failed with KeyError")


def test_assertion_without_a_place_is_nobodys():
    """It was never raised."""
    assert not is_about_the_request(AssertionError("text"))
