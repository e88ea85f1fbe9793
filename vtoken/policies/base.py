"""The contract between the token layer and an eviction policy (paper Alg. 1, line 2).

A policy sees logical tokens only: never a block, a slot or a model. It is asked for exactly
``num_victims`` tokens and answers with their ids. Budgets, protected tokens (sinks, recent) and
the validation of the answer are shared code, here and in :mod:`vtoken.eviction`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from vtoken.errors import ConfigError, PolicyError
from vtoken.observation import SIGNALS
from vtoken.types import BoolArray, IdArray

ScoreArray = NDArray[np.float64]
"""``[n]`` one importance per live token; the lowest die first."""


@dataclass(frozen=True, eq=False)
class LiveView:
    """What a policy may know about a request.

    Attributes:
        live_ids: ``[n]`` ids of live tokens whose K/V exists, ascending.
        num_tokens: logical length so far (evicted tokens included).
        num_prompt_tokens: length of the prompt.
        request_seed: depends on the prompt only, equal for equal prompts in every run.
        signals: what the policy declared in ``signals``, name to ``[n]``; what a name means is
            said in :mod:`vtoken.observation`. Zero where nothing was observed.
        page_size: tokens per page of :attr:`page_of` (the pool's block size).
    """

    live_ids: IdArray
    num_tokens: int
    num_prompt_tokens: int
    request_seed: int
    signals: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    page_size: int = 16

    @property
    def page_of(self) -> IdArray:
        """``[n]`` the page of each live token: the block that it was written to, counted along
        the request. It still lies there as long as no token of the page was relocated."""
        pages: IdArray = self.live_ids // self.page_size
        return pages


class EvictionPolicy(ABC):
    """One eviction method. Subclasses are stateless: all state of a request is in the view."""

    name: ClassVar[str]
    summary: ClassVar[str]
    paper: ClassVar[str] = ""
    args_schema: ClassVar[dict[str, Any]] = {}
    """JSON schema of the properties that ``policy_args`` may carry: ``type`` with ``default``,
    and for numbers ``minimum`` and ``maximum``."""
    evicts: ClassVar[bool] = True
    """Whether the policy ever evicts; False keeps every token."""
    signals: ClassVar[frozenset[str]] = frozenset()
    """Signals (:data:`vtoken.observation.SIGNALS`) that it needs; empty costs nothing."""
    whole_pages: ClassVar[bool] = False
    """Evicts whole pages only: it is asked for multiples of the page size, and tokens of pages
    that are not full or hold a protected token count as protected."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Refuse signals that nobody observes when the class is written, not in service."""
        super().__init_subclass__(**kwargs)
        unknown = sorted(cls.signals - SIGNALS)
        if unknown:
            raise PolicyError(
                f"policy {cls.name!r}: unknown signals {unknown}, known are {sorted(SIGNALS)}"
            )

    def __init__(self, seed: int = 0, /, **args: Any) -> None:
        """Make the policy.

        Args:
            seed: of policies that draw random numbers.
            args: ``policy_args`` of the configuration; with defaults, they become ``self.args``.

        Raises:
            ConfigError: an argument is not in ``args_schema`` or outside its bounds.
        """
        for key, value in args.items():
            if key not in self.args_schema:
                known = ", ".join(self.args_schema) or "none"
                raise ConfigError(
                    f"policy_args.{key}", value, f"arguments of policy {self.name!r}: {known}"
                )
            _check_argument(key, value, self.args_schema[key])
        defaults = {k: s["default"] for k, s in self.args_schema.items() if "default" in s}
        self.args: dict[str, Any] = {**defaults, **args}
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


_TYPES: dict[str, tuple[type, ...]] = {
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "string": (str,),
}


def _check_argument(name: str, value: object, schema: Mapping[str, Any]) -> None:
    """Refuse a value that its schema does not allow."""
    kind, low, high = schema["type"], schema.get("minimum"), schema.get("maximum")
    bound = f"of type {kind}"
    if low is not None or high is not None:
        bound += f" in {low} … {high}"
    # bool is an int to Python, not to JSON.
    allowed = type(value) in _TYPES[kind]
    if allowed and isinstance(value, int | float):
        allowed = (low is None or value >= low) and (high is None or value <= high)
    if not allowed:
        raise ConfigError(f"policy_args.{name}", value, bound)


class ScoredPolicy(EvictionPolicy):
    """A policy that only says how important each live token is."""

    @abstractmethod
    def score(self, view: LiveView) -> ScoreArray:
        """Importance of each live token, ``[n]``; a pure function of the view."""

    def select_victims(self, view: LiveView, num_victims: int, protected: BoolArray) -> IdArray:
        """The ``num_victims`` unprotected tokens of lowest score; of equals the older."""
        return view.live_ids[lowest(self.score(view), num_victims, protected)]


def lowest(scores: ScoreArray, num_victims: int, protected: BoolArray) -> IdArray:
    """Indices, ascending, of the lowest unprotected scores; of equals the first."""
    candidates = np.flatnonzero(~protected)
    order = np.argsort(scores[candidates], kind="stable")[:num_victims]
    chosen: IdArray = np.sort(candidates[order])
    return chosen


def protect_partial_pages(view: LiveView, protected: BoolArray) -> BoolArray:
    """``protected`` and every token of a page without ``page_size`` unprotected tokens; ``[n]``."""
    pages = view.page_of
    free = np.bincount(pages[~protected], minlength=int(pages[-1]) + 1 if len(pages) else 0)
    extended: BoolArray = protected | (free[pages] < view.page_size)
    return extended


def protected_tokens(view: LiveView, sink_tokens: int, recent_tokens: int) -> BoolArray:
    """Live tokens that no policy may evict: the first and the newest of the request; ``[n]``."""
    first, last = view.live_ids.searchsorted([sink_tokens, view.num_tokens - recent_tokens])
    protected = np.zeros(len(view.live_ids), np.bool_)
    protected[:first] = protected[last:] = True
    return protected


def protect_spans(view: LiveView, spans: Sequence[tuple[int, int]], protected: BoolArray) -> None:
    """Mark the tokens ``start … end - 1`` of each span, as far as they belong to the prompt.

    Args:
        view: the request.
        spans: ascending, not overlapping.
        protected: ``[n]`` changes.
    """
    for span in spans:
        ends = np.minimum(span, view.num_prompt_tokens)
        start, end = view.live_ids.searchsorted(ends)
        protected[start:end] = True


def checked_victims(
    policy: EvictionPolicy, view: LiveView, num_victims: int, protected: BoolArray
) -> IdArray:
    """Ask the policy and refuse an answer that breaks its contract.

    Raises:
        PolicyError: wrong number, repeated, unordered, dead, unknown or protected ids.
    """
    victims = np.asarray(policy.select_victims(view, num_victims, protected))
    if victims.dtype.kind == "u":  # differences of unsigned ids would wrap
        victims = victims.astype(np.int64)
    problem = _problem_with(victims, view, num_victims, protected)
    if problem:
        raise PolicyError(f"policy {policy.name!r}: {problem}")
    return victims.astype(np.int64)


def _problem_with(
    victims: IdArray, view: LiveView, num_victims: int, protected: BoolArray
) -> str | None:
    if victims.shape != (num_victims,) or victims.dtype.kind not in "iu":
        return f"expected {num_victims} integer ids, got {victims.dtype} {victims.shape}"
    if np.count_nonzero(victims[1:] <= victims[:-1]):
        return "ids are not distinct and ascending"
    at = np.minimum(view.live_ids.searchsorted(victims), len(view.live_ids) - 1)
    wrong = view.live_ids[at] != victims
    if np.count_nonzero(wrong):
        return f"token {victims[wrong][0]} is not live"
    if np.count_nonzero(protected[at]):
        return f"token {victims[protected[at]][0]} is protected"
    return None
