"""GET /v1/models and GET /v1/models/{name}."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request

from pagoda.server.http.request_context import server_of
from pagoda.server.http.state import ServerState

# The list of models, in OpenAI's shape with vLLM's extras.


def model_card(name: str, *, created: int, root: str, max_model_len: int) -> dict[str, Any]:
    """One served name. `root`: the model behind it; `max_model_len`: tokens."""
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "pagoda",
        "root": root,
        "parent": None,
        "max_model_len": max_model_len,
    }


def model_list(cards: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """All served names."""
    return {"object": "list", "data": list(cards)}


router = APIRouter(tags=["models"])


@router.get("/v1/models")
async def list_models(request: Request) -> dict[str, Any]:
    """The names the model is served under."""
    state = server_of(request)
    return model_list([_card(state, name) for name in state.names])


@router.get("/v1/models/{name:path}")
async def show_model(request: Request, name: str) -> dict[str, Any]:
    """One of them."""
    state = server_of(request)
    return _card(state, state.model_name(name))


def _card(state: ServerState, name: str) -> dict[str, Any]:
    llm = state.llm()
    return model_card(name, created=state.created, root=llm.config.model.model, max_model_len=llm.max_model_len)
