"""The ``--vtoken-*`` flags, one per setting, made from ``VTokenConfig`` and ``ServiceSettings``.

Keys are no flags: every user of a machine can read its command lines. Help texts are the fields'
docstrings. Values stay text here; ``service.settings`` converts and
``VTokenConfig`` checks them, so a flag and a variable are treated alike.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import difflib
import inspect
import itertools
import os
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any, Literal, get_args, get_origin, get_type_hints

from service.errors import UsageError
from service.settings.http_process import ServiceSettings, is_secret
from service.settings.layers import ENV_PREFIX
from service.settings.token_layer import FIELD_NAMES, is_list, is_object
from vtoken.config import VTokenConfig

CONFIG_FLAG = "--vtoken-config"
_CONFIG_DEST = "config_of_vtoken"
_DEST_PREFIX = "vtoken_"
_TITLE = "vToken"
_SERVICE_TITLE = "vToken's service"

SERVICE_NAMES: tuple[str, ...] = tuple(n for n in ServiceSettings.model_fields if not is_secret(n))
"""Settings of the HTTP process that have a flag."""


def flag_name(field: str) -> str:
    """``--vtoken-theta-f`` for ``theta_f``."""
    return "--vtoken-" + field.replace("_", "-")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add one flag per configuration field to ``parser``, as a group; mutates it."""
    group = parser.add_argument_group(_TITLE, "Eviction of tokens and reclamation of blocks.")
    group.add_argument(
        CONFIG_FLAG,
        dest=_CONFIG_DEST,
        metavar="FILE",
        default=argparse.SUPPRESS,
        help="Settings file, YAML, JSON or TOML; flags and variables beat it. Variable: "
        "VTOKEN_CONFIG_FILE.",
    )
    hints = get_type_hints(VTokenConfig)
    for field in dataclasses.fields(VTokenConfig):
        options: dict[str, Any] = {"action": argparse.BooleanOptionalAction}
        if hints[field.name] is not bool:
            options = {"metavar": _metavar(hints[field.name])}
        group.add_argument(
            flag_name(field.name),
            dest=_DEST_PREFIX + field.name,
            default=argparse.SUPPRESS,
            help=_help(field.name, field_docs()[field.name], field.default),
            **options,
        )
    group = parser.add_argument_group(_SERVICE_TITLE, "Keys, probes, limits, log.")
    for name in SERVICE_NAMES:
        setting = ServiceSettings.model_fields[name]
        options = {"action": argparse.BooleanOptionalAction}
        if setting.annotation is not bool:
            options = {"metavar": _metavar(setting.annotation)}
        group.add_argument(
            flag_name(name),
            dest=_DEST_PREFIX + name,
            default=argparse.SUPPRESS,
            help=_help(name, field_docs(ServiceSettings)[name], setting.default),
            **options,
        )


def flag_values(namespace: argparse.Namespace) -> dict[str, Any]:
    """Field name to value, for the flags that were given."""
    given = vars(namespace)
    return {n: given[_DEST_PREFIX + n] for n in FIELD_NAMES if _DEST_PREFIX + n in given}


def parse_early(argv: Sequence[str]) -> dict[str, Any]:
    """Read our flags alone, before vLLM is imported: what is wrong there is said at once.

    Raises:
        UsageError: an unknown ``--vtoken-…`` flag, or one whose value is missing or unreadable.
    """
    refusals = unknown_flags(argv)
    if refusals:
        raise refusals[0]
    return flag_values(_parse(argv))


def service_flags(argv: Sequence[str]) -> dict[str, str]:
    """Setting of the HTTP process to the text of its flag, for the flags that were given.

    Raises:
        UsageError: a flag of ours has no value, or one that is unreadable.
    """
    given = vars(_parse(argv))
    found = {n: given[_DEST_PREFIX + n] for n in SERVICE_NAMES if _DEST_PREFIX + n in given}
    return {n: str(v).lower() if isinstance(v, bool) else v for n, v in found.items()}


def use_flags(argv: Sequence[str]) -> None:
    """Let ``--vtoken-config`` and the service's flags beat their variables; mutates the
    environment, which all of the server's processes have.

    Raises:
        UsageError: a flag of ours has no value, or one that is unreadable.
    """
    if file := getattr(_parse(argv), _CONFIG_DEST, None):
        os.environ["VTOKEN_CONFIG_FILE"] = file
    for name, text in service_flags(argv).items():
        os.environ[ENV_PREFIX + name.upper()] = text


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = _EarlyParser(prog="vtoken-serve serve", add_help=False, allow_abbrev=False)
    add_flags(parser)
    return parser.parse_known_args([_normalised(argument) for argument in argv])[0]


def describe_flags() -> str:
    """The help text of our flags alone."""
    parser = argparse.ArgumentParser(usage=argparse.SUPPRESS, add_help=False)
    add_flags(parser)
    return parser.format_help().strip()


class _EarlyParser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        """Raise instead of printing a usage text and leaving."""
        raise UsageError(message)


def unknown_flags(argv: Iterable[str]) -> list[UsageError]:
    """Each ``--vtoken-…`` flag that is none, with the nearest that is."""
    known = {CONFIG_FLAG, *map(flag_name, (*FIELD_NAMES, *SERVICE_NAMES))}
    switches = [n for n, h in _hints().items() if h is bool]
    switches += [n for n in SERVICE_NAMES if ServiceSettings.model_fields[n].annotation is bool]
    known |= {"--no-" + flag_name(name)[2:] for name in switches}
    found = []
    for argument in map(_normalised, argv):
        name = argument.split("=", 1)[0].split(".", 1)[0]
        if name.startswith(("--vtoken-", "--no-vtoken-")) and name not in known:
            near = difflib.get_close_matches(name, sorted(known), n=1)
            hint = f"; did you mean {near[0]}?" if near else "; see vtoken-serve serve --help"
            found.append(UsageError(f"unknown flag {name}{hint}"))
    return found


def _normalised(argument: str) -> str:
    """vLLM takes ``--some_flag`` for ``--some-flag``; so do we."""
    if not argument.startswith("--"):
        return argument
    name, equals, value = argument.partition("=")
    return name.replace("_", "-") + equals + value


def _hints() -> Mapping[str, Any]:
    return get_type_hints(VTokenConfig)


def _metavar(hint: Any) -> str:
    if get_origin(hint) is Literal:
        return "|".join(get_args(hint))
    if is_object(hint) or is_list(hint):
        return "JSON" if is_object(hint) else "N,N,…"
    kinds = [kind for kind in get_args(hint) or (hint,) if kind is not type(None)]
    return str(kinds[0].__name__).upper()


def _help(name: str, doc: str, default: object) -> str:
    default = {} if default is dataclasses.MISSING else default
    text = f"{doc} Default: {default}. Variable: {ENV_PREFIX}{name.upper()}."
    return text.replace("%", "%%").replace("``", "")


@cache
def field_docs(of: type = VTokenConfig) -> dict[str, str]:
    """Field name to its docstring: the text literal that follows it in the class."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(of)))
    body = tree.body[0].body if isinstance(tree.body[0], ast.ClassDef) else []
    docs = {}
    for node, after in itertools.pairwise(body):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            assert isinstance(after, ast.Expr), "a field without a docstring"
            assert isinstance(after.value, ast.Constant), "a field without a docstring"
            docs[node.target.id] = " ".join(str(after.value.value).split())
    return docs
