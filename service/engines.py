"""One engine in front of several: what data parallelism changes for the HTTP process.

With ``--data-parallel-size`` vLLM runs several engines, each with its own pool, tables and policy
document, and balances requests over them. Calls go to all of them, and the answers become one:

    policy document    the same everywhere: a change is tried on every engine before it is made.
                       A violation that stops relocation changes one engine's alone: then no version
                       is that of all, and a change that makes them equal makes versions equal, too
    state              pools summed, requests of all engines with the number of theirs
    snapshot           of every engine; metrics have the label ``engine``
    receipts           sums: sequences of one answer may have run anywhere
    pulse              sums, and each engine's own under ``engines``: one that hangs answers nobody,
                       one that makes no step is not made up for by the others
    blocks             the first engine's, and all of them under ``engines``
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from multiprocessing.synchronize import Lock
from typing import Any

from service.engine_link import UTILITY_NAME, UtilityCall, change_fate

PULSE_NAME = "vtoken_pulse"

Reply = dict[str, Any]

_CHANGES = ("set_policy", "rollback_policy")
_RATIOS = ("waste_ratio", "low_utilization_block_ratio")
"""Of the blocks that an engine's requests hold, so weighted by these."""
_COMMON = ("effective_theta_f", "relocation_disabled")
"""The largest of any engine."""


_RECEIPT_COUNTS = ("num_sequences", "evicted_tokens", "live_tokens", "freed_blocks")

LOCK_POLL_SECONDS = 0.02
"""Between two looks whether another process still changes something."""


def utility_call(engine_core: Any, change_lock: Lock | None = None) -> UtilityCall:
    """vLLM's utility call to the engine, or to all of them with their answers made one.

    ``change_lock`` keeps changes from several processes apart; those of this process are, without
    it. One engine needs no such help: it checks the expected version as it makes the change.
    """
    if len(getattr(engine_core, "core_engines", ())) < 2:
        call: UtilityCall = engine_core.call_utility_async
        return call
    return AllEngines(engine_core.call_utility_all_async, change_lock)


def engine_numbers(engine_core: Any) -> tuple[str, ...]:
    """What vLLM's own metrics have as label ``engine``, for each engine in the order of answers."""
    return tuple(map(str, getattr(engine_core, "engine_ranks_managed", (0,))))


class AllEngines:
    """Calls every engine.

    A change is a trial and a call that makes it, with answers awaited in between. One change at a
    time: else two that expect the same version would both find it, and engines might see changes
    in different orders.

    Args:
        call_all: vLLM's call that returns one answer per engine, in their order.
        change_lock: held while their policy documents are changed, if other processes do so, too.
    """

    def __init__(self, call_all: UtilityCall, change_lock: Lock | None = None) -> None:
        self._call_all = call_all
        self._own_lock = asyncio.Lock()
        self._change_lock = change_lock

    async def __call__(self, method: str, *args: Any) -> Reply:
        """As ``call_utility_async``; an error of one engine is the answer."""
        if method == PULSE_NAME:
            return merged_pulse(await self._call_all(method))
        if method != UTILITY_NAME:
            raise ValueError(f"no rule for the answers of several engines to {method!r}")
        op, payload = args
        if op not in _CHANGES:
            return await self._merged(method, op, payload)
        # All make a change, however late, or none does; and another host has another clock.
        payload = {**payload, "deadline": None}
        if payload.get("dry_run"):
            _, answer = await self._tried(method, op, payload)
            return answer
        change_fate.set("not_made")
        async with self._own_lock, _held(self._change_lock):
            # All or none: bounds may depend on an engine's pool.
            trial, answer = await self._tried(method, op, payload)
            if "ok" not in answer:
                return answer
            made = {**payload, "expected_version": None, "next_version": _next_version(trial)}
            change_fate.set("sent")
            return await self._merged(method, op, made)

    async def _tried(self, method: str, op: str, payload: Any) -> tuple[Sequence[Reply], Reply]:
        """Every engine's answer to a dry run, and the whole's: a preview or a refusal."""
        tried = {**payload, "expected_version": None, "dry_run": True}
        replies = await self._call_all(method, op, tried)
        refusal = _refusal(replies) or _conflict(replies, payload.get("expected_version"))
        if refusal is not None:
            return replies, refusal
        return replies, {"ok": _merged_preview([reply["ok"] for reply in replies])}

    async def _merged(self, method: str, op: str, payload: Any) -> Reply:
        replies = await self._call_all(method, op, payload)
        refusal = _refusal(replies)
        if refusal is not None:
            return refusal
        merge = _MERGED.get(op, _first)
        return {"ok": merge([reply["ok"] for reply in replies])}


@asynccontextmanager
async def _held(lock: Lock | None) -> AsyncIterator[None]:
    """The caller's patience ends the wait; a process that died with the lock ends the server."""
    if lock is None:
        yield
        return
    # Not in a thread: when the waiter is given up, its thread would still take the lock, for ever.
    while not lock.acquire(block=False):
        await asyncio.sleep(LOCK_POLL_SECONDS)
    try:
        yield
    finally:
        lock.release()


def _refusal(replies: Sequence[Reply]) -> Reply | None:
    return next((reply for reply in replies if "ok" not in reply), None)


def _conflict(replies: Sequence[Reply], expected: int | None) -> Reply | None:
    """A refusal unless every engine's document is at the expected version."""
    versions = [reply["ok"]["version"] for reply in replies]
    if expected is None or set(versions) == {expected}:
        return None
    if len(set(versions)) == 1:
        text = f"policy is at version {versions[0]}, the change expects {expected}"
    else:
        each = ", ".join(f"engine {i} at {version}" for i, version in enumerate(versions))
        text = (
            f"the engines' documents differ, {each}, and the change expects {expected}: "
            "one without If-Match reaches all of them"
        )
    return {"error": {"type": "VersionConflict", "message": text}}


def _next_version(trial: Sequence[Reply]) -> int | None:
    """The same for all engines if the change makes their documents equal; None: each its own."""
    found = [reply["ok"] for reply in trial]
    is_same = all(one["document"] == found[0]["document"] for one in found)
    return max(one["version"] for one in found) + 1 if is_same else None


def merged_pulse(pulses: Sequence[Reply]) -> Reply:
    """Sums, with each engine's; relocation is disabled where any engine says so."""
    disabled = [p["relocation_disabled"] for p in pulses if p.get("relocation_disabled")]
    steps = [pulse["steps"] for pulse in pulses]
    merged = {name: sum(pulse[name] for pulse in pulses) for name in ("running", "waiting")}
    merged["steps"] = None if None in steps else sum(steps)
    if "failed_relocations" in pulses[0]:
        merged["failed_relocations"] = sum(pulse["failed_relocations"] for pulse in pulses)
        merged["relocation_disabled"] = disabled[0] if disabled else None
    return {**merged, "engines": list(pulses)}


def _first(results: Sequence[Any]) -> Any:
    return results[0]


def _merged_policy(results: Sequence[Reply]) -> Reply:
    """The first engine's; with ``engines``, all of them, if one has changed by itself."""
    return _with_engines(results, results)


def _merged_history(results: Sequence[Reply]) -> Reply:
    """The first engine's; with ``engines``, all of them, if one has changed by itself.

    When each noted a change is no difference.
    """
    told = [[{**change, "at": None} for change in result["history"]] for result in results]
    return _with_engines(results, told)


def _with_engines(results: Sequence[Reply], told: Sequence[Any]) -> Reply:
    """The first engine's result; with ``engines``, all of them, if what they tell differs."""
    same = all(one == told[0] for one in told)
    return results[0] if same else {**results[0], "engines": list(results)}


def _merged_blocks(results: Sequence[Reply]) -> Reply:
    """The dearest map decides how often they are drawn."""
    seconds = max(result["seconds"] for result in results)
    return {**results[0], "seconds": seconds, "engines": list(results)}


def _merged_snapshot(results: Sequence[Reply]) -> Reply:
    return {**results[0], "engines": list(results)}


def _merged_preview(results: Sequence[Reply]) -> Reply:
    """Of a dry run: what would happen to the requests of all engines."""
    if "requests" not in results[0]:
        return results[0]
    totals = [result["totals"] for result in results]
    return {**results[0], "requests": _numbered(results, "requests"), "totals": _sums(totals)}


def _merged_state(results: Sequence[Reply]) -> Reply:
    disabled = [r["relocation_disabled"] for r in results if r["relocation_disabled"]]
    return {
        "pool": merged_pool([result["pool"] for result in results]),
        "requests": _numbered(results, "requests"),
        "relocations": _numbered(results, "relocations"),
        "relocation_disabled": disabled[0] if disabled else None,
        "skips": _sums([result["skips"] for result in results]),
        "engine": _sums([result["engine"] for result in results]),
        "engines": [{"pool": r["pool"], "engine": r["engine"]} for r in results],
    }


def merged_pool(pools: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Gauges of all pools together: F is that of the union of their blocks."""
    merged: dict[str, float] = _sums(pools)
    held = merged["retained_blocks"]
    for name in _RATIOS:
        weighted = sum(pool[name] * pool["retained_blocks"] for pool in pools)
        merged[name] = weighted / held if held else 0.0
    return merged | {name: max(pool[name] for pool in pools) for name in _COMMON}


def _merged_receipt(results: Sequence[Reply]) -> Reply:
    """Sums; the policy is that of an engine that ran a sequence of the answer."""
    ran = [result for result in results if result["num_sequences"]] or results
    counts = _sums([{name: result[name] for name in _RECEIPT_COUNTS} for result in ran])
    return {**ran[0], **counts, "work": _sums([result["work"] for result in ran])}


def _numbered(results: Sequence[Reply], key: str) -> list[Reply]:
    return [{**item, "engine": i} for i, result in enumerate(results) for item in result[key]]


def _sums(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Sums by name; of an unknown number (None) the sum is unknown."""
    names = dict.fromkeys(name for part in parts for name in part)
    columns = {name: [part.get(name, 0) for part in parts] for name in names}
    return {name: None if None in values else sum(values) for name, values in columns.items()}


_MERGED: Mapping[str, Callable[[Sequence[Any]], Any]] = {
    "get_policy": _merged_policy,
    "policy_history": _merged_history,
    "blocks": _merged_blocks,
    "snapshot": _merged_snapshot,
    "state": _merged_state,
    "receipt": _merged_receipt,
    **dict.fromkeys(_CHANGES, _merged_preview),
}
