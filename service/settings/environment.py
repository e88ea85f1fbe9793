"""The variables ``VTOKEN_*`` as they are, and where files are looked for."""

from __future__ import annotations

import os
from pathlib import Path

from service.settings.layers import ENV_PREFIX


def our_variables() -> dict[str, str]:
    """Variables with our prefix, which is taken off, in small letters."""
    start = len(ENV_PREFIX)
    return {n[start:].lower(): v for n, v in os.environ.items() if n.startswith(ENV_PREFIX)}


def config_file() -> Path | None:
    """The settings file, if one is named."""
    name = os.environ.get("VTOKEN_CONFIG_FILE")
    return Path(name) if name else None


def default_cache_dir() -> Path:
    """Where models are kept.

    ``$VTOKEN_CACHE_DIR``, else ``$XDG_CACHE_HOME/vtoken-serve``, else ``~/.cache/vtoken-serve``.
    """
    if own := os.environ.get("VTOKEN_CACHE_DIR"):
        return Path(own).expanduser().absolute()
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared).expanduser().absolute() / "vtoken-serve"
    return Path.home() / ".cache" / "vtoken-serve"


def embedded_gguf() -> Path | None:
    """The GGUF file that ``VTOKEN_EMBEDDED_GGUF`` names, if any."""
    named = os.environ.get("VTOKEN_EMBEDDED_GGUF")
    return Path(named).expanduser().absolute() if named else None
