"""What settings that are read from the environment by their names have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic_settings import BaseSettings, SettingsConfigDict

from service.settings.layers import ENV_PREFIX


class FromEnvironment(BaseSettings):
    """Fields are variables with our prefix; an empty one is unset, and no value is repeated."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX, env_ignore_empty=True, extra="ignore", hide_input_in_errors=True
    )


def rule_of(error: Mapping[str, Any]) -> str:
    """What one of pydantic's errors says about a value."""
    return str(error["msg"]).removeprefix("Value error, ")
