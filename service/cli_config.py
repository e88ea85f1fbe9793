"""``vtoken-serve config check``: what a service would be started with, and all that is refused.

Takes the arguments of ``vtoken-serve serve`` and starts nothing: neither an engine nor a GPU is
touched. Our own settings are checked first, then vLLM's view of the same command line.
"""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pydantic import SecretStr

from service.cli_client import print_json
from service.errors import UsageError
from service.flags import parse_early, service_flags, unknown_flags, use_flags
from service.settings.given import given_settings
from service.settings.http_process import ServiceSettings, check_service_settings
from service.settings.layers import Given
from service.settings.token_layer import FIELD_NAMES, check_config
from service.settings.unknown import unknown_settings
from service.settings.vllm_variables import vllm_environment
from vtoken.config import VTokenConfig
from vtoken.errors import ConfigError, VTokenError

EXIT_REFUSED = 2

USAGE = """\
usage: vtoken-serve config check [--json] [--settings-only] [MODEL] [arguments of serve]

Prints the configuration that `vtoken-serve serve` with these arguments would have, where each
value comes from, and everything that would be refused. Starts nothing. With --settings-only vLLM
is not asked, which takes a fraction of a second instead of some ten.

exit codes:
  0  nothing is refused
  2  something is, or this command is wrong
"""


@dataclass(frozen=True)
class Setting:
    """A setting as it would be in force.

    Attributes:
        name: of the setting.
        value: JSON-ready; secrets are not shown.
        source: flag, variable or file that it comes from, or ``default``.
    """

    name: str
    value: Any
    source: str


def main(argv: Sequence[str]) -> int:
    """Run the command; returns the exit code.

    Raises:
        UsageError: it is not ``config check``.
    """
    if not argv or {"-h", "--help"} & set(argv):
        print(USAGE, end="")
        return 0
    if argv[0] != "check":
        raise UsageError(f"unknown command config {argv[0]!r}; try vtoken-serve config check")
    options = {"--json", "--settings-only"}
    rest = [argument for argument in argv[1:] if argument not in options]
    settings, refusals = check_settings(rest)
    if "--settings-only" not in argv and not refusals:
        refusals = check_engine(rest)
    if "--json" in argv:
        print_json({"settings": [asdict(one) for one in settings], "refusals": refusals})
    else:
        print("\n".join(lines(settings, refusals)))
    return EXIT_REFUSED if refusals else 0


def check_settings(argv: Sequence[str]) -> tuple[list[Setting], list[str]]:
    """Our settings with their sources, and everything about them that is refused."""
    refusals = [str(error) for error in unknown_flags(argv)]
    known = [argument for argument in argv if not unknown_flags([argument])]
    try:
        use_flags(known)
        flags = parse_early(known)
        refusals += [str(error) for error in unknown_settings()]
        config, refused = check_config(flags)
        service, refused_too = check_service_settings()
        names = (*FIELD_NAMES, *ServiceSettings.model_fields)
        given = given_settings(names, {**flags, **service_flags(known)})
    except (UsageError, ConfigError) as error:  # nothing can be read beyond it
        return [], [*refusals, str(error)]
    refusals += [_with_source(error, given) for error in (*refused, *refused_too)]
    refusals += _attempts([vllm_environment, *_key_checks(service)])
    return [*_of_config(config, given), *_of_service(service, given)], refusals


def _with_source(error: ConfigError, given: Mapping[str, Given]) -> str:
    one = given.get(error.field)
    return f"{error} (from {one.source})" if one is not None else str(error)


def _key_checks(service: ServiceSettings | None) -> Iterable[Callable[[], object]]:
    return () if service is None else (service.admin_keys, service.api_keys)


def _attempts(checks: Iterable[Callable[[], object]]) -> list[str]:
    refusals = []
    for check in checks:
        try:
            check()
        except VTokenError as error:
            refusals.append(str(error))
    return refusals


def _of_config(config: VTokenConfig, given: Mapping[str, Given]) -> list[Setting]:
    return [Setting(n, v, _source(n, given)) for n, v in config.to_dict().items()]


def _of_service(service: ServiceSettings | None, given: Mapping[str, Given]) -> list[Setting]:
    if service is None:
        return []
    return [Setting(n, _shown(getattr(service, n)), _source(n, given)) for n in _names()]


def _names() -> Iterable[str]:
    return ServiceSettings.model_fields


def _source(name: str, given: Mapping[str, Given]) -> str:
    return given[name].source if name in given else "default"


def _shown(value: Any) -> Any:
    if isinstance(value, SecretStr):
        return "(set, not shown)"
    return value if value is None or isinstance(value, bool | int | float) else str(value)


def check_engine(argv: Sequence[str]) -> list[str]:
    """What vLLM refuses of the command line and the model, and the token layer of both."""
    os.environ.update(vllm_environment())
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ["VLLM_LOGGING_STREAM"] = "ext://sys.stderr"  # standard output is the report's
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            from service import arguments, server

            args, _ = arguments.parse(argv)
            server.check_port_is_free(args)
            server.check_engine_config(args)
    except VTokenError as error:
        return [str(error)]
    except SystemExit:  # vLLM's parser has printed its reason
        return [complaint.getvalue().strip().rpartition("\n")[2] or "vLLM refused the flags"]
    return []


def lines(settings: Sequence[Setting], refusals: Sequence[str]) -> list[str]:
    """The report as text."""
    rows = [(one.name, _text(one.value), one.source) for one in settings]
    widths = [max((len(row[i]) for row in rows), default=0) for i in (0, 1)]
    text = [f"{name:<{widths[0]}}  {value:<{widths[1]}}  {source}" for name, value, source in rows]
    if not refusals:
        return [*text, "", "nothing is refused"]
    return [*text, "", "refused:", *(f"  {' '.join(one.split())}" for one in refusals)]


def _text(value: Any) -> str:
    if value is None:
        return "-"
    return str(value).lower() if isinstance(value, bool) else str(value)
