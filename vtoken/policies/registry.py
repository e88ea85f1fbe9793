"""Names → policies: what ``policy`` in the configuration may say.

Policies of other packages join through the entry point group :data:`GROUP`; they are looked for
when a policy is first asked for, so installing one costs an engine without it nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache, lru_cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from vtoken.config import VTokenConfig, unknown_field_hint
from vtoken.errors import ConfigError, PolicyError
from vtoken.policies.base import EvictionPolicy
from vtoken.policies.h2o import H2OPolicy
from vtoken.policies.knorm import KNormPolicy
from vtoken.policies.none import NonePolicy
from vtoken.policies.paged_eviction import PagedEvictionPolicy
from vtoken.policies.random import RandomPolicy
from vtoken.policies.rkv import RKVPolicy
from vtoken.policies.scissorhands import ScissorhandsPolicy
from vtoken.policies.snapkv import SnapKVPolicy
from vtoken.policies.streaming_llm import StreamingLLMPolicy
from vtoken.policies.tova import TOVAPolicy
from vtoken.request_options import PREFIX

GROUP = "vtoken.policies"
"""Entry point group of policies from other packages; the point's name is the policy's."""

POLICIES: dict[str, type[EvictionPolicy]] = {
    cls.name: cls
    for cls in (
        NonePolicy,
        StreamingLLMPolicy,
        RandomPolicy,
        H2OPolicy,
        ScissorhandsPolicy,
        TOVAPolicy,
        SnapKVPolicy,
        KNormPolicy,
        RKVPolicy,
        PagedEvictionPolicy,
    )
}
"""The policies of this package."""


def make_policy(config: VTokenConfig) -> EvictionPolicy:
    """The policy that ``config.policy`` names, made with ``config.policy_args``.

    Raises:
        ConfigError: no policy has that name, an argument is unknown or out of bounds, or a
            policy of another package cannot be used (says which and why).
    """
    return _make(config.policy, config.policy_args, config.seed)


@lru_cache(maxsize=256)
def policy_for(name: str, args_json: str, seed: int) -> EvictionPolicy:
    """The policy of requests that name their own; equal names and arguments share one object.

    Args:
        name: of the policy.
        args_json: its arguments as a JSON object.
        seed: see :class:`EvictionPolicy`.

    Raises:
        ConfigError: as :func:`make_policy`, with the keys of ``vllm_xargs`` as field names.
    """
    try:
        return _make(name, json.loads(args_json), seed)
    except ConfigError as error:
        raise ConfigError(PREFIX + error.field, error.value, error.bound) from error


def _make(name: str, args: Mapping[str, Any], seed: int) -> EvictionPolicy:
    try:
        known = all_policies()
    except PolicyError as error:
        raise ConfigError("policy", name, str(error)) from error
    cls = known.get(name)
    if cls is None:
        raise ConfigError("policy", name, unknown_field_hint(name, set(known), "policies"))
    return cls(seed, **args)


def catalogue() -> list[dict[str, Any]]:
    """Every policy with summary, paper and argument schema, as plain data."""
    return [
        {
            "name": cls.name,
            "summary": cls.summary,
            "paper": cls.paper,
            "args_schema": dict(cls.args_schema),
        }
        for cls in all_policies().values()
    ]


@cache
def all_policies() -> dict[str, type[EvictionPolicy]]:
    """The policies of this package and of installed others, by name.

    Raises:
        PolicyError: two sources give the same name, or a point does not lead to a policy.
    """
    found = dict(POLICIES)
    sources = dict.fromkeys(POLICIES, "vtoken-serve")
    for point in entry_points(group=GROUP):
        cls, source = _load(point), _source(point)
        if cls.name in found:
            raise PolicyError(
                f"policy {cls.name!r} comes from both {sources[cls.name]} and {source}"
            )
        found[cls.name], sources[cls.name] = cls, source
    return found


def _load(point: EntryPoint) -> type[EvictionPolicy]:
    try:
        cls = point.load()
    except Exception as error:
        raise PolicyError(f"policy {point.name!r} from {_source(point)}: {error}") from error
    if not (isinstance(cls, type) and issubclass(cls, EvictionPolicy)):
        raise PolicyError(f"{_source(point)}: {point.value} is no subclass of EvictionPolicy")
    if cls.name != point.name:
        raise PolicyError(f"{_source(point)}: point {point.name!r} leads to policy {cls.name!r}")
    return cls


def _source(point: EntryPoint) -> str:
    package = point.dist.name if point.dist else "unknown package"
    return f"{package} ({point.value})"
