"""A client of the OpenAI-compatible routes: streamed completions with their timings.

Prompts are token ids, so that every arm computes exactly the same; the server's own ``/tokenize``
makes them.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from loadtest.latency import Answer

Message = Mapping[str, str]

_TIMEOUT = httpx.Timeout(1800, connect=30)
_DATA, _DONE = b"data: ", b"data: [DONE]"


class ServiceError(Exception):
    """The service answered something else than was asked for; the message says what."""


@dataclass
class _Stream:
    """What the events of one stream have said so far."""

    times: list[float] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    finish_reason: str = ""
    usage: Mapping[str, Any] = field(default_factory=dict)
    receipt: Mapping[str, Any] = field(default_factory=dict)

    def add(self, event: Mapping[str, Any], now: float) -> None:
        """Take one event in.

        Raises:
            ServiceError: it is an error event.
        """
        if "error" in event:
            raise ServiceError(str(event["error"]))
        for choice in event.get("choices") or ():
            ids = choice.get("token_ids") or ()
            if ids or choice.get("text"):
                self.times.append(now)
            self.token_ids += ids
            self.text.append(choice.get("text") or "")
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
        self.usage = event.get("usage") or self.usage
        self.receipt = event.get("vtoken") or self.receipt


class Client:
    """Talks to one service; close it, or use it as an async context manager.

    Args:
        url: of the service, without ``/v1``.
        model: its name there; empty: the first that the service lists.
        admin_key: of the admin routes; empty where they are not needed.
        api_key: of the OpenAI routes; empty where none is set.
    """

    def __init__(
        self, url: str, *, model: str = "", admin_key: str = "", api_key: str = ""
    ) -> None:
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        # A service may close an idle connection after 5 s (vLLM does): reuse none that is as old.
        limits = httpx.Limits(
            max_connections=None, max_keepalive_connections=64, keepalive_expiry=2.0
        )
        self._http = httpx.AsyncClient(
            base_url=url, headers=headers, timeout=_TIMEOUT, limits=limits, trust_env=False
        )
        self._admin = {"Authorization": f"Bearer {admin_key}"} if admin_key else {}
        self._model = model

    async def __aenter__(self) -> Client:
        """Itself."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close the connections."""
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def model(self) -> str:
        """The model's name at the service."""
        if not self._model:
            self._model = (await self._get("/v1/models"))["data"][0]["id"]
        return self._model

    async def tokenize(self, text: str) -> list[int]:
        """Token ids of a text, without special tokens."""
        body = {"model": await self.model(), "prompt": text, "add_special_tokens": False}
        return list((await self._post("/tokenize", body))["tokens"])

    async def tokenize_chat(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of a conversation in the model's chat template, ready for the next answer.

        A model without a template gets ``role: content`` lines.
        """
        body = {"model": await self.model(), "messages": list(messages)}
        answer = await self._http.post("/tokenize", json=body)
        if answer.status_code == httpx.codes.BAD_REQUEST:
            lines = [f"{m['role']}: {m['content']}\n" for m in messages]
            return await self.tokenize("".join([*lines, "assistant: "]))
        return list(_checked(answer)["tokens"])

    async def complete(self, **body: Any) -> dict[str, Any]:
        """One completion that is not streamed; the whole answer.

        Raises:
            ServiceError: the service refused it.
        """
        return await self._post("/v1/completions", {"model": await self.model(), **body})

    async def stream(self, **body: Any) -> Answer:
        """One streamed completion, timed; a failure becomes the answer's ``error``."""
        body = {
            "model": await self.model(),
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
            **body,
        }
        seen = _Stream()
        start, error = time.monotonic(), ""
        try:
            async with self._http.stream("POST", "/v1/completions", json=body) as response:
                if response.is_error:
                    await response.aread()
                    _checked(response)
                async for event in _events(response):
                    seen.add(event, time.monotonic())
        except (httpx.HTTPError, ServiceError, ValueError) as caught:
            error = f"{type(caught).__name__}: {caught}"
        return Answer(
            start=start,
            end=time.monotonic(),
            chunk_times=tuple(seen.times),
            num_prompt_tokens=int(seen.usage.get("prompt_tokens", 0)),
            num_output_tokens=int(seen.usage.get("completion_tokens", len(seen.token_ids))),
            token_ids=tuple(seen.token_ids),
            text="".join(seen.text),
            finish_reason=seen.finish_reason,
            receipt=seen.receipt,
            error=error or ("" if seen.times else "the stream brought no token"),
        )

    async def metrics_text(self) -> str:
        """The page ``/metrics``."""
        answer = await self._http.get("/metrics")
        answer.raise_for_status()
        return answer.text

    async def state(self) -> dict[str, Any]:
        """``GET /admin/state``."""
        return _checked(await self._http.get("/admin/state", headers=self._admin))

    async def policy(self) -> dict[str, Any]:
        """The policy document in force."""
        found = _checked(await self._http.get("/admin/policy", headers=self._admin))
        return dict(found["document"])

    async def policies(self) -> list[dict[str, Any]]:
        """The catalogue of eviction policies."""
        found = _checked(await self._http.get("/admin/policies", headers=self._admin))
        return list(found["policies"])

    async def patch_policy(self, changes: Mapping[str, Any]) -> dict[str, Any]:
        """Change the policy document; the one in force afterwards.

        Raises:
            ServiceError: the change was refused.
        """
        answer = await self._http.patch("/admin/policy", json=dict(changes), headers=self._admin)
        return dict(_checked(answer)["document"])

    async def _get(self, path: str) -> dict[str, Any]:
        return _checked(await self._http.get(path))

    async def _post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        return _checked(await self._http.post(path, json=dict(body)))


async def _events(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """The JSON payloads of a server-sent stream.

    Only line feeds end a line. ``aiter_lines`` takes U+2028 and others for ends, too, which JSON
    does not escape and a model may say.
    """
    rest = b""
    async for chunk in response.aiter_bytes():
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            if line.startswith(_DATA) and line != _DONE:
                yield json.loads(line.removeprefix(_DATA))


def _checked(answer: httpx.Response) -> dict[str, Any]:
    """The body of a good answer.

    Raises:
        ServiceError: with the status and the reason.
    """
    if answer.is_error:
        raise ServiceError(f"{answer.status_code} {answer.url.path}: {answer.text[:500]}")
    return dict(answer.json())
