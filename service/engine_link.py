"""The one door from the HTTP process to the token layer in the engine core.

vLLM carries a named utility call to the engine-core process and its answer back; ours is
``vtoken_call(op, payload)``. This class names the operations and turns every way in which a
call can go wrong into an :class:`~service.errors.AdminError`.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Mapping
from contextvars import ContextVar
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any, Literal, NoReturn, TypeAlias, TypeVar

from service.errors import (
    AdminError,
    EngineFaultError,
    EngineGoneError,
    ModeOffError,
    RejectedError,
    StaleVersionError,
)

UTILITY_NAME = "vtoken_call"

_Result = TypeVar("_Result", dict[str, Any], list[Any])

UtilityCall: TypeAlias = Callable[..., Awaitable[Any]]
"""``await call("vtoken_call", op, payload)``; vLLM's ``call_utility_async`` has this shape."""

_MAX_VALUE_CHARS = 1000
ChangeFate = Literal["not_made", "sent", "open"]

change_fate: ContextVar[ChangeFate] = ContextVar("vtoken_change_fate", default="open")
"""What is sure about the change that this task has asked for, should its patience end now. Whoever
carries the call to the engine sets it where more is known than nothing."""

_FATES: Mapping[ChangeFate, str] = {
    "not_made": "; nothing was changed",
    "sent": "; the change was sent to every engine, and each makes it when it answers again: "
    "GET /admin/policy has it then",
    "open": "; the change may be made all the same: look at GET /admin/policy/history before you "
    "send it again, or send it with If-Match",
}


@dataclass(frozen=True)
class ChangeOptions:
    """How the policy document is changed.

    Attributes:
        expected_version: change nothing unless this is the present one.
        apply_to: ``running`` (and new requests) or ``new`` ones only.
        by: who authorised it.
        note: of the author.
        dry_run: say what would change, and change nothing.
    """

    expected_version: int | None = None
    apply_to: str = "running"
    by: str = "unknown"
    note: str | None = None
    dry_run: bool = False


class EngineLink:
    """Calls the token layer of one engine.

    Attributes:
        mode: of the token layer.
        document: the policy document, as last seen here. All changes pass through this object,
            unless it has peers in other processes: then :meth:`refresh` it before use.

    Every method raises:
        ModeOffError: the engine runs in mode ``off``.
        EngineGoneError: the engine is dead or did not answer within ``timeout_seconds``.
        EngineFaultError: it failed inside, or its answer is not in the contract.
    """

    def __init__(
        self,
        call: UtilityCall,
        *,
        mode: str,
        is_dead: Callable[[], bool],
        timeout_seconds: float,
        document: Mapping[str, Any] = MappingProxyType({}),
        has_peers: bool = False,
    ) -> None:
        """Connect.

        Args:
            call: vLLM's utility call.
            mode: of the token layer.
            is_dead: whether the engine is known to have died.
            timeout_seconds: for each call.
            document: the policy document at the start.
            has_peers: whether other processes change the document, too.
        """
        self.mode = mode
        self.document = dict(document)
        self._has_peers = has_peers
        self._call = call
        self._is_dead = is_dead
        self._timeout_seconds = timeout_seconds

    async def snapshot(self) -> dict[str, Any]:
        """Statistics, configuration and policy version; does not mutate."""
        return await self._request("snapshot", dict)

    async def get_policy(self) -> dict[str, Any]:
        """``{"version", "document", "mode"}``; does not mutate."""
        return self._seen(await self._request("get_policy", dict))

    async def refresh(self) -> None:
        """See what others may have changed; if the engine does not answer, what was seen stays."""
        if self._has_peers and self.mode != "off":
            with contextlib.suppress(AdminError):
                await self.get_policy()

    async def set_policy(
        self, changes: Mapping[str, Any], options: ChangeOptions = ChangeOptions()
    ) -> dict[str, Any]:
        """Apply a merge patch to the policy document, or change nothing.

        Returns:
            The new state as :meth:`get_policy`, with ``changes`` and ``warnings``; of a dry run
            also ``requests`` and ``totals``, and the version in force.

        Raises:
            RejectedError: a field is unknown, fixed while running or out of bounds.
            StaleVersionError: a version is expected and is not the present one.
            EngineGoneError: its detail ``change`` says what becomes of it. One engine makes none
                that it has not begun when time is up; several make all that they were sent after
                each had tried it.
        """
        return await self._change("set_policy", {"changes": dict(changes)}, options)

    async def rollback_policy(
        self, version: int | None = None, options: ChangeOptions = ChangeOptions()
    ) -> dict[str, Any]:
        """Put the values of an earlier version in force again, by default of the one before.

        Returns and raises as :meth:`set_policy`; RejectedError also if that version is not
        remembered.
        """
        return await self._change("rollback_policy", {"version": version}, options)

    async def _change(
        self, op: str, payload: dict[str, Any], options: ChangeOptions
    ) -> dict[str, Any]:
        deadline = time.monotonic() + self._timeout_seconds
        reply = await self._request(op, dict, {**payload, **asdict(options), "deadline": deadline})
        if options.dry_run:
            return {**reply, "dry_run": True}
        return self._seen(reply)

    async def policy_history(self) -> dict[str, Any]:
        """The remembered changes of the policy document, the newest first; does not mutate."""
        return await self._request("policy_history", dict)

    async def state(self) -> dict[str, Any]:
        """Pool, running requests, last relocations and skip reasons; does not mutate."""
        return await self._request("state", dict)

    async def blocks(self, max_cells: int) -> dict[str, Any]:
        """The pool in at most ``max_cells`` cells, and what drawing it cost; does not mutate."""
        return await self._request("blocks", dict, {"max_cells": max_cells})

    async def policies(self) -> list[Any]:
        """The catalogue of eviction policies with their argument schemas."""
        return await self._request("policies", list)

    async def receipt(self, key: str) -> dict[str, Any]:
        """What became of the sequences that were sent with this key; can be had once."""
        return await self._request("receipt", dict, {"key": key})

    def _seen(self, reply: dict[str, Any]) -> dict[str, Any]:
        self.document = reply.get("document", self.document)
        return reply

    async def _request(
        self, op: str, kind: type[_Result], payload: Mapping[str, Any] | None = None
    ) -> _Result:
        if self.mode == "off":
            raise ModeOffError(
                "this engine runs in mode off, without the token layer; "
                "start it with --vtoken-mode lazy or naive"
            )
        reply = await self._reply(op, payload)
        if not isinstance(reply, dict) or len(reply.keys() & {"ok", "error"}) != 1:
            raise EngineFaultError(f"the engine's answer to {op!r} is not in the contract")
        if "error" in reply:
            _raise_refusal(op, reply["error"])
        result = reply["ok"]
        if not isinstance(result, kind):
            raise EngineFaultError(f"the engine's answer to {op!r} is not a {kind.__name__}")
        return result

    async def _reply(self, op: str, payload: Mapping[str, Any] | None) -> Any:
        if self._is_dead():
            raise EngineGoneError("the engine is dead")
        change_fate.set("open")
        try:
            # vLLM never resolves the future of a call whose engine died: only time ends it.
            async with asyncio.timeout(self._timeout_seconds):
                return await self._call(UTILITY_NAME, op, payload)
        except TimeoutError as error:
            raise self._gone(op, payload) from error
        except Exception as error:  # vLLM reports failures of a utility as plain Exception
            if self._is_dead():
                raise EngineGoneError("the engine is dead") from error
            raise EngineFaultError(f"the engine failed at {op!r}: {error}") from error

    def _gone(self, op: str, payload: Mapping[str, Any] | None) -> AdminError:
        if self._is_dead():
            return EngineGoneError("the engine is dead")
        text = f"the engine did not answer {op!r} within {self._timeout_seconds:g} s"
        if payload is None or payload.get("dry_run") is not False:
            return EngineGoneError(text)
        fate = change_fate.get()
        return EngineGoneError(text + _FATES[fate], change=fate)


def _raise_refusal(op: str, error: object) -> NoReturn:
    fields = error if isinstance(error, dict) else {"message": str(error)}
    message = str(fields.get("message", f"the engine refused {op!r}"))
    if fields.get("type") == "ConfigError":
        field, bound = fields.get("field"), fields.get("bound")
        value = _bounded(fields.get("value"))
        raise RejectedError(_bounded(message), field=field, value=value, bound=bound)
    if fields.get("type") == "VersionConflict":
        raise StaleVersionError(message)
    if fields.get("type") == "TooLate":
        raise EngineGoneError(message, change="not_made")
    if fields.get("type") == "ModeOff":
        raise ModeOffError(message)
    raise EngineFaultError(f"the engine failed at {op!r}: {message}")


def _bounded(value: object) -> str:
    """Cut text that repeats what a caller sent."""
    text = str(value)
    return text if len(text) <= _MAX_VALUE_CHARS else text[:_MAX_VALUE_CHARS] + "…"
