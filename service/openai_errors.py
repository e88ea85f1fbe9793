"""OpenAI's error body for what is not served under ``/v1``.

vLLM has only the routes of the model's task: ``/v1/embeddings`` of a chat model is unknown to it,
and the framework's own 404 is nothing that OpenAI's clients can read.
"""

from __future__ import annotations

from fastapi import FastAPI, Request, Response
from fastapi.exception_handlers import http_exception_handler
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from service import vllm_faults
from service.routes import route_path

_TYPES = {404: "NotFoundError", 405: "BadRequestError"}


def attach(app: FastAPI) -> None:
    """Answer unknown paths and methods under ``/v1``, and what vLLM trips over; mutates ``app``.

    vLLM's handler is for FastAPI's subclass of this exception and stays in force for that.
    """
    app.add_exception_handler(HTTPException, _answer)
    vllm_faults.attach(app)


async def _answer(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = route_path(request.scope)
    kind = _TYPES.get(error.status_code)
    if kind is None or not path.startswith("/v1/"):
        return await http_exception_handler(request, error)
    message = f"{request.method} {path[:200]} is not served: this model has no such route"
    body = {"message": message, "type": kind, "param": None, "code": error.status_code}
    return JSONResponse({"error": body}, error.status_code, headers=error.headers)
