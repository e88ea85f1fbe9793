"""Answers where vLLM 0.32 trips over a request and would answer 500, or break a stream off.

While it reads a request, vLLM takes things about it for granted: that a message has a part, and a
part a type. An error from there speaks about what the client sent, not about the server: 400.
Anything else stays a 500, with words, and a traceback in the log. So does an error in the middle of
a stream: vLLM has an error event for most routes, and breaks ``/v1/responses`` off.
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

KINDS = (AssertionError, AttributeError, LookupError)
"""What such code raises; vLLM has handlers of its own for ``ValueError`` and ``TypeError``."""

_STARTED = "response already started"


def attach(app: FastAPI) -> None:
    """Add the handlers to ``app``; mutates it."""
    for kind in KINDS:
        app.add_exception_handler(kind, _answer)


def is_about_the_request(error: BaseException) -> bool:
    """Whether it comes from code of vLLM that reads requests."""
    frames = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    ours = [name for name in frames if "/vllm/" in name]
    return bool(ours) and any(part in ours[-1] for part in READING)


def in_words(error: BaseException) -> str:
    """Its text, or its kind where it has none."""
    return str(error) or f"the server failed with {type(error).__name__}"


def describe(error: BaseException) -> tuple[int, str]:
    """Status and message for an error that ended a stream: the client's fault, or the server's."""
    from vllm.exceptions import VLLMClientError

    while (inner := _inner(error)) is not None:
        error = inner
    is_theirs = isinstance(error, VLLMClientError) or is_about_the_request(error)
    if not is_theirs:
        logger.error("the server failed in the middle of an answer", exc_info=error)
    return (400 if is_theirs else 500), in_words(error)


def _inner(error: BaseException) -> BaseException | None:
    """What the framework has wrapped."""
    if isinstance(error, BaseExceptionGroup):
        return error.exceptions[0]
    return error.__cause__ if _STARTED in str(error) else None


async def _answer(request: Request, error: Exception) -> JSONResponse:
    if is_about_the_request(error):
        logger.warning("vLLM could not read a request to %s: %r", request.url.path, error)
        has_words = isinstance(error, AssertionError) and str(error)
        text = "a part of the request is not of the form that this route takes"
        return error_response(400, str(error) if has_words else text)
    logger.error("the server failed at %s", request.url.path, exc_info=error)
    return error_response(500, in_words(error))
