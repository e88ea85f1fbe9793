"""The contract between the token layer and an eviction policy (paper Alg. 1, line 2).

A policy sees logical tokens only: never a block, a slot or a model. It is asked for exactly
``num_victims`` tokens and answers with their ids. Budgets, protected tokens (sinks, recent) and
the validation of the answer are shared code, here and in :mod:`vtoken.eviction`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from vtoken.errors import ConfigError, PolicyError
from vtoken.types import BoolArray, IdArray


@dataclass(frozen=True, eq=False)
class LiveView:
    """What a policy may know about a request.

    Attributes:
        live_ids: ``[n]`` ids of live tokens whose K/V exists, ascending.
        num_tokens: logical length so far (evicted tokens included).
        num_prompt_tokens: length of the prompt.
        request_seed: depends on the prompt only, equal for equal prompts in every run.
    """

    live_ids: IdArray
    num_tokens: int
    num_prompt_tokens: int
    request_seed: int


class EvictionPolicy(ABC):
    """One eviction method. Subclasses are stateless: all state of a request is in the view."""

    name: ClassVar[str]
    summary: ClassVar[str]
    paper: ClassVar[str] = ""
    args_schema: ClassVar[dict[str, Any]] = {}
    """JSON schema of the properties that ``policy_args`` may carry."""
    evicts: ClassVar[bool] = True
    """Whether the policy ever evicts; False keeps every token."""

    def __init__(self, seed: int = 0, **args: Any) -> None:
        """Make the policy.

        Args:
            seed: of policies that draw random numbers.
            args: ``policy_args`` of the configuration.

        Raises:
            ConfigError: an argument is not in ``args_schema``.
        """
        for key, value in args.items():
            if key not in self.args_schema:
                known = ", ".join(self.args_schema) or "none"
                raise ConfigError(
                    f"policy_args.{key}", value, f"arguments of policy {self.name!r}: {known}"
                )
        self.seed = seed

    @abstractmethod
    def select_victims(self, view: LiveView, num_victims: int, protected: BoolArray) -> IdArray:
        """Choose the tokens to evict.

        Args:
            view: the request.
            num_victims: how many, at most the number of unprotected live tokens.
            protected: ``[n]`` aligned with ``view.live_ids``; True must not be chosen.

        Returns:
            ``[num_victims]`` distinct ids out of ``view.live_ids``, ascending. The same view
            and seed give the same ids.
        """


def protected_tokens(view: LiveView, sink_tokens: int, recent_tokens: int) -> BoolArray:
    """Live tokens that no policy may evict: the first and the newest of the request; ``[n]``."""
    ids = view.live_ids
    protected: BoolArray = (ids < sink_tokens) | (ids >= view.num_tokens - recent_tokens)
    return protected


def checked_victims(
    policy: EvictionPolicy, view: LiveView, num_victims: int, protected: BoolArray
) -> IdArray:
    """Ask the policy and refuse an answer that breaks its contract.

    Raises:
        PolicyError: wrong number, repeated, unordered, dead, unknown or protected ids.
    """
    victims = np.asarray(policy.select_victims(view, num_victims, protected))
    problem = _problem_with(victims, view, num_victims, protected)
    if problem:
        raise PolicyError(f"policy {policy.name!r}: {problem}")
    return victims.astype(np.int64)


def _problem_with(
    victims: IdArray, view: LiveView, num_victims: int, protected: BoolArray
) -> str | None:
    if victims.shape != (num_victims,) or victims.dtype.kind not in "iu":
        return f"expected {num_victims} integer ids, got {victims.dtype} {victims.shape}"
    if (np.diff(victims) <= 0).any():
        return "ids are not distinct and ascending"
    at = np.minimum(np.searchsorted(view.live_ids, victims), len(view.live_ids) - 1)
    wrong = view.live_ids[at] != victims
    if wrong.any():
        return f"token {victims[wrong][0]} is not live"
    if protected[at].any():
        return f"token {victims[protected[at]][0]} is protected"
    return None
