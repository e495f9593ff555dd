"""GET /v1/models and GET /v1/models/{name}, in OpenAI's format with vLLM's additional fields."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from pagoda.server.http.state import ServerState, server_of

router = APIRouter(tags=["models"])


@router.get("/v1/models")
async def list_models(request: Request) -> dict[str, Any]:
    """List the served model names."""
    state = server_of(request)
    return {"object": "list", "data": [_card(state, name) for name in state.names]}


@router.get("/v1/models/{name:path}")
async def show_model(request: Request, name: str) -> dict[str, Any]:
    """Describe one served model name."""
    state = server_of(request)
    return _card(state, state.model_name(name))


def _card(state: ServerState, name: str) -> dict[str, Any]:
    llm = state.llm()
    return {
        "id": name,
        "object": "model",
        "created": state.created,
        "owned_by": "pagoda",
        "root": llm.config.model.model,
        "parent": None,
        "max_model_len": llm.max_model_len,  # tokens
    }
