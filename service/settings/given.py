"""What was given for each setting, from the strongest source."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

from service.settings.environment import config_file, our_variables
from service.settings.layers import Given, read_file, resolve


def given_settings(
    names: Iterable[str], flags: Mapping[str, object] = MappingProxyType({})
) -> dict[str, Given]:
    """What was given for these settings, from the strongest source.

    Raises:
        ConfigError: the settings file cannot be read.
    """
    path = config_file()
    file_name = "" if path is None else path.name
    return resolve(names, flags, our_variables(), file_settings(), file_name)


def file_settings() -> dict[str, Any]:
    """What stands in the settings file; nothing without one.

    Raises:
        ConfigError: it cannot be read.
    """
    path = config_file()
    return {} if path is None else read_file(path)
