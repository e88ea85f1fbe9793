"""Settings that only the HTTP process needs: keys, probes, limits, log."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, SecretStr, ValidationError
from pydantic_settings import (
    BaseSettings,
    InitSettingsSource,
    PydanticBaseSettingsSource,
)

from service.auth_keys import KeyRing, KeySources, bare_key
from service.settings.base import FromEnvironment, rule_of
from service.settings.given import file_settings, given_settings
from service.settings.layers import Given
from vtoken.errors import ConfigError


class ServiceSettings(FromEnvironment):
    """Settings of the HTTP process, from the environment and the settings file.

    Raises:
        ValidationError: use :func:`load_service_settings`, which gives one sentence.
    """

    admin_key: SecretStr | None = None
    """Bearer key of the admin routes. Without any key they are closed."""
    admin_key_file: Path | None = None
    """File with more admin keys, one per line: ``name: key``, or a bare key. Read again when it
    changes; blank lines and ``#`` comments are skipped."""
    admin_keys_dir: Path | None = None
    """Folder with more admin keys, one file per key, named after it. Read again when it changes."""
    api_key: SecretStr | None = None
    """Bearer key of the model's routes, beside vLLM's ``--api-key``. Without any they are open."""
    api_key_file: Path | None = None
    """File with more API keys, as ``admin_key_file``."""
    api_keys_dir: Path | None = None
    """Folder with more API keys, as ``admin_keys_dir``."""
    metrics_key_required: bool = False
    """Whether ``/metrics`` and ``/load`` need an API or admin key; otherwise they are open."""
    admin_port: int | None = Field(default=None, ge=0, le=65535)
    """Port of the admin routes, which are then not on the main one; 0 takes a free one."""
    admin_host: str = "127.0.0.1"
    """Address that ``admin_port`` is bound to."""
    metrics_poll_seconds: float = Field(default=1.0, ge=0.05, le=3600)
    """Seconds between two readings of the engine's statistics for ``/metrics``."""
    engine_timeout_seconds: float = Field(default=10.0, gt=0, le=3600)
    """Longest wait for the engine's answer to an admin call or a reading."""
    log_format: Literal["console", "json"] = "console"
    """How every line of the log is written, vLLM's and uvicorn's included."""
    ready_stall_seconds: float = Field(default=7.0, ge=1, le=3600)
    """Not ready once the engine has not answered, or made no step with work to do, for so long."""
    ready_when_degraded: bool = False
    """Stay ready while relocation is off or its copies fail, which costs memory, not answers."""
    live_stall_seconds: float = Field(default=300.0, ge=0, le=86400)
    """Not live once the engine has not answered for so long, so that it is restarted; 0: never."""
    drain_seconds: float = Field(default=120.0, ge=0, le=86400)
    """After SIGTERM, longest wait for accepted requests to finish."""
    max_body_bytes: int = Field(default=64 * 2**20, ge=0, le=2**40)
    """Longest body of a request; 0: no limit."""
    max_prompt_tokens: int = Field(default=0, ge=0, le=10**8)
    """Longest prompt; 0: what the model's context holds."""
    max_output_tokens: int = Field(default=0, ge=0, le=10**8)
    """Most tokens that one sequence may be asked to generate; 0: what the context holds."""
    max_requests_per_key: int = Field(default=0, ge=0, le=10**6)
    """Requests of one API key that may be open at once; 0: no limit."""
    request_timeout_seconds: float = Field(default=0.0, ge=0, le=86400)
    """Longest time for one request, its stream included; 0: no limit."""
    max_queue_seconds: float = Field(default=0.0, ge=0, le=86400)
    """Refuse a request that would wait longer than this before it starts; 0: let it wait."""

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Variables, then the settings file."""
        names = cls.model_fields
        given = {n: v for n, v in file_settings().items() if n in names and v is not None}
        return init_settings, env_settings, InitSettingsSource(settings_cls, given)

    def admin_keys(self) -> KeyRing:
        """The admin keys; none means that the admin routes are closed.

        Raises:
            ConfigError: a key is blank, or a file or folder of them cannot be read or holds none.
        """
        return _key_ring("admin", self.admin_key, self.admin_key_file, self.admin_keys_dir)

    def api_keys(self, vllm_keys: Sequence[str] = ()) -> KeyRing:
        """The API keys; none means that the model's routes are open.

        Args:
            vllm_keys: of vLLM's ``--api-key``; they join as ``vllm-1``, ``vllm-2``, …

        Raises:
            ConfigError: as :meth:`admin_keys`.
        """
        theirs = [(f"vllm-{n}", key) for n, key in enumerate(vllm_keys, 1)]
        return _key_ring("api", self.api_key, self.api_key_file, self.api_keys_dir, theirs)


def is_secret(name: str) -> bool:
    """Whether this setting of the HTTP process is a key itself, never shown and no flag."""
    return "SecretStr" in str(ServiceSettings.model_fields[name].annotation)


def load_service_settings() -> ServiceSettings:
    """Read :class:`ServiceSettings` from the environment and the settings file.

    Raises:
        ConfigError: a value cannot be read or is out of bounds; the first of them.
    """
    settings, refusals = check_service_settings()
    if settings is None:
        raise refusals[0]
    return settings


def check_service_settings() -> tuple[ServiceSettings | None, list[ConfigError]]:
    """The settings, or everything that is wrong with them.

    Raises:
        ConfigError: the settings file cannot be read.
    """
    try:
        return ServiceSettings(), []
    except ValidationError as error:
        given = given_settings(ServiceSettings.model_fields)
        return None, [_as_config_error(one, given) for one in error.errors(include_url=False)]


def _key_ring(
    kind: str,
    key: SecretStr | None,
    file: Path | None,
    folder: Path | None,
    more: Iterable[tuple[str, str]] = (),
) -> KeyRing:
    own = key.get_secret_value() if key else ""
    setting = f"VTOKEN_{kind.upper()}_KEY"
    given = (*([(kind, bare_key(setting, own))] if own else []), *more)
    return KeyRing(KeySources(kind, given, file, folder))


def _as_config_error(error: Mapping[str, Any], given: Mapping[str, Given]) -> ConfigError:
    name = str(error["loc"][0])
    one = given.get(name)
    if one is None:
        return ConfigError(name, None, rule_of(error))
    return ConfigError(one.shown, "…" if is_secret(name) else one.value, rule_of(error))
