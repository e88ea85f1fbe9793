"""Hooks over a runner of either generation that write down what they are told."""

from __future__ import annotations

from typing import Any

import pytest

EACH_STEP = pytest.mark.parametrize(
    ("zero", "copies", "touches"), [(None, None, False), ([3], None, True), (None, [(1, 2)], True)]
)
"""What a step does to blocks, and whether it touches any."""


class HookNotes:
    """Mixed in before the hooks; ``calls`` is the stand-in's list."""

    calls: list[Any]

    def step_begins(self, scheduler_output: Any, *, touches_blocks: bool) -> None:
        """See :class:`RunnerHooks`."""
        self.calls.append(f"begins {touches_blocks}")

    def states_updated(self, scheduler_output: Any) -> None:
        """See :class:`RunnerHooks`."""
        self.calls.append("updated")

    def inputs_prepared(self, req_ids: list[str], num_new: Any, write_slots: Any) -> None:
        """See :class:`RunnerHooks`."""
        self.calls.append((req_ids, num_new, write_slots.tolist()))
