"""The control channel: one utility method on vLLM's EngineCore.

The API process calls it by name over vLLM's own socket; EngineCore runs it between steps, so
a change takes effect on the next step and never in the middle of one.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from vtoken.block_map import block_map
from vtoken.config import LIVE_FIELDS, VTokenConfig
from vtoken.errors import ConfigError, VTokenError
from vtoken.history import MAX_CHANGES, ChangeInfo, diff
from vtoken.integration.vllm.block_manager import VLLMBlockPool
from vtoken.integration.vllm.scheduler import VTokenSchedulerMixin, release_documents
from vtoken.policies.registry import catalogue

Payload = dict[str, Any]


def vtoken_call(engine_core: Any, op: str, payload: Payload | None = None) -> Payload:
    """Answer one control call; bound to EngineCore as a method by the plugin.

    Args:
        engine_core: vLLM's EngineCore.
        op: a key of :data:`OPERATIONS`.
        payload: its arguments.

    Returns:
        ``{"ok": result}``, or ``{"error": {type, field, value, bound, message}}``; it raises
        nothing, since an exception here would cross the socket as a bare string.
    """
    scheduler = engine_core.scheduler
    if not isinstance(scheduler, VTokenSchedulerMixin):
        return _error("ModeOff", "vToken is off in this engine")
    handler = OPERATIONS.get(op)
    if handler is None:
        return _error("UnknownOperation", f"no operation {op!r}: {', '.join(OPERATIONS)}")
    try:
        return {"ok": handler(scheduler, payload or {})}
    except ConfigError as error:
        return _error("ConfigError", str(error), error.field, repr(error.value), error.bound)
    except VersionConflictError as error:
        return _error("VersionConflict", str(error))
    except TooLateError as error:
        return _error("TooLate", str(error))


class VersionConflictError(VTokenError):
    """The policy document changed since the caller read it."""


class TooLateError(VTokenError):
    """The caller has given the change up, and may have sent another."""


def _error(
    kind: str, message: str, field: str | None = None, value: str | None = None, bound: Any = None
) -> Payload:
    details = {"type": kind, "message": message, "field": field, "value": value, "bound": bound}
    return {"error": details}


def _snapshot(scheduler: VTokenSchedulerMixin, payload: Payload) -> Payload:
    return scheduler.layer.snapshot()


def _get_policy(scheduler: VTokenSchedulerMixin, payload: Payload) -> Payload:
    layer = scheduler.layer
    document = _live_fields(layer.config)
    return {"version": layer.policy_version, "document": document, "mode": layer.config.mode}


def _live_fields(config: VTokenConfig) -> Payload:
    values = config.to_dict()
    return {name: values[name] for name in values if name in LIVE_FIELDS}


def _set_policy(scheduler: VTokenSchedulerMixin, payload: Payload) -> Payload:
    """A merge patch: ``changes``, and what :func:`_change` takes."""
    config = scheduler.layer.config.patched(payload["changes"])
    return _change(scheduler, payload, config, _info(payload, "patch"))


def _rollback_policy(scheduler: VTokenSchedulerMixin, payload: Payload) -> Payload:
    """Back to the values of ``version`` (default: the one before), and what _change takes."""
    wanted = scheduler.layer.control.history.find(payload.get("version"))
    info = _info(payload, "rollback", rolled_back_to=wanted.version)
    return _change(scheduler, payload, wanted.config, info)


def _info(payload: Payload, action: str, **more: Any) -> ChangeInfo:
    given = {name: payload[name] for name in ("by", "note", "apply_to") if payload.get(name)}
    return ChangeInfo(action=action, **given, **more)


def _change(
    scheduler: VTokenSchedulerMixin, payload: Payload, config: VTokenConfig, info: ChangeInfo
) -> Payload:
    """Put ``config`` in force, or with ``dry_run`` say what that would do.

    ``next_version``, if given, is the least that the document gets: other engines have had more.
    ``deadline``, if given, is when the caller stops waiting, on this host's monotonic clock.

    Raises:
        VersionConflictError: ``expected_version`` is given and is not the present one.
        TooLateError: the deadline has passed.
        ConfigError: the configuration cannot be used.
    """
    layer = scheduler.layer
    expected = payload.get("expected_version")
    if expected is not None and expected != layer.policy_version:
        raise VersionConflictError(
            f"policy is at version {layer.policy_version}, the change expects {expected}"
        )
    if payload.get("dry_run"):
        found = layer.control.preview(config, info)
        return {**_get_policy(scheduler, {}), "document": _live_fields(config), **found}
    deadline = payload.get("deadline")
    if deadline is not None and time.monotonic() > deadline:
        raise TooLateError("the engine came to the change too late, and did not make it")
    warnings = layer.control.warnings(config, info)
    found = {"changes": diff(layer.config, config), "warnings": warnings}
    layer.control.change(config, info, payload.get("next_version"))
    release_documents(layer, scheduler.requests)
    return {**_get_policy(scheduler, {}), **found}


def _policy_history(scheduler: VTokenSchedulerMixin, payload: Payload) -> Payload:
    layer = scheduler.layer
    return {
        "version": layer.policy_version,
        "history": [change.to_dict() for change in layer.control.history],
        "max_changes": MAX_CHANGES,
    }


def _state(scheduler: VTokenSchedulerMixin, payload: Payload) -> Payload:
    layer = scheduler.layer
    skips = layer.stats.snapshot()["counters"]["reclaim_skipped_total"]
    num_running, num_waiting = scheduler.get_request_counts()
    return {
        "pool": layer.pool_state(),
        "requests": [_request_state(scheduler, req_id) for req_id in layer.requests],
        "relocations": list(scheduler.recent_relocations),
        "relocation_disabled": layer.control.relocation_disabled,
        "skips": {labels[0]: value for labels, value in skips},
        "engine": {"running": num_running, "waiting": num_waiting, "steps": scheduler.num_steps},
    }


def _request_state(scheduler: VTokenSchedulerMixin, req_id: str) -> Payload:
    kv = scheduler.layer.requests[req_id]
    request = scheduler.requests[req_id]
    return {
        "request_id": req_id,
        "status": request.status.name.lower(),
        "policy": scheduler.layer.evictor.policy_of(kv).name,
        "policy_version": scheduler.layer.evictor.document_of(kv).version,
        "num_tokens": request.num_tokens,
        "num_computed_tokens": request.num_computed_tokens,
        "live_tokens": kv.table.num_live,
        "evicted_tokens": kv.num_evicted,
        "retained_blocks": kv.blocks.retained,
        "ideal_blocks": kv.ideal_blocks,
    }


def _blocks(scheduler: VTokenSchedulerMixin, payload: Payload) -> Payload:
    start = time.perf_counter()
    layer = scheduler.layer
    pool = VLLMBlockPool(scheduler.kv_cache_manager)
    cells = block_map(
        layer.requests.values(),
        pool.all_references(),
        layer.reclamation.destinations_in_flight(),
        pool.block_size,
        payload["max_cells"],
    )
    spent = time.perf_counter() - start
    return {**cells, "policy_version": layer.policy_version, "seconds": spent}


def _policies(scheduler: VTokenSchedulerMixin, payload: Payload) -> list[Payload]:
    return catalogue()


def _evictions(scheduler: VTokenSchedulerMixin, payload: Payload) -> list[Any]:
    return list(scheduler.eviction_log)


def _receipt(scheduler: VTokenSchedulerMixin, payload: Payload) -> Payload:
    return scheduler.layer.receipt(payload["key"])


OPERATIONS: dict[str, Callable[[VTokenSchedulerMixin, Payload], Any]] = {
    "snapshot": _snapshot,
    "get_policy": _get_policy,
    "set_policy": _set_policy,
    "rollback_policy": _rollback_policy,
    "policy_history": _policy_history,
    "state": _state,
    "blocks": _blocks,
    "policies": _policies,
    "evictions": _evictions,
    "receipt": _receipt,
}
