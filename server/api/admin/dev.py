"""Routes of --server-dev-mode: sleep, pause, caches, aborts, server information; of --profiler-config: profiles."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import Field

from pagoda.common.errors import ConfigError, RequestError
from pagoda.common.observe.redact import without_secrets
from pagoda.server.http.body import RequestBody, read_body
from pagoda.server.http.errors import HttpError
from pagoda.server.http.state import server_of


class AbortRequest(RequestBody):
    """Ids of the requests to abort; unknown ids are ignored."""

    request_ids: list[str] = Field(max_length=65_536)


router = APIRouter(tags=["development"])
profiler_router = APIRouter(tags=["development"])


@router.post("/reset_prefix_cache")
async def reset_prefix_cache(request: Request) -> dict[str, bool]:
    """Clear the prefix cache; running requests keep their blocks."""
    return {"success": await server_of(request).llm().reset_prefix_cache()}


@router.post("/incident_snapshot")
async def incident_snapshot(request: Request) -> dict[str, str]:
    """Write an incident snapshot of the engine; return its path on the server's machine. See `pagoda replay`."""
    return {"path": await server_of(request).llm().take_snapshot()}


@router.post("/reset_mm_cache", response_model=None)
@router.post("/reset_encoder_cache", response_model=None)
async def reset_other_caches(request: Request) -> Response:
    """No effect: the server has no multimodal or encoder cache."""
    server_of(request).llm()
    return Response(status_code=200)


@router.post("/abort_requests", response_model=None)
async def abort_requests(request: Request) -> Response:
    """Abort the requests in `request_ids`, given by response id or by the request id that the client sent."""
    state = server_of(request)
    body = await read_body(request, AbortRequest, state.config)
    ids = set(body.request_ids)
    llm = state.llm()
    await llm.abort([request_id for request_id in llm.request_ids if ids & _client_ids(request_id)])
    return Response(status_code=200)


def _client_ids(engine_id: str) -> set[str]:
    """Return the ids by which clients know a request. Engine ids are RESPONSE_ID-RANDOM-NUMBER."""
    response_id = engine_id.rsplit("-", 2)[0]
    return {response_id, response_id.partition("-")[2]}


@router.post("/pause")
async def pause(
    request: Request, mode: str = "abort", wait_for_inflight_requests: bool = False, clear_cache: bool = True
) -> dict[str, str]:
    """Pause generation: new requests wait. `mode`: abort in-flight requests, wait for them to finish, or keep them."""
    mode = "wait" if wait_for_inflight_requests else mode
    await server_of(request).llm().pause_generation(mode=mode, clear_cache=clear_cache)
    return {"status": "paused"}


@router.post("/resume")
async def resume(request: Request) -> dict[str, str]:
    """Resume generation."""
    await server_of(request).llm().resume_generation()
    return {"status": "resumed"}


@router.get("/is_paused")
async def is_paused(request: Request) -> dict[str, bool]:
    """Whether generation is paused."""
    return {"is_paused": await server_of(request).llm().is_paused()}


@router.post("/sleep", response_model=None)
async def sleep(request: Request, level: str = "1", mode: str = "abort") -> Response:
    """Free device memory. `level` 1: offload weights to host memory, 2: discard them; `mode`: abort or wait."""
    if not level.isdecimal():
        raise RequestError("level", f"level {level[:50]} is not a number")
    try:
        await server_of(request).sleep(int(level[:9]), mode)
    except ConfigError as error:
        raise HttpError(400, str(error)) from None
    return Response(status_code=200)


@router.post("/wake_up", response_model=None)
async def wake_up(request: Request) -> Response:
    """Reload what /sleep freed: all of it, or the parts in `tags` (may be repeated)."""
    try:
        await server_of(request).wake_up(request.query_params.getlist("tags"))
    except ConfigError as error:
        raise HttpError(400, str(error)) from None
    return Response(status_code=200)


@router.get("/is_sleeping")
async def is_sleeping(request: Request) -> dict[str, bool]:
    """Whether any device memory is offloaded or discarded by /sleep."""
    return {"is_sleeping": await server_of(request).llm().is_sleeping()}


@profiler_router.post("/start_profile", response_model=None)
async def start_profile(
    request: Request,
    profile_prefix: str | None = None,
    delay_iterations: str | None = None,
    max_iterations: str | None = None,
) -> Response:
    """Trace the engine's steps until /stop_profile. Parameters: as in the Python API; unset: as configured."""
    await (
        server_of(request)
        .llm()
        .start_profile(
            profile_prefix,
            delay_iterations=_count("delay_iterations", delay_iterations),
            max_iterations=_count("max_iterations", max_iterations),
        )
    )
    return Response(status_code=200)


def _count(name: str, text: str | None) -> int | None:
    if text is None:
        return None
    if not (text.isascii() and text.isdecimal()):
        raise RequestError(name, f"{name} {text[:50]!r} is not an integer of 0 or more")
    return int(text[:20])


@profiler_router.post("/stop_profile")
async def stop_profile(request: Request) -> dict[str, str]:
    """Write the trace that /start_profile began; return its path on the server's machine."""
    return {"path": await server_of(request).llm().stop_profile()}


@router.get("/server_info")
async def server_info(request: Request, config_format: str = "text") -> dict[str, Any]:
    """Return all settings without secrets, as `config_format` text or json, under vLLM's key vllm_config."""
    state = server_of(request)
    if config_format not in ("text", "json"):
        raise RequestError("config_format", "config_format must be text or json")
    settings = {"engine": without_secrets("", state.engine.config), "server": without_secrets("", state.config)}
    return {"vllm_config": settings if config_format == "json" else _as_text(settings)}


@router.get("/get_world_size")
async def get_world_size(request: Request) -> dict[str, int]:
    """Number of devices of all data-parallel replicas."""
    parallel = server_of(request).engine.config.parallel
    return {"world_size": parallel.tensor_parallel_size * parallel.data_parallel_size}


def _as_text(settings: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{group}.{name}={value!r}" for group, values in settings.items() for name, value in values.items()
    )
