"""Variables of vLLM and OpenTelemetry: what the user set, and what vLLM must find."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path

from service.auth_keys import bare_key
from vtoken.errors import ConfigError

OUR_PLUGINS: tuple[str, ...] = ("vtoken", "vtoken_http")
_PLUGIN_GROUPS = ("general", "platform", "io_processor", "stat_logger")
_RUNNER = "VLLM_USE_V2_MODEL_RUNNER"
_KEEP_ALIVE = "VLLM_HTTP_TIMEOUT_KEEP_ALIVE"

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
    listed = os.environ.get("VLLM_PLUGINS")
    theirs = _installed_plugins() if listed is None else listed.split(",")
    return {
        "VLLM_PLUGINS": ",".join(dict.fromkeys([*filter(None, theirs), *OUR_PLUGINS])),
        **_model_runner(),
        "VLLM_NO_USAGE_STATS": os.environ.get("VLLM_NO_USAGE_STATS", "1"),
        _KEEP_ALIVE: str(keep_alive_seconds()),
        "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": _trace_protocol(),  # vLLM reads no other
    }


def keep_alive_seconds() -> int:
    """How long an idle connection is kept; see :data:`KEEP_ALIVE_SECONDS`.

    Raises:
        ConfigError: the user's is no number.
    """
    text = os.environ.get(_KEEP_ALIVE, str(KEEP_ALIVE_SECONDS))
    try:
        return int(text)
    except ValueError as error:
        raise ConfigError(_KEEP_ALIVE, text, "a whole number of seconds") from error


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


def _model_runner() -> dict[str, str]:
    """The generation of model runners: V1 on CPUs; elsewhere as the user or vLLM says."""
    asked = os.environ.get(_RUNNER)
    if not _is_for_cpus():
        return {} if asked is None else {_RUNNER: asked}
    if asked not in (None, "0"):
        rule = "must be 0 or unset on CPUs, where V2 needs a Triton that compiles for them"
        raise ConfigError(_RUNNER, asked, rule)
    return {_RUNNER: "0"}


def _is_for_cpus() -> bool:
    """What vLLM was built for, as it tells by its package before it can be imported."""
    if os.environ.get("VLLM_TARGET_DEVICE") == "cpu":
        return True
    try:
        return "cpu" in version("vllm")
    except PackageNotFoundError:
        return True  # the package for CPUs has a name of its own


def _trace_protocol() -> str:
    names = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
    return next(filter(None, map(os.environ.get, names)), "grpc")


def vllm_api_keys(given: Sequence[str | None] | None) -> list[str]:
    """The keys of vLLM's own guard, as vLLM chooses them, but without blanks around them.

    Args:
        given: with ``--api-key``; these beat ``VLLM_API_KEY``.

    Raises:
        ConfigError: one is blank.
    """
    setting = "--api-key" if given else "VLLM_API_KEY"
    keys = given or [os.environ.get("VLLM_API_KEY")]
    return [bare_key(setting, key) for key in keys if key]


def _installed_plugins() -> list[str]:
    groups = (entry_points(group=f"vllm.{name}_plugins") for name in _PLUGIN_GROUPS)
    return [point.name for group in groups for point in group]
