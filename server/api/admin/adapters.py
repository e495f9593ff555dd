"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import PlainTextResponse, Response

from pagoda.server.http.body import RequestBody, read_body
from pagoda.server.http.state import server_of


class LoadLoRAAdapterRequest(RequestBody):
    """The adapter to serve under `lora_name`; `load_inplace`: in place of the one that has the name."""

    lora_name: str
    lora_path: str
    load_inplace: bool = False


class UnloadLoRAAdapterRequest(RequestBody):
    """The adapter to stop serving. `lora_int_id` is not needed: names are unique."""

    lora_name: str
    lora_int_id: int | None = None


router = APIRouter(tags=["adapters"])


@router.post("/v1/load_lora_adapter", response_model=None)
async def load_lora_adapter(request: Request) -> Response:
    """Read a LoRA adapter from a folder on the server and serve it as a model, or read it again."""
    state = server_of(request)
    body = await read_body(request, LoadLoRAAdapterRequest, state.config)
    state.llm()
    await state.adapters.load(body.lora_name, body.lora_path, in_place=body.load_inplace)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


@router.post("/v1/unload_lora_adapter", response_model=None)
async def unload_lora_adapter(request: Request) -> Response:
    """Stop serving a LoRA adapter; its running requests continue."""
    state = server_of(request)
    body = await read_body(request, UnloadLoRAAdapterRequest, state.config)
    state.llm()
    await state.adapters.unload(body.lora_name)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")
