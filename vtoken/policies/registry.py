"""Names → policies: what ``policy`` in the configuration may say."""

from __future__ import annotations

from typing import Any

from vtoken.config import VTokenConfig, unknown_field_hint
from vtoken.errors import ConfigError
from vtoken.policies.base import EvictionPolicy
from vtoken.policies.none import NonePolicy
from vtoken.policies.random import RandomPolicy
from vtoken.policies.streaming_llm import StreamingLLMPolicy

POLICIES: dict[str, type[EvictionPolicy]] = {
    cls.name: cls for cls in (NonePolicy, StreamingLLMPolicy, RandomPolicy)
}


def make_policy(config: VTokenConfig) -> EvictionPolicy:
    """The policy that ``config.policy`` names, made with ``config.policy_args``.

    Raises:
        ConfigError: no policy has that name, or an argument is unknown.
    """
    cls = POLICIES.get(config.policy)
    if cls is None:
        raise ConfigError("policy", config.policy, unknown_field_hint(config.policy, set(POLICIES)))
    return cls(seed=config.seed, **config.policy_args)


def catalogue() -> list[dict[str, Any]]:
    """Every policy with summary, paper and argument schema, as plain data."""
    return [
        {
            "name": cls.name,
            "summary": cls.summary,
            "paper": cls.paper,
            "args_schema": dict(cls.args_schema),
        }
        for cls in POLICIES.values()
    ]
