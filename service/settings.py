"""Settings of the service: the only place that reads the environment.

Every field of :class:`~vtoken.config.VTokenConfig` is a flag ``--vtoken-<field>`` and a variable
``VTOKEN_<FIELD>``; both lists are made from its dataclass fields. What only the HTTP process needs
is in :class:`ServiceSettings`. A flag beats a variable, a variable beats the settings file
(``VTOKEN_CONFIG_FILE``), that beats the default.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from pydantic import BeforeValidator, Field, SecretStr, TypeAdapter, ValidationError
from pydantic_settings import (
    BaseSettings,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from service.auth_keys import KeyRing, KeySources
from service.setting_layers import ENV_PREFIX, Given, read_file, resolve, unknown
from vtoken.config import VTokenConfig
from vtoken.errors import ConfigError

FIELD_NAMES: tuple[str, ...] = tuple(f.name for f in dataclasses.fields(VTokenConfig))
OUR_PLUGINS: tuple[str, ...] = ("vtoken", "vtoken_http")

OTHER_VARIABLES: Mapping[str, str] = {
    "CONFIG_FILE": "The settings file, as `--vtoken-config`.",
    "CACHE_DIR": "Where the embedded model is kept; default `~/.cache/vtoken-serve`.",
    "EMBEDDED_GGUF": "A GGUF file to convert instead of the packaged one.",
    "VENV": "Of `scripts/*`: where their virtual environment is; default `.venv`.",
    "PYTHON": "Of `scripts/*`: the Python that they make it with.",
    "TORCH": "Of `scripts/*`: the requirement that torch is installed by.",
    "NO_IOMP": "Of `scripts/*`: 1 does not preload Intel's OpenMP library.",
    "TEST_JOBS": "Of `scripts/test`: how many processes run tests.",
}
"""Variables with our prefix that are no settings of the service."""
_LINKED_SERVICE = re.compile(
    r"VTOKEN_(\w+_)?(SERVICE_(HOST|PORT)(_\w+)?|PORT(_\d+_(TCP|UDP|SCTP)(_\w+)?)?)"
)
_LINKED_VALUE = re.compile(r"(tcp|udp|sctp)(://\S+)?|[\d.:a-f]+")
_PLUGIN_GROUPS = ("general", "platform", "io_processor", "stat_logger")


class _Settings(BaseSettings):
    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX, env_ignore_empty=True, extra="ignore", hide_input_in_errors=True
    )


class ServiceSettings(_Settings):
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
            ConfigError: a key file or folder cannot be read or holds no key.
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


class ClientSettings(_Settings):
    """Settings of the commands for a running service, from the environment."""

    url: str | None = None
    """Where the service is that ``status``, ``policy`` and ``top`` talk to."""
    admin_url: str | None = None
    """Where its admin routes are, if they have a port of their own."""
    admin_key: SecretStr | None = None
    """Key that they send; the service reads the same variable."""
    admin_key_file: Path | None = None
    """File with it, for want of ``admin_key``; the first key is used."""

    def first_admin_key(self) -> str | None:
        """The key to send.

        Raises:
            ConfigError: the key file cannot be read or holds no key.
        """
        if self.admin_key and (key := self.admin_key.get_secret_value().strip()):
            return key
        if self.admin_key_file is None:
            return None
        return KeySources("admin", file=self.admin_key_file).read()[0][1]


def load_client_settings() -> ClientSettings:
    """Read :class:`ClientSettings` from the environment."""
    return ClientSettings()


def load_config(flags: Mapping[str, object]) -> VTokenConfig:
    """The configuration of the token layer from flags, environment, settings file and defaults.

    Args:
        flags: field name to the value given on the command line (text is converted).

    Raises:
        ConfigError: a value cannot be converted or is out of bounds; the first of them.
    """
    config, refusals = check_config(flags)
    if refusals:
        raise refusals[0]
    return config


def check_config(flags: Mapping[str, object]) -> tuple[VTokenConfig, list[ConfigError]]:
    """The configuration without the values that are refused, and why they are.

    Raises:
        ConfigError: the settings file cannot be read.
    """
    values: dict[str, Any] = {}
    refusals: list[ConfigError] = []
    for name, given in given_settings(FIELD_NAMES, flags).items():
        try:
            values[name] = _CONVERTERS[name].validate_python(given.value)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            refusals.append(ConfigError(given.shown, given.value, _rule(first)))
    while True:  # each turn takes away what is refused, so that the next mistake shows
        try:
            return VTokenConfig.from_dict(values), refusals
        except ConfigError as error:
            refusals.append(error)
            refused = [name for name in error.field.split("|") if name in values]
            for name in refused or list(values):
                del values[name]


def given_settings(
    names: Iterable[str], flags: Mapping[str, object] = MappingProxyType({})
) -> dict[str, Given]:
    """What was given for these settings, from the strongest source.

    Raises:
        ConfigError: the settings file cannot be read.
    """
    path = config_file()
    file_name = "" if path is None else path.name
    return resolve(names, flags, _our_variables(), file_settings(), file_name)


def config_file() -> Path | None:
    """The settings file, if one is named."""
    name = os.environ.get("VTOKEN_CONFIG_FILE")
    return Path(name) if name else None


def file_settings() -> dict[str, Any]:
    """What stands in the settings file; nothing without one.

    Raises:
        ConfigError: it cannot be read.
    """
    path = config_file()
    return {} if path is None else read_file(path)


def unknown_settings() -> list[ConfigError]:
    """Each ``VTOKEN_*`` variable and each key of the settings file that is no setting.

    Variables that Kubernetes and Docker make for a service named ``vtoken…`` are left alone.

    Raises:
        ConfigError: the settings file cannot be read.
    """
    keys = {*FIELD_NAMES, *ServiceSettings.model_fields}
    variables = {*keys, *ClientSettings.model_fields, *map(str.lower, OTHER_VARIABLES)}
    found = []
    for name, value in sorted(_our_variables().items()):
        variable = ENV_PREFIX + name.upper()
        is_link = _LINKED_SERVICE.fullmatch(variable) and _LINKED_VALUE.fullmatch(value)
        if name not in variables and not is_link:
            upper = [one.upper() for one in variables]
            found.append(unknown(name.upper(), upper, variable, ENV_PREFIX))
    path = config_file()
    if path is not None:
        for name in file_settings():
            if name not in keys:
                found.append(unknown(name, keys, f"{path.name}: {name}", ""))
    return found


def _our_variables() -> dict[str, str]:
    """Variables with our prefix, which is taken off, in small letters."""
    start = len(ENV_PREFIX)
    return {n[start:].lower(): v for n, v in os.environ.items() if n.startswith(ENV_PREFIX)}


KEEP_ALIVE_SECONDS = 75
"""How long an idle connection is kept. Longer than clients and load balancers keep theirs (5 s,
60 s): whoever closes first must not be the server, or a request sent at that moment is lost. vLLM's
own 5 s are as long as httpx's, which the openai client uses."""


def vllm_environment() -> dict[str, str]:
    """The variables that vLLM must find before it is imported; what the user set is kept.

    ``VLLM_PLUGINS`` gates every group of plugins and must name ours, so where the user has no
    list all installed ones are named: the other plugins load as they would without us.

    Raises:
        ConfigError: the environment asks for something that cannot be served.
    """
    if folder := os.environ.get("PROMETHEUS_MULTIPROC_DIR"):
        rule = "must be unset: /metrics would miss what this process knows of the token layer"
        raise ConfigError("PROMETHEUS_MULTIPROC_DIR", folder, rule)
    if (dev_mode := os.environ.get("VLLM_SERVER_DEV_MODE", "0")).strip() not in ("", "0"):
        rule = "must be 0 or unset: developer routes are not served"
        raise ConfigError("VLLM_SERVER_DEV_MODE", dev_mode, rule)
    if os.environ.get("VLLM_USE_V2_MODEL_RUNNER", "0") != "0":
        rule = "must be 0 or unset: served on CPUs, where V2 needs a Triton that compiles for them"
        raise ConfigError("VLLM_USE_V2_MODEL_RUNNER", os.environ["VLLM_USE_V2_MODEL_RUNNER"], rule)
    listed = os.environ.get("VLLM_PLUGINS")
    theirs = _installed_plugins() if listed is None else listed.split(",")
    return {
        "VLLM_PLUGINS": ",".join(dict.fromkeys([*filter(None, theirs), *OUR_PLUGINS])),
        "VLLM_USE_V2_MODEL_RUNNER": "0",
        "VLLM_NO_USAGE_STATS": os.environ.get("VLLM_NO_USAGE_STATS", "1"),
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": os.environ.get(
            "VLLM_HTTP_TIMEOUT_KEEP_ALIVE", str(KEEP_ALIVE_SECONDS)
        ),
        "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": _trace_protocol(),  # vLLM reads no other
    }


def log_environment(log_file: Path, style: str) -> dict[str, str]:
    """Variables that give vLLM's processes our log; none if the user configured it otherwise."""
    has_own = bool(os.environ.get("VLLM_LOGGING_CONFIG_PATH"))
    if has_own or os.environ.get("VLLM_CONFIGURE_LOGGING") == "0":
        return {}
    bars = {"TQDM_DISABLE": "1"} if style == "json" else {}  # they are no JSON
    return {"VLLM_LOGGING_CONFIG_PATH": str(log_file), **bars}


def log_level() -> str:
    """Of vLLM's log and ours, where no flag says otherwise."""
    return os.environ.get("VLLM_LOGGING_LEVEL", "INFO").upper()


def trace_endpoint() -> str | None:
    """Where OpenTelemetry's variables say that traces go."""
    if os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    if endpoint := os.environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"):
        return endpoint
    base = os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT")
    if base and _trace_protocol().startswith("http"):
        return base.rstrip("/") + "/v1/traces"
    return base or None


def _trace_protocol() -> str:
    names = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
    return next(filter(None, map(os.environ.get, names)), "grpc")


def vllm_api_keys(given: Sequence[str | None] | None) -> list[str]:
    """The keys of vLLM's own guard, as vLLM chooses them.

    Args:
        given: with ``--api-key``; these beat ``VLLM_API_KEY``.
    """
    return [key for key in (given or [os.environ.get("VLLM_API_KEY")]) if key]


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
        return str
    if is_list(hint):
        return Annotated[tuple[int, ...], BeforeValidator(_parse_list)]
    if is_object(hint):
        return Annotated[dict[str, Any], BeforeValidator(_parse_object)]
    return hint


_CONVERTERS: Mapping[str, TypeAdapter[Any]] = {
    name: TypeAdapter(_field_type(hint)) for name, hint in get_type_hints(VTokenConfig).items()
}


def _key_ring(
    kind: str,
    key: SecretStr | None,
    file: Path | None,
    folder: Path | None,
    more: Iterable[tuple[str, str]] = (),
) -> KeyRing:
    own = key.get_secret_value().strip() if key else ""
    given = (*([(kind, own)] if own else []), *more)
    return KeyRing(KeySources(kind, given, file, folder))


def _as_config_error(error: Mapping[str, Any], given: Mapping[str, Given]) -> ConfigError:
    name = str(error["loc"][0])
    one = given.get(name)
    if one is None:
        return ConfigError(name, None, _rule(error))
    return ConfigError(one.shown, "…" if is_secret(name) else one.value, _rule(error))


def _rule(error: Mapping[str, Any]) -> str:
    return str(error["msg"]).removeprefix("Value error, ")
