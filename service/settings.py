"""Settings of the service: the only place that reads the environment.

Every field of :class:`~vtoken.config.VTokenConfig` is a flag ``--vtoken-<field>`` and a variable
``VTOKEN_<FIELD>``; both lists are made from its dataclass fields. A flag beats a variable, a
variable beats the default. What only the HTTP process needs is in :class:`ServiceSettings`.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import os
from collections.abc import Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from pydantic import BeforeValidator, Field, SecretStr, ValidationError, create_model
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from vtoken.config import VTokenConfig
from vtoken.errors import ConfigError

ENV_PREFIX = "VTOKEN_"
FIELD_NAMES: tuple[str, ...] = tuple(f.name for f in dataclasses.fields(VTokenConfig))
OUR_PLUGINS: tuple[str, ...] = ("vtoken", "vtoken_http")

_OTHERS = ("CACHE_DIR", "EMBEDDED_GGUF", "VENV", "PYTHON", "TORCH", "NO_IOMP")
_PLUGIN_GROUPS = ("general", "platform", "io_processor", "stat_logger")
_EITHER = {"keep_ratio": "budget_tokens", "budget_tokens": "keep_ratio"}


class _Settings(BaseSettings):
    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX, env_ignore_empty=True, extra="ignore", hide_input_in_errors=True
    )


class ServiceSettings(_Settings):
    """Settings of the HTTP process, from the environment.

    Raises:
        ValidationError: use :func:`load_service_settings`, which gives one sentence.
    """

    admin_key: SecretStr | None = None
    """Bearer key of the admin routes. Without any key they are closed."""
    admin_key_file: Path | None = None
    """File with more admin keys, one per line; blank lines and ``#`` comments are skipped."""
    metrics_poll_seconds: float = Field(default=1.0, ge=0.05, le=3600)
    """Seconds between two readings of the engine's statistics for ``/metrics``."""
    engine_timeout_seconds: float = Field(default=10.0, gt=0, le=3600)
    """Longest wait for the engine's answer to an admin call or a reading."""

    def admin_keys(self) -> tuple[str, ...]:
        """All configured admin keys; empty means that the admin routes are closed.

        Raises:
            ConfigError: the key file cannot be read or holds no key.
        """
        own = (self.admin_key.get_secret_value().strip(),) if self.admin_key else ()
        listed = _read_keys(self.admin_key_file) if self.admin_key_file else ()
        return tuple(key for key in own + listed if key)


def load_service_settings() -> ServiceSettings:
    """Read :class:`ServiceSettings` from the environment.

    Raises:
        ConfigError: a variable cannot be read or is out of bounds.
    """
    try:
        return ServiceSettings()
    except ValidationError as error:
        raise _as_config_error(error, {}) from error


def load_config(flags: Mapping[str, object]) -> VTokenConfig:
    """The configuration of the token layer from flags, environment and defaults.

    Args:
        flags: field name to the value given on the command line (text is converted).

    Raises:
        ConfigError: a value cannot be converted or is out of bounds.
    """
    try:
        given = _ConfigSettings(**flags).model_dump(exclude_unset=True, exclude_none=True)
    except ValidationError as error:
        raise _as_config_error(error, flags) from error
    for name, other in _EITHER.items():
        if name in flags and other not in flags:
            given.pop(other, None)  # a flag for one beats a variable for the other
    return VTokenConfig.from_dict(given)


def environment_warnings() -> list[str]:
    """One sentence for each ``VTOKEN_*`` variable that looks like a mistyped setting."""
    known = {*(n.upper() for n in (*FIELD_NAMES, *ServiceSettings.model_fields)), *_OTHERS}
    sentences = []
    for variable in sorted(os.environ):
        name = variable.removeprefix(ENV_PREFIX)
        near = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.8)
        if name != variable and name not in known and near:
            sentences.append(
                f"{variable} is not a setting and is ignored; did you mean {ENV_PREFIX}{near[0]}?"
            )
    return sentences


def vllm_environment() -> dict[str, str]:
    """The variables that vLLM must find before it is imported; what the user set is kept.

    ``VLLM_PLUGINS`` gates every group of plugins and must name ours, so where the user has no
    list all installed ones are named: the other plugins load as they would without us.

    Raises:
        ConfigError: the environment asks for something that cannot be served.
    """
    if folder := os.environ.get("PROMETHEUS_MULTIPROC_DIR"):
        raise ConfigError("PROMETHEUS_MULTIPROC_DIR", folder, "must be unset: /metrics would miss")
    if os.environ.get("VLLM_USE_V2_MODEL_RUNNER", "0") != "0":
        raise ConfigError(
            "VLLM_USE_V2_MODEL_RUNNER", os.environ["VLLM_USE_V2_MODEL_RUNNER"], "must be 0 or unset"
        )
    listed = os.environ.get("VLLM_PLUGINS")
    theirs = _installed_plugins() if listed is None else listed.split(",")
    return {
        "VLLM_PLUGINS": ",".join(dict.fromkeys([*filter(None, theirs), *OUR_PLUGINS])),
        "VLLM_USE_V2_MODEL_RUNNER": "0",
        "VLLM_NO_USAGE_STATS": os.environ.get("VLLM_NO_USAGE_STATS", "1"),
    }


def _installed_plugins() -> list[str]:
    groups = (entry_points(group=f"vllm.{name}_plugins") for name in _PLUGIN_GROUPS)
    return [point.name for group in groups for point in group]


def is_object(hint: Any) -> bool:
    """Whether a field of this type is written as a JSON object."""
    return get_origin(hint) is not None and issubclass(get_origin(hint), Mapping)


def is_list(hint: Any) -> bool:
    """Whether a field of this type is written as a list, ``1,2`` or ``[1, 2]``."""
    return any(get_origin(part) is tuple for part in (hint, *get_args(hint)))


def _parse_object(value: object) -> object:
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError as error:
        raise ValueError(f"not JSON ({error})") from error


def _parse_list(value: object) -> object:
    if not isinstance(value, str):
        return value
    return [part.strip() for part in value.strip().removeprefix("[").removesuffix("]").split(",")]


def _field_type(hint: Any) -> Any:
    """The type to convert text to; bounds and choices are left to ``VTokenConfig``."""
    if get_origin(hint) is Literal:
        return str | None
    if is_list(hint):
        return Annotated[tuple[int, ...] | None, NoDecode, BeforeValidator(_parse_list)]
    if is_object(hint):
        return Annotated[dict[str, Any] | None, NoDecode, BeforeValidator(_parse_object)]
    return hint | None


def _make_config_settings() -> type[_Settings]:
    hints = get_type_hints(VTokenConfig)
    fields: dict[str, Any] = {n: (_field_type(hints[n]), None) for n in FIELD_NAMES}
    return create_model("_ConfigSettings", __base__=_Settings, **fields)


_ConfigSettings: Any = _make_config_settings()


def _read_keys(path: Path) -> tuple[str, ...]:
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        rule = f"a readable text file with one key per line ({error})"
        raise ConfigError("VTOKEN_ADMIN_KEY_FILE", str(path), rule) from error
    keys = tuple(line for line in lines if line and not line.startswith("#"))
    if not keys:
        raise ConfigError("VTOKEN_ADMIN_KEY_FILE", str(path), "a file with at least one key")
    return keys


def _as_config_error(error: ValidationError, flags: Mapping[str, object]) -> ConfigError:
    first = error.errors(include_url=False)[0]
    name = str(first["loc"][0])
    shown = name if name in flags else ENV_PREFIX + name.upper()
    rule = first["msg"].removeprefix("Value error, ")
    return ConfigError(shown, flags.get(name, os.environ.get(shown)), rule)
