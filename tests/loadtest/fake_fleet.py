"""A fleet whose services are the fake one: scenarios run through without an engine."""

from __future__ import annotations

from pathlib import Path

from loadtest.client import Client
from loadtest.fleet import Arm, Fleet, _Service
from tests.loadtest.fake_service import KEY, FakeService


class FakeFleet(Fleet):
    """Every arm is served by the same fake service.

    Attributes:
        arms: that a service was started for, in order.
    """

    def __init__(
        self,
        service: FakeService,
        folder: Path,
        *,
        share_modes: bool = True,
        keep_services: bool = True,
    ) -> None:
        super().__init__(folder, share_modes=share_modes, keep_services=keep_services)
        self._fake = service
        self.arms: list[Arm] = []

    def settle_seconds(self, arm: Arm) -> float:
        return 0.0

    async def _start(self, arm: Arm) -> _Service:
        self.num_started += 1
        self.arms.append(arm)
        client = Client(self._fake.url, admin_key=KEY)
        return _Service(client, None, await client.policy())
