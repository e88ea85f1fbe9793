"""Settings of the token layer: :class:`~vtoken.config.VTokenConfig` from what was given."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from pydantic import BeforeValidator, TypeAdapter, ValidationError

from service.settings.base import rule_of
from service.settings.given import given_settings
from service.strict import members
from vtoken.config import VTokenConfig
from vtoken.errors import ConfigError

FIELD_NAMES: tuple[str, ...] = tuple(f.name for f in dataclasses.fields(VTokenConfig))


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
            refusals.append(ConfigError(given.shown, given.value, rule_of(first)))
    while True:  # each turn takes away what is refused, so that the next mistake shows
        try:
            return VTokenConfig.from_dict(values), refusals
        except ConfigError as error:
            refusals.append(error)
            refused = [name for name in error.field.split("|") if name in values]
            for name in refused or list(values):
                del values[name]


def is_object(hint: Any) -> bool:
    """Whether a field of this type is written as a JSON object."""
    return get_origin(hint) is not None and issubclass(get_origin(hint), Mapping)


def is_list(hint: Any) -> bool:
    """Whether a field of this type is written as a list, ``1,2`` or ``[1, 2]``."""
    return any(get_origin(part) is tuple for part in (hint, *get_args(hint)))


def _parse_object(value: object) -> object:
    try:
        return json.loads(value, object_pairs_hook=members) if isinstance(value, str) else value
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
