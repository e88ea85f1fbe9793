"""Names that are no setting: refused, so that a mistyped one does not go unnoticed."""

from __future__ import annotations

import re
from collections.abc import Mapping

from service.settings.client import ClientSettings
from service.settings.environment import config_file, our_variables
from service.settings.given import file_settings
from service.settings.http_process import ServiceSettings
from service.settings.layers import ENV_PREFIX, unknown
from service.settings.token_layer import FIELD_NAMES
from vtoken.errors import ConfigError

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


def unknown_settings() -> list[ConfigError]:
    """Each ``VTOKEN_*`` variable and each key of the settings file that is no setting.

    Variables that Kubernetes and Docker make for a service named ``vtoken…`` are left alone.

    Raises:
        ConfigError: the settings file cannot be read.
    """
    keys = {*FIELD_NAMES, *ServiceSettings.model_fields}
    variables = {*keys, *ClientSettings.model_fields, *map(str.lower, OTHER_VARIABLES)}
    found = []
    for name, value in sorted(our_variables().items()):
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
