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
from typing import Any, Literal

from vtoken.errors import ConfigError

Mode = Literal["off", "naive", "lazy"]
ThetaFMode = Literal["fixed", "adaptive"]
Verify = Literal["off", "sampled", "full"]

MODES: tuple[str, ...] = ("off", "naive", "lazy")
THETA_F_MODES: tuple[str, ...] = ("fixed", "adaptive")
VERIFY_LEVELS: tuple[str, ...] = ("off", "sampled", "full")

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
        "max_blocks_per_request",
        "check_interval_steps",
        "score_interval_steps",
        "score_window_tokens",
    }
)
"""Fields that may change while requests run (``PATCH /admin/policy``)."""


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
    keep_ratio: float | None = None
    """Keep this fraction of a request's tokens, in (0, 1]. Excludes ``budget_tokens``."""
    budget_tokens: int | None = 1024
    """Keep at most this many tokens per request. Excludes ``keep_ratio``."""
    sink_tokens: int = 4
    """First tokens of a request that no policy may evict (attention sinks)."""
    recent_tokens: int = 32
    """Newest tokens of a request that no policy may evict."""
    evict_interval_tokens: int = 16
    """New tokens between two evictions of one request during decode."""
    evict_during_prefill: bool = False
    """Evict between the chunks of a prefill, too: a prompt larger than the free part of the pool
    is admitted as soon as its budget fits. What is evicted then depends on the chunks."""
    evict_free_ratio: float = 1.0
    """Evict only while free blocks / total blocks is at or below this, in [0, 1]. 1: always.
    Below 1 outputs depend on the load, and tokens may go early rather than a request."""
    theta_f: float = 0.25
    """Waste ratio F (Eq. 1) above which relocation is considered, in [0, 1)."""
    theta_f_mode: ThetaFMode = "fixed"
    """``adaptive``: θ_F starts at ``theta_f``, falls when waste spikes or the pool runs dry, and
    relaxes while it is calm."""
    theta_f_min: float = 0.05
    """Lower bound of the adaptive θ_F, in [0, 1)."""
    theta_f_max: float = 0.5
    """Upper bound of the adaptive θ_F, in [0, 1), at least ``theta_f_min``."""
    low_watermark_ratio: float = 0.5
    """Relocate only while free blocks / total blocks is at or below this, in [0, 1]."""
    headroom_blocks: int = 4
    """Blocks kept back from admission as destinations of relocations (lazy only)."""
    max_source_blocks: int = 32
    """B: most source blocks that one request's plan may empty."""
    relocate_shared: bool = False
    """Also copy live tokens out of shared blocks when all their holders can let go at once."""
    max_blocks_per_request: int | None = None
    """Evict when a request has filled this many blocks and pack it at once, instead of by
    ``evict_interval_tokens``, F and watermark; see ``docs/policies.md``. None: no cap."""
    check_interval_steps: int = 1
    """Engine steps between two looks for relocation work."""
    score_layers: tuple[int, ...] | None = None
    """Attention layers whose scores policies see, counted from 0; default: four, evenly spread."""
    score_interval_steps: int = 8
    """Decode steps of a request between two observations of its attention."""
    score_window_tokens: int = 16
    """Last queries of a prefill whose attention is observed."""
    verify: Verify = "off"
    """Online checks of I1, I2, I4: ``off``, ``sampled`` (every 16th plan) or ``full``."""
    record_evictions: bool = False
    """Keep a log of every eviction for offline proof. Grows without bound: tests only."""
    seed: int = 0
    """Seed of policies that draw random numbers."""

    def __post_init__(self) -> None:
        """Check every bound; see the field docstrings."""
        _check_choice("mode", self.mode, MODES)
        _check_choice("verify", self.verify, VERIFY_LEVELS)
        _check_policy(self.policy, self.policy_args)
        _check_bool("record_evictions", self.record_evictions)
        _check_bool("relocate_shared", self.relocate_shared)
        _check_budget(self.keep_ratio, self.budget_tokens)
        _check_int("sink_tokens", self.sink_tokens, 0, 4096)
        _check_int("recent_tokens", self.recent_tokens, 1, 1_000_000)
        _check_int("evict_interval_tokens", self.evict_interval_tokens, 1, 1_000_000)
        _check_bool("evict_during_prefill", self.evict_during_prefill)
        _check_ratio("evict_free_ratio", self.evict_free_ratio)
        for name in ("theta_f", "theta_f_min", "theta_f_max"):
            _check_ratio(name, getattr(self, name), upper_open=True)
        _check_choice("theta_f_mode", self.theta_f_mode, THETA_F_MODES)
        if self.theta_f_min > self.theta_f_max:
            bound = f"theta_f_min <= theta_f_max = {self.theta_f_max}"
            raise ConfigError("theta_f_min", self.theta_f_min, bound)
        _check_ratio("low_watermark_ratio", self.low_watermark_ratio)
        _check_int("headroom_blocks", self.headroom_blocks, 0, 1_000_000)
        _check_int("max_source_blocks", self.max_source_blocks, 2, 65_536)
        if self.max_blocks_per_request is not None:
            _check_int("max_blocks_per_request", self.max_blocks_per_request, 2, 1_000_000)
        _check_int("check_interval_steps", self.check_interval_steps, 1, 1_000_000)
        _check_int("score_interval_steps", self.score_interval_steps, 1, 1_000_000)
        _check_int("score_window_tokens", self.score_window_tokens, 1, 1024)
        object.__setattr__(self, "score_layers", _checked_layers(self.score_layers))
        _check_int("seed", self.seed, 0, 2**32 - 1)
        if self.budget_tokens is not None:
            protected = self.sink_tokens + self.recent_tokens
            if self.budget_tokens < protected + 1:
                raise ConfigError(
                    "budget_tokens",
                    self.budget_tokens,
                    f"budget_tokens > sink_tokens + recent_tokens = {protected}",
                )

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
            raise ConfigError("mode", "off", "naive or lazy while the engine runs")
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


def tokens_kept(num_tokens: int, keep_ratio: float) -> int:
    """⌈``num_tokens`` · ``keep_ratio``⌉, at least 1."""
    return max(1, -int(-num_tokens * keep_ratio // 1))


def unknown_field_hint(name: str, known: set[str] | frozenset[str], what: str = "fields") -> str:
    """The bound part of a :class:`ConfigError` for an unknown name, with the nearest known."""
    near = difflib.get_close_matches(name, sorted(known), n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"known {what} are {', '.join(sorted(known))}{hint}"


def _default(f: dataclasses.Field[Any]) -> Any:
    if f.default_factory is not dataclasses.MISSING:
        return f.default_factory()
    return f.default


def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(name, value, f"one of {', '.join(choices)}")


def _check_policy(policy: object, policy_args: object) -> None:
    if not isinstance(policy, str) or not policy:
        raise ConfigError("policy", policy, "the name of a policy")
    if not isinstance(policy_args, Mapping):
        raise ConfigError("policy_args", policy_args, "an object of argument names and values")


def _check_bool(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise ConfigError(name, value, "true or false")


def _check_int(name: str, value: object, low: int, high: int) -> None:
    bound = f"an integer with {low} <= {name} <= {high}"
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ConfigError(name, value, bound)


def _check_ratio(name: str, value: object, *, upper_open: bool = False) -> None:
    top = "<" if upper_open else "<="
    bound = f"a number with 0 <= {name} {top} 1"
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ConfigError(name, value, bound)
    if not 0 <= value <= 1 or (upper_open and value == 1):
        raise ConfigError(name, value, bound)


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


def _check_budget(keep_ratio: object, budget_tokens: object) -> None:
    if (keep_ratio is None) == (budget_tokens is None):
        value = {"keep_ratio": keep_ratio, "budget_tokens": budget_tokens}
        raise ConfigError(
            "keep_ratio|budget_tokens", value, "exactly one of keep_ratio and budget_tokens"
        )
    if budget_tokens is not None:
        _check_int("budget_tokens", budget_tokens, 1, 100_000_000)
        return
    _check_ratio("keep_ratio", keep_ratio)
    if keep_ratio == 0:
        raise ConfigError("keep_ratio", keep_ratio, "a number with 0 < keep_ratio <= 1")
