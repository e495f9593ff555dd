"""GET /v1/models and GET /v1/models/{name}, in OpenAI's format with vLLM's additional fields."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from pagoda.server.http.state import ServerState, server_of

router = APIRouter(tags=["models"])


@router.get("/v1/models")
async def list_models(request: Request) -> dict[str, Any]:
    """List the served models and LoRA adapters."""
    state = server_of(request)
    names = [*state.names, *(served.adapter.name for served in state.adapters.served)]
    return {"object": "list", "data": [_card(state, name) for name in names]}


@router.get("/v1/models/{name:path}")
async def show_model(request: Request, name: str) -> dict[str, Any]:
    """Describe one served model or LoRA adapter."""
    state = server_of(request)
    return _card(state, state.model_name(name))


def _card(state: ServerState, name: str) -> dict[str, Any]:
    llm = state.llm()
    root = llm.config.model.model
    parent = None
    if (served := llm.adapters.find(name)) is not None:
        root = served.adapter.path
        parent = served.parent
    return {
        "id": name,
        "object": "model",
        "created": state.created,
        "owned_by": "pagoda",
        "root": root,  # The folder, if this is a LoRA adapter.
        "parent": parent,  # The base model, if this is a LoRA adapter.
        "max_model_len": llm.max_model_len,  # Maximum number of tokens.
    }
