"""Answers 400 where vLLM 0.32 trips over the form of a request and would answer 500.

While it reads a request, vLLM asserts some things about it: a part of a message must have a type
that is text, for instance. Such an assertion speaks about what the client sent, not about the
server. An assertion anywhere else stays a 500.
"""

from __future__ import annotations

import logging
import traceback

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

from service.asgi import error_response

logger = logging.getLogger(__name__)

READING = ("/vllm/renderers/", "/vllm/tool_parsers/", "/vllm/entrypoints/openai/responses/utils.py")
"""Files that turn a request into a prompt, before the engine has seen anything of it."""


def attach(app: FastAPI) -> None:
    """Add the handler to ``app``; mutates it."""
    app.add_exception_handler(AssertionError, _answer)


def is_about_the_request(error: BaseException) -> bool:
    """Whether the assertion failed in code that reads requests."""
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and any(part in frames[-1].filename for part in READING)


async def _answer(request: Request, error: Exception) -> JSONResponse:
    if not is_about_the_request(error):
        raise error
    logger.warning("vLLM could not read a request to %s: %r", request.url.path, error)
    text = str(error) or "a part of the request is not of the form that this route takes"
    return error_response(400, text)
