"""Assertions of vLLM about what a client sent are the client's fault; all others are ours."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from fastapi import FastAPI

from service import vllm_faults
from service.vllm_faults import is_about_the_request


def ask(filename: str, text: str = "") -> httpx.Response:
    """The answer of an app in which such an assertion fails."""
    app = FastAPI()
    vllm_faults.attach(app)

    @app.get("/x")
    async def fail() -> None:
        exec(compile(f"assert False, {text!r}", filename, "exec"))

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


@pytest.mark.parametrize("file", ["/lib/vllm/v1/engine/async_llm.py", "/lib/service/admin.py"])
def test_other_assertions_stay_server_errors(file):
    """One of ours, or of vLLM's engine, is not blamed on the client."""
    assert ask(file).status_code == 500


def test_assertion_without_a_place_is_nobodys():
    """It was never raised."""
    assert not is_about_the_request(AssertionError("text"))
