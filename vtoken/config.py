"""The one configuration object of vToken.

CLI flags ``--vtoken-*``, environment ``VTOKEN_*`` and vLLM's
``additional_config["vtoken"]`` all end in a frozen :class:`VTokenConfig`. It is validated
when it is made: an instance that exists is within its bounds.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from types import UnionType
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from vtoken.bounds import ABOVE_ZERO, BELOW_ONE, RATIO, UP_TO_A_MILLION, Range
from vtoken.errors import ConfigError

Mode = Literal["off", "naive", "lazy"]
ThetaFMode = Literal["fixed", "adaptive"]
Verify = Literal["off", "sampled", "full"]

LIVE_FIELDS: frozenset[str] = frozenset(
    {
        "mode",
        "headroom_blocks",
        "verify",
        "policy",
        "policy_args",
        "keep_ratio",
        "budget_tokens",
        "sink_tokens",
        "recent_tokens",
        "evict_interval_tokens",
        "evict_during_prefill",
        "evict_free_ratio",
        "theta_f",
        "theta_f_mode",
        "theta_f_min",
        "theta_f_max",
        "low_watermark_ratio",
        "max_source_blocks",
        "relocate_shared",
        "relocate_into_cached",
        "max_blocks_per_request",
        "check_interval_steps",
        "score_interval_steps",
        "score_window_tokens",
    }
)
"""Fields that may change while requests run (``PATCH /admin/policy``)."""
LIVE_MODES: tuple[Mode, ...] = ("naive", "lazy")
"""What ``mode`` may change to meanwhile."""


@dataclass(frozen=True)
class VTokenConfig:
    """Settings of the token layer, each with default, unit and meaning.

    Raises:
        ConfigError: a value is outside its bound; names field, value and bound.
    """

    mode: Mode = "lazy"
    """``off``: stock vLLM. ``naive``: evict, free only empty blocks. ``lazy``: also repack."""
    policy: str = "streaming_llm"
    """Name of the eviction policy in the registry; ``none`` never evicts."""
    policy_args: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the policy itself, checked by its own schema."""
    keep_ratio: Annotated[float | None, ABOVE_ZERO] = None
    """Keep this fraction of a request's tokens, in (0, 1]. Excludes ``budget_tokens``."""
    budget_tokens: Annotated[int | None, Range(2, 100_000_000)] = 1024
    """Keep at most this many tokens per request, more than ``sink_tokens`` and ``recent_tokens``
    together. Excludes ``keep_ratio``."""
    sink_tokens: Annotated[int, Range(0, 4096)] = 4
    """First tokens of a request that no policy may evict (attention sinks)."""
    recent_tokens: Annotated[int, UP_TO_A_MILLION] = 32
    """Newest tokens of a request that no policy may evict."""
    evict_interval_tokens: Annotated[int, UP_TO_A_MILLION] = 16
    """New tokens between two evictions of one request during decode."""
    evict_during_prefill: bool = False
    """Evict between the chunks of a prefill, too: a prompt larger than the free part of the pool
    is admitted as soon as its budget fits. What is evicted then depends on the chunks. Refused
    without vLLM's chunked prefill, which is on by default."""
    evict_free_ratio: Annotated[float, RATIO] = 1.0
    """Evict only while free blocks / total blocks is at or below this, in [0, 1]. 1: always.
    Below 1 outputs depend on the load, and tokens may go early rather than a request."""
    theta_f: Annotated[float, BELOW_ONE] = 0.25
    """Waste ratio F (Eq. 1) above which relocation is considered, in [0, 1)."""
    theta_f_mode: ThetaFMode = "fixed"
    """``adaptive``: θ_F starts at ``theta_f``, falls when waste spikes or the pool runs dry, and
    relaxes while it is calm."""
    theta_f_min: Annotated[float, BELOW_ONE] = 0.05
    """Lower bound of the adaptive θ_F, in [0, 1)."""
    theta_f_max: Annotated[float, BELOW_ONE] = 0.5
    """Upper bound of the adaptive θ_F, in [0, 1), at least ``theta_f_min``."""
    low_watermark_ratio: Annotated[float, RATIO] = 0.5
    """Relocate only while free blocks / total blocks is at or below this, in [0, 1]."""
    headroom_blocks: Annotated[int, Range(0, 1_000_000)] = 4
    """Blocks kept back from admission as destinations of relocations (lazy only)."""
    max_source_blocks: Annotated[int, Range(2, 65_536)] = 32
    """B: most source blocks that one request's plan may empty."""
    relocate_shared: bool = False
    """Also copy live tokens out of shared blocks when all their holders can let go at once."""
    relocate_into_cached: bool = False
    """Relocate into blocks that hold cached prefixes also while no request lacks blocks."""
    max_blocks_per_request: Annotated[int | None, Range(2, 1_000_000)] = None
    """Evict when a request has filled this many blocks and pack it at once, instead of by
    ``evict_interval_tokens``, F and watermark; see ``docs/policies.md``. None: no cap."""
    check_interval_steps: Annotated[int, UP_TO_A_MILLION] = 1
    """Engine steps between two looks for relocation work."""
    score_layers: tuple[int, ...] | None = None
    """Attention layers whose scores policies see, counted from 0; default: four, evenly spread."""
    score_interval_steps: Annotated[int, UP_TO_A_MILLION] = 8
    """Decode steps of a request between two observations of its attention."""
    score_window_tokens: Annotated[int, Range(1, 1024)] = 16
    """Last queries of a prefill whose attention is observed."""
    verify: Verify = "off"
    """Online checks of I1, I2, I4: ``off``, ``sampled`` (every 16th batch) or ``full``."""
    record_evictions: bool = False
    """Keep a log of every eviction for offline proof. Grows without bound: tests only."""
    seed: Annotated[int, Range(0, 2**32 - 1)] = 0
    """Seed of policies that draw random numbers."""

    def __post_init__(self) -> None:
        """Check every bound; see the field docstrings."""
        for name, hint in field_hints().items():
            _check(name, getattr(self, name), hint)
        _check_policy(self.policy, self.policy_args)
        if (self.keep_ratio is None) == (self.budget_tokens is None):
            value = {"keep_ratio": self.keep_ratio, "budget_tokens": self.budget_tokens}
            bound = "exactly one of keep_ratio and budget_tokens"
            raise ConfigError("keep_ratio|budget_tokens", value, bound)
        if self.theta_f_min > self.theta_f_max:
            bound = f"theta_f_min <= theta_f_max = {self.theta_f_max}"
            raise ConfigError("theta_f_min", self.theta_f_min, bound)
        object.__setattr__(self, "score_layers", _checked_layers(self.score_layers))
        protected = self.sink_tokens + self.recent_tokens
        if self.budget_tokens is not None and self.budget_tokens <= protected:
            bound = f"budget_tokens > sink_tokens + recent_tokens = {protected}"
            raise ConfigError("budget_tokens", self.budget_tokens, bound)

    @property
    def relocates(self) -> bool:
        """Whether live tokens are moved to empty blocks (mode ``lazy``)."""
        return self.mode == "lazy"

    def target_live_tokens(self, num_tokens: int) -> int:
        """Live tokens that a request of ``num_tokens`` logical tokens may keep."""
        if self.budget_tokens is not None:
            return self.budget_tokens
        assert self.keep_ratio is not None
        return tokens_kept(num_tokens, self.keep_ratio)

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready copy, the inverse of :meth:`from_dict`."""
        return {**dataclasses.asdict(self), "policy_args": dict(self.policy_args)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> VTokenConfig:
        """Build from a mapping; absent fields take their defaults.

        Giving ``keep_ratio`` alone drops the default ``budget_tokens``.

        Raises:
            ConfigError: unknown field (the nearest name is suggested) or value out of bounds.
        """
        known = {f.name for f in dataclasses.fields(cls)}
        for name in values:
            if name not in known:
                raise ConfigError(name, values[name], unknown_field_hint(name, known))
        merged = dict(values)
        if merged.get("keep_ratio") is not None:
            merged.setdefault("budget_tokens", None)
        return cls(**merged)

    def patched(self, changes: Mapping[str, Any]) -> VTokenConfig:
        """A copy with live-changeable fields replaced (JSON merge patch semantics).

        Setting one of ``keep_ratio`` and ``budget_tokens`` clears the other; changing
        ``policy`` without ``policy_args`` drops the old policy's arguments; ``null`` resets a
        field to its default (``keep_ratio``, when in use: the default ``budget_tokens``).

        Raises:
            ConfigError: the field is unknown or fixed while the engine runs, or out of bounds.
        """
        for name in changes:
            if name not in LIVE_FIELDS:
                raise ConfigError(name, changes[name], unknown_field_hint(name, LIVE_FIELDS))
        if changes.get("mode", self.mode) == "off":
            raise ConfigError("mode", "off", f"{' or '.join(LIVE_MODES)} while the engine runs")
        defaults = {f.name: _default(f) for f in dataclasses.fields(self)}
        values = {name: defaults[name] if v is None else v for name, v in changes.items()}
        if changes.get("keep_ratio") is not None and changes.get("budget_tokens") is None:
            values["budget_tokens"] = None
        elif changes.get("budget_tokens") is not None and changes.get("keep_ratio") is None:
            values["keep_ratio"] = None
        elif "keep_ratio" in changes and self.keep_ratio is not None:
            values["budget_tokens"] = defaults["budget_tokens"]
        elif "budget_tokens" in changes and self.keep_ratio is not None:
            values["budget_tokens"] = None
        if "policy" in values and values["policy"] != self.policy:
            values.setdefault("policy_args", {})
        return dataclasses.replace(self, **values)


_MAX_HINTED_CHARS = 100
"""Of a name: a comparison takes time with its length, and no name of ours is as long."""


def tokens_kept(num_tokens: int, keep_ratio: float) -> int:
    """⌈``num_tokens`` · ``keep_ratio``⌉, at least 1."""
    return max(1, -int(-num_tokens * keep_ratio // 1))


def unknown_field_hint(name: str, known: set[str] | frozenset[str], what: str = "fields") -> str:
    """The bound part of a :class:`ConfigError` for an unknown name, with the nearest known."""
    near = difflib.get_close_matches(name[:_MAX_HINTED_CHARS], sorted(known), n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"known {what} are {', '.join(sorted(known))}{hint}"


def _default(f: dataclasses.Field[Any]) -> Any:
    if f.default_factory is not dataclasses.MISSING:
        return f.default_factory()
    return f.default


@cache
def field_hints() -> dict[str, FieldHint]:
    """What the type of each field of :class:`VTokenConfig` says, by name and in their order."""
    hints = get_type_hints(VTokenConfig, include_extras=True)
    return {name: FieldHint.parse(hint) for name, hint in hints.items()}


@dataclass(frozen=True)
class FieldHint:
    """A field's type.

    Attributes:
        kinds: what a value may be, without None.
        is_optional: whether None is a value.
        choices: the only values, if they are listed.
        range: bounds of a number.
    """

    kinds: tuple[Any, ...]
    is_optional: bool
    choices: tuple[str, ...] = ()
    range: Range | None = None

    @classmethod
    def parse(cls, hint: Any) -> FieldHint:
        """From an annotation as they are above."""
        inner, *extras = get_args(hint) if get_origin(hint) is Annotated else (hint,)
        if get_origin(inner) is Literal:
            return cls((str,), False, choices=get_args(inner))
        kinds = get_args(inner) if isinstance(inner, UnionType) else (inner,)
        some = tuple(kind for kind in kinds if kind is not type(None))
        return cls(some, len(some) < len(kinds), range=extras[0] if extras else None)


def _check(name: str, value: object, hint: FieldHint) -> None:
    """Of a choice, a boolean or a number; the others have rules of their own."""
    if value is None and hint.is_optional:
        return
    if hint.choices and value not in hint.choices:
        raise ConfigError(name, value, f"one of {', '.join(hint.choices)}")
    if hint.kinds == (bool,) and not isinstance(value, bool):
        raise ConfigError(name, value, "true or false")
    if hint.range is not None:
        is_whole = hint.kinds == (int,)
        if value not in hint.range or (is_whole and not isinstance(value, int)):
            what = "an integer" if is_whole else "a number"
            raise ConfigError(name, value, f"{what} with {hint.range.text(name)}")


def _check_policy(policy: object, policy_args: object) -> None:
    if not isinstance(policy, str) or not policy:
        raise ConfigError("policy", policy, "the name of a policy")
    if not isinstance(policy_args, Mapping):
        raise ConfigError("policy_args", policy_args, "an object of argument names and values")


def _checked_layers(value: Any) -> tuple[int, ...] | None:
    """The layers as a tuple, ascending (JSON and flags give lists and other orders)."""
    if value is None:
        return None
    bound = "a list of distinct layer numbers, each >= 0, not empty"
    if not isinstance(value, list | tuple) or not value:
        raise ConfigError("score_layers", value, bound)
    if not all(isinstance(v, int) and not isinstance(v, bool) and v >= 0 for v in value):
        raise ConfigError("score_layers", value, bound)
    if len(set(value)) != len(value):
        raise ConfigError("score_layers", value, bound)
    return tuple(sorted(value))
