"""One model by name."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from pydantic import BaseModel

from service import model_card


class Card(BaseModel):
    """Of vLLM's list, as far as somebody looks."""

    id: str
    object: str = "model"


@pytest.fixture
def client() -> TestClient:
    app = FastAPI()
    model_card.attach(app)

    async def show_available_models() -> SimpleNamespace:
        return SimpleNamespace(data=[Card(id="base"), Card(id="org/adapter")])

    app.state.openai_serving_models = SimpleNamespace(show_available_models=show_available_models)
    return TestClient(app)


@pytest.mark.parametrize("name", ["base", "org/adapter"])
def test_served_model_has_its_entry(client, name):
    """Names with a slash included."""
    assert client.get(f"/v1/models/{name}").json() == {"id": name, "object": "model"}


def test_other_models_are_not_found(client):
    """With OpenAI's error body."""
    answer = client.get("/v1/models/other")
    assert answer.status_code == 404
    assert answer.json()["error"]["param"] == "model"
    assert "`other`" in answer.json()["error"]["message"]
