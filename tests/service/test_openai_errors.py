"""What is not served is refused in a form that OpenAI's clients read."""

from __future__ import annotations

import fastapi
import pytest
from fastapi.testclient import TestClient

from service import openai_errors


@pytest.fixture
def client() -> TestClient:
    app = fastapi.FastAPI()
    openai_errors.attach(app)

    @app.get("/v1/models")
    def models() -> list[str]:
        return []

    @app.get("/v1/teapot")
    def teapot() -> None:
        raise fastapi.HTTPException(418, "short and stout")

    return TestClient(app)


@pytest.mark.parametrize(
    ("method", "path", "status"), [("POST", "/v1/embeddings", 404), ("DELETE", "/v1/models", 405)]
)
def test_unknown_routes_have_openais_error_body(client, method, path, status):
    """Path and method are in the message."""
    answer = client.request(method, path)
    assert answer.status_code == status
    error = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert f"{method} {path}" in error["message"]
    assert error["code"] == status


def test_other_answers_stay(client):
    """Elsewhere, and errors that a route itself raises."""
    assert client.get("/elsewhere").json() == {"detail": "Not Found"}
    assert client.get("/v1/teapot").json() == {"detail": "short and stout"}
    assert client.get("/v1/models").json() == []
