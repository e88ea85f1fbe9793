"""What one request may say about its own eviction, through vLLM's ``vllm_xargs``.

``vllm_xargs`` carries strings, numbers and flat lists of them (a JSON boolean arrives as 0 or 1),
so protected spans and policy arguments are written as strings. The API process parses them to
answer 400 before anything is queued; the scheduler parses them again when the request arrives,
since offline callers of ``LLM`` pass no API process.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

from vtoken.config import VTokenConfig, tokens_kept, unknown_field_hint
from vtoken.errors import ConfigError

PREFIX = "vtoken_"
"""Of every key that is ours; keys of others are none of our business."""

MAX_BUDGET_TOKENS = 100_000_000
MAX_SPANS = 64
MAX_ARGS_CHARS = 4096

Span = tuple[int, int]
"""``(start, end)``: tokens ``start … end - 1``, counted from the start of the prompt."""

_SPAN = re.compile(r"\s*(\d{1,9}):(\d{1,9})\s*", re.ASCII)
_KEY = re.compile(r"[A-Za-z0-9_-]{1,64}")


@dataclass(frozen=True)
class RequestOptions:
    """Settings of one request; what is not given is the service's, also after a change of it.

    Raises:
        ConfigError: a value is outside its bound; names the key, the value and the bound.
    """

    policy: str | None = None
    """Name of the eviction policy."""
    policy_args: str | None = None
    """Arguments of ``policy``: a JSON object, written as a string."""
    keep_ratio: float | None = None
    """Keep this fraction of the request's tokens, in (0, 1]. Excludes ``budget_tokens``."""
    budget_tokens: int | None = None
    """Keep at most this many tokens; sinks, recent and protected tokens stay in any case."""
    protect: tuple[Span, ...] = ()
    """Spans of the prompt that no policy may evict: ``"0:35,100:120"``, or a list of such. A
    span that ends behind the prompt protects what the prompt has of it."""
    evict: bool = True
    """False: nothing of this request is ever evicted."""
    receipt: bool | str = False
    """Whether the answer ends with a receipt; inside the engine, the key to fetch it by."""

    policy_key: tuple[str, str] | None = field(default=None, init=False)
    """Policy and arguments that are the request's own, as ``policy_for`` takes them."""

    def __post_init__(self) -> None:
        """Bring every field into its final form; see the field docstrings."""
        _set(self, "evict", _checked_bool("evict", self.evict))
        _set(self, "receipt", _checked_receipt(self.receipt))
        _set(self, "protect", _checked_spans(self.protect))
        _check_budget(self.keep_ratio, self.budget_tokens)
        _set(self, "policy_key", _policy_key(self))
        if not self.evict:
            _check_nothing_else(self)

    @classmethod
    def parse(cls, extra_args: Mapping[str, Any] | None) -> RequestOptions:
        """Read the keys that start with ``vtoken_``.

        Raises:
            ConfigError: an unknown key (the nearest is suggested) or a value out of bounds.
        """
        ours = {n: v for n, v in (extra_args or {}).items() if str(n).startswith(PREFIX)}
        if not ours:
            return NO_OPTIONS
        for name, value in ours.items():
            if name not in KEYS:
                raise ConfigError(name, value, unknown_field_hint(name, KEYS, "keys"))
            if value is None:
                raise ConfigError(name, value, "not null; leave the key out instead")
        return cls(**{name.removeprefix(PREFIX): value for name, value in ours.items()})

    @property
    def has_own_budget(self) -> bool:
        """Whether changes of the service's budget pass this request by."""
        return not self.evict or self.keep_ratio is not None or self.budget_tokens is not None

    def target_live_tokens(self, config: VTokenConfig, num_tokens: int) -> int:
        """Live tokens that the request may keep at ``num_tokens`` logical tokens."""
        if self.budget_tokens is not None:
            return self.budget_tokens
        if self.keep_ratio is not None:
            return tokens_kept(num_tokens, self.keep_ratio)
        return config.target_live_tokens(num_tokens)

    def check_budget_above(self, always_kept: int) -> None:
        """Refuse a budget that the service's present sinks and recent window use up.

        Raises:
            ConfigError: names ``vtoken_budget_tokens``.
        """
        if self.budget_tokens is not None and self.budget_tokens <= always_kept:
            bound = f"vtoken_budget_tokens > sink_tokens + recent_tokens = {always_kept}"
            raise ConfigError("vtoken_budget_tokens", self.budget_tokens, bound)


KEYS: frozenset[str] = frozenset(
    PREFIX + f.name for f in dataclasses.fields(RequestOptions) if f.init
)
"""The keys of ``vllm_xargs`` that exist."""


def _set(options: RequestOptions, name: str, value: object) -> None:
    object.__setattr__(options, name, value)


def _checked_bool(name: str, value: object) -> bool:
    if isinstance(value, bool | int) and value in (0, 1):
        return bool(value)
    raise ConfigError(PREFIX + name, value, "true or false")


def _checked_receipt(value: object) -> bool | str:
    if not isinstance(value, str):
        return _checked_bool("receipt", value)
    if not _KEY.fullmatch(value):
        bound = "true, false, or a key of 1 to 64 letters, digits, '_' and '-'"
        raise ConfigError("vtoken_receipt", value, bound)
    return value


def _check_budget(keep_ratio: object, budget_tokens: object) -> None:
    if keep_ratio is not None:
        number = isinstance(keep_ratio, int | float) and not isinstance(keep_ratio, bool)
        if not (number and 0 < keep_ratio <= 1):  # type: ignore[operator]
            bound = "a number with 0 < vtoken_keep_ratio <= 1"
            raise ConfigError("vtoken_keep_ratio", keep_ratio, bound)
        if budget_tokens is not None:
            bound = "not together with vtoken_budget_tokens"
            raise ConfigError("vtoken_keep_ratio", keep_ratio, bound)
    if budget_tokens is not None:
        whole = isinstance(budget_tokens, int) and not isinstance(budget_tokens, bool)
        if not (whole and 1 <= budget_tokens <= MAX_BUDGET_TOKENS):  # type: ignore[operator]
            bound = f"an integer with 1 <= vtoken_budget_tokens <= {MAX_BUDGET_TOKENS}"
            raise ConfigError("vtoken_budget_tokens", budget_tokens, bound)


def _checked_spans(value: object) -> tuple[Span, ...]:
    """The spans, ascending and joined where they touch."""
    if value == ():
        return ()
    parts = value.split(",") if isinstance(value, str) else value
    found = [_span(part) for part in parts] if isinstance(parts, list | tuple) else []
    spans = [span for span in found if span is not None]
    if not spans or len(spans) < len(found) or len(spans) > MAX_SPANS:
        bound = (
            f'1 to {MAX_SPANS} spans start:end of prompt tokens, start < end, as in "0:35,100:120"'
        )
        raise ConfigError("vtoken_protect", value, bound)
    joined: list[Span] = []
    for start, end in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return tuple(joined)


def _span(part: object) -> Span | None:
    match = _SPAN.fullmatch(part) if isinstance(part, str) else None
    if match is None:
        return None
    start, end = int(match[1]), int(match[2])
    return (start, end) if start < end else None


def _policy_key(options: RequestOptions) -> tuple[str, str] | None:
    policy, text = options.policy, options.policy_args
    if policy is not None and (not isinstance(policy, str) or not policy):
        raise ConfigError("vtoken_policy", policy, "the name of a policy")
    if text is None:
        own = policy if options.evict else "none"
        return None if own is None else (own, "{}")
    if policy is None:
        raise ConfigError("vtoken_policy_args", text, "only together with vtoken_policy")
    return policy, json.dumps(_checked_args(text), sort_keys=True)


def _checked_args(text: object) -> dict[str, Any]:
    """The arguments; whether the policy has them is for the policy to say."""
    bound = (
        f"a JSON object written as a string of at most {MAX_ARGS_CHARS} characters, each name once"
    )
    if not isinstance(text, str) or len(text) > MAX_ARGS_CHARS:
        raise ConfigError("vtoken_policy_args", text, bound)
    try:
        args = json.loads(text, object_pairs_hook=_members, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise ConfigError("vtoken_policy_args", text, bound) from error
    if not isinstance(args, dict):
        raise ConfigError("vtoken_policy_args", text, bound)
    return args


def _members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Of two members of one name the last would count, and the other be lost without a word."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name stands twice")
    return found


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _check_nothing_else(options: RequestOptions) -> None:
    for name in ("policy", "policy_args", "keep_ratio", "budget_tokens", "protect"):
        value = getattr(options, name)
        if value not in (None, ()):
            raise ConfigError(PREFIX + name, value, "not together with vtoken_evict=false")


NO_OPTIONS = RequestOptions()
"""Everything as the service has it."""
