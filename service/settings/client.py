"""Settings of the commands for a running service."""

from __future__ import annotations

from pathlib import Path

from pydantic import SecretStr

from service.auth_keys import KeySources
from service.settings.base import FromEnvironment


class ClientSettings(FromEnvironment):
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
