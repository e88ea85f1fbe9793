"""Which of several sources a setting comes from: a flag beats a variable beats the settings file.

Pure: what was given is passed in. A settings file is YAML, JSON or TOML, one key per setting, named
as in ``docs/configuration.md``:

    mode: lazy
    keep_ratio: 0.5
    metrics_poll_seconds: 2
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from service.strict import StrictLoader
from vtoken.errors import ConfigError

ENV_PREFIX = "VTOKEN_"
MAX_FILE_BYTES = 1 << 20
_EITHER = {"keep_ratio": "budget_tokens", "budget_tokens": "keep_ratio"}


@dataclass(frozen=True)
class Given:
    """A value that somebody gave.

    Attributes:
        value: as it was written; text except in files.
        shown: how its name was written there, for errors.
        source: where it came from, for people.
        rank: 0 flag, 1 variable, 2 file; the lower wins.
    """

    value: object
    shown: str
    source: str
    rank: int


def resolve(
    names: Iterable[str],
    flags: Mapping[str, object],
    variables: Mapping[str, str],
    file: Mapping[str, object],
    file_name: str = "",
) -> dict[str, Given]:
    """What was given for each name, from the strongest source; names not given are left out.

    Args:
        names: of the settings.
        flags: name to value.
        variables: name to text, without the prefix and in small letters; empty text is unset.
        file: name to value; null is unset.
        file_name: for errors.
    """
    found: dict[str, Given] = {}
    for name in names:
        if name in flags:
            flag = "--vtoken-" + name.replace("_", "-")
            found[name] = Given(flags[name], name, flag, 0)
        elif variables.get(name):
            variable = ENV_PREFIX + name.upper()
            found[name] = Given(variables[name], variable, variable, 1)
        elif file.get(name) is not None:
            found[name] = Given(file[name], f"{file_name}: {name}", file_name, 2)
    return _without_beaten(found)


def _without_beaten(found: dict[str, Given]) -> dict[str, Given]:
    """Of two that exclude each other, the one from the stronger source alone."""
    beaten = {
        name
        for name, other in _EITHER.items()
        if name in found and other in found and found[other].rank < found[name].rank
    }
    return {name: given for name, given in found.items() if name not in beaten}


def read_file(path: Path) -> dict[str, Any]:
    """The settings in a file; its names are not checked here.

    Raises:
        ConfigError: it cannot be read, is not YAML, JSON or TOML, or is not a list of settings.
    """
    parse = _PARSERS.get(path.suffix.lower())
    if parse is None:
        kinds = ", ".join(_PARSERS)
        raise ConfigError("VTOKEN_CONFIG_FILE", str(path), f"the name must end with one of {kinds}")
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ValueError(f"it is longer than {MAX_FILE_BYTES} bytes")
        found = parse(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
        rule = f"a readable settings file ({' '.join(str(error).split())})"
        raise ConfigError("VTOKEN_CONFIG_FILE", str(path), rule) from error
    found = {} if found is None else found
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found):
        raise ConfigError("VTOKEN_CONFIG_FILE", str(path), "must hold settings, as in mode: lazy")
    return found


def _read_yaml(text: str) -> Any:
    return yaml.load(text, StrictLoader)


_PARSERS: Mapping[str, Callable[[str], Any]] = {
    ".yaml": _read_yaml,
    ".yml": _read_yaml,
    ".json": _read_yaml,
    ".toml": tomllib.loads,
}


def unknown(name: str, known: Iterable[str], shown: str, prefix: str) -> ConfigError:
    """The refusal of a name that is no setting, with the nearest that is.

    The value is not repeated: it may be a key under a mistyped name.

    Args:
        name: as comparable with ``known``.
        known: names of the settings.
        shown: how the name was written.
        prefix: before a known name, to be written likewise.
    """
    near = difflib.get_close_matches(name, sorted(known), n=1)
    hint = f"; did you mean {prefix}{near[0]}?" if near else ""
    return ConfigError(shown, "…", f"no such setting{hint}")
