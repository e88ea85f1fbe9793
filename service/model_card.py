"""``GET /v1/models/{model}``: one served model by name, as OpenAI has it and vLLM has not.

Clients ask it to find out whether a model is there.
"""

from __future__ import annotations

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import JSONResponse

router = APIRouter(tags=["OpenAI"])


def attach(app: FastAPI) -> None:
    """Add the route to ``app``; mutates it."""
    app.include_router(router)


@router.get("/v1/models/{model_id:path}")
async def get_model(model_id: str, request: Request) -> JSONResponse:
    """Its entry of ``GET /v1/models``; 404 with OpenAI's error body if there is none."""
    listed = await request.app.state.openai_serving_models.show_available_models()
    for card in listed.data:
        if card.id == model_id:
            return JSONResponse(card.model_dump())
    message = f"The model `{model_id[:200]}` does not exist."
    error = {"message": message, "type": "NotFoundError", "param": "model", "code": 404}
    return JSONResponse({"error": error}, status_code=404)
