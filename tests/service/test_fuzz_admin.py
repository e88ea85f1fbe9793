"""Whatever is sent to the admin routes, the answer is one that their OpenAPI document describes.

The requests are made up by schemathesis from that document, valid ones and others; behind the
routes is the real token layer with running requests.
"""

from __future__ import annotations

import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.service.conftest import ADMIN_KEY, Door
from tests.service.layer_engine import LayerEngine

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]


def make_door() -> Door:
    """Admin routes over a token layer with requests of every kind."""
    engine = LayerEngine()
    for number, options in enumerate(({}, {"policy": "h2o"}, {"evict": False}, {"protect": "0:9"})):
        engine.run(f"r{number}", 100 + number, **options)
    engine.arrive("waiting")
    return Door(engine)


DOOR = make_door()
schema = schemathesis.openapi.from_dict(DOOR.app.openapi())
schema.app = DOOR.app


@schema.parametrize()
@settings(
    max_examples=60,
    derandomize=True,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
def test_admin_routes_answer_as_described(case: schemathesis.Case) -> None:
    """No 5xx, no status and no member that is not in the document."""
    case.call_and_validate(headers={"Authorization": f"Bearer {ADMIN_KEY}"}, checks=CHECKS)
