"""GET /v1/models and GET /v1/models/{name}."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from pagoda.server.http.state import ServerState
from pagoda.server.protocol.models import model_card, model_list
from pagoda.server.routes.shared import server_of

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
