"""A sign of life from the engine core, in every mode: what readiness is judged by.

A utility method on vLLM's EngineCore, like the control channel, and so run between two steps: an
engine that hangs inside a step does not answer. It is asked about once a second and touches a few
numbers only.
"""

from __future__ import annotations

from typing import Any

from vtoken.integration.vllm.scheduler import VTokenSchedulerMixin


def vtoken_pulse(engine_core: Any) -> dict[str, Any]:
    """Counts of this moment; bound to EngineCore as a method by the plugin.

    Returns:
        ``running`` and ``waiting`` requests, and ``steps`` so far (``None`` in mode ``off``, where
        nobody counts them). With the token layer also ``relocation_disabled`` (why, or ``None``)
        and ``failed_relocations`` (a counter).
    """
    scheduler = engine_core.scheduler
    running, waiting = scheduler.get_request_counts()
    pulse: dict[str, Any] = {"running": running, "waiting": waiting, "steps": None}
    if isinstance(scheduler, VTokenSchedulerMixin):
        layer = scheduler.layer
        pulse["steps"] = scheduler.num_steps
        pulse["relocation_disabled"] = layer.control.relocation_disabled
        pulse["failed_relocations"] = layer.stats.counter("relocations_total", "failed")
    return pulse
