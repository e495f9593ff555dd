"""What changes a running engine: sleep, pauses, caches, requests to be ended. With --server-dev-mode only."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from enum import Enum
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import Field

from pagoda.common.config.env import is_secret
from pagoda.common.errors import ConfigError, RequestError
from pagoda.server.http.body import RequestBody, read_body
from pagoda.server.http.fields.errors import HttpError
from pagoda.server.http.state import server_of
from pagoda.server.redact import HIDDEN, Redactor

# The body of POST /abort_requests.


class AbortRequest(RequestBody):
    """Requests to end; unknown ids are no error."""

    request_ids: list[str] = Field(max_length=65_536)


router = APIRouter(tags=["development"])


@router.post("/reset_prefix_cache")
async def reset_prefix_cache(request: Request) -> dict[str, bool]:
    """Forget all cached prefixes; running requests keep their blocks."""
    return {"success": await server_of(request).llm().reset_prefix_cache()}


@router.post("/reset_mm_cache", response_model=None)
@router.post("/reset_encoder_cache", response_model=None)
async def reset_other_caches(request: Request) -> Response:
    """Nothing is kept of images or encoders, so that there is nothing to forget."""
    server_of(request).llm()
    return Response(status_code=200)


@router.post("/abort_requests", response_model=None)
async def abort_requests(request: Request) -> Response:
    """End the requests named by `request_ids`: the ids of their answers, or those they were sent under."""
    state = server_of(request)
    body = await read_body(request, AbortRequest, state.config)
    named, llm = set(body.request_ids), state.llm()
    await llm.abort([each for each in llm.request_ids if named & _names_of(each)])
    return Response(status_code=200)


def _names_of(engine_id: str) -> set[str]:
    """What clients may call a request of the engine, whose id is the answer's, a random part and a number."""
    answer_id = engine_id.rsplit("-", 2)[0]
    return {answer_id, answer_id.partition("-")[2]}


@router.post("/pause")
async def pause(
    request: Request, mode: str = "abort", wait_for_inflight_requests: bool = False, clear_cache: bool = True
) -> dict[str, str]:
    """Let new requests wait. `mode`: those under way end (abort) or are finished first (wait)."""
    mode = "wait" if wait_for_inflight_requests else mode
    await server_of(request).llm().pause_generation(mode=mode, clear_cache=clear_cache)
    return {"status": "paused"}


@router.post("/resume")
async def resume(request: Request) -> dict[str, str]:
    """Let requests go on."""
    await server_of(request).llm().resume_generation()
    return {"status": "resumed"}


@router.get("/is_paused")
async def is_paused(request: Request) -> dict[str, bool]:
    """Whether requests wait."""
    return {"is_paused": await server_of(request).llm().is_paused()}


@router.post("/sleep", response_model=None)
async def sleep(request: Request, level: str = "1", mode: str = "abort") -> Response:
    """Give the device's memory back. `level` 1: weights in host memory, 2: read again; `mode`: abort or wait."""
    if not level.isdecimal():
        raise RequestError("level", f"level {level[:50]} is not a number")
    try:
        await server_of(request).sleep(int(level[:9]), mode)
    except ConfigError as error:
        raise HttpError(400, str(error)) from None
    return Response(status_code=200)


@router.post("/wake_up", response_model=None)
async def wake_up(request: Request) -> Response:
    """Have the memory again: all, or the parts named by `tags`, which may be repeated."""
    try:
        await server_of(request).wake_up(request.query_params.getlist("tags"))
    except ConfigError as error:
        raise HttpError(400, str(error)) from None
    return Response(status_code=200)


@router.get("/is_sleeping")
async def is_sleeping(request: Request) -> dict[str, bool]:
    """Whether a part of the memory is away."""
    return {"is_sleeping": await server_of(request).llm().is_sleeping()}


# GET /server_info and /get_world_size: with --server-dev-mode only.


@router.get("/server_info")
async def server_info(request: Request, config_format: str = "text") -> dict[str, Any]:
    """The settings in force, as `config_format` text or json, without secrets. vllm_config: by its name there."""
    state = server_of(request)
    if config_format not in ("text", "json"):
        raise RequestError("config_format", "config_format is text or json")
    found = {"engine": _plain("", state.engine.config), "server": _plain("", state.config)}
    return {"vllm_config": found if config_format == "json" else _text(found)}


@router.get("/get_world_size")
async def get_world_size(request: Request) -> dict[str, int]:
    """How many devices the model is on, all copies together."""
    parallel = server_of(request).engine.config.parallel
    return {"world_size": parallel.tensor_parallel_size * parallel.data_parallel_size}


def _plain(name: str, value: Any) -> Any:
    """A setting as JSON has it; secrets and what looks like one are hidden."""
    if is_secret(name) and value:
        return HIDDEN
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(str(key), each) for key, each in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain("", each) for each in value]
    if isinstance(value, Enum):
        return value.name
    if value is None or isinstance(value, bool | int | float):
        return value
    return Redactor()(str(value))


def _text(found: Mapping[str, Any]) -> str:
    return ", ".join(f"{group}.{name}={value!r}" for group, known in found.items() for name, value in known.items())
