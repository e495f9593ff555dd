"""The OpenAPI description: FastAPI's, with the bodies that the routes parse themselves."""

from __future__ import annotations

from typing import Any, Final

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema

from pagoda.server.protocol.base import Body
from pagoda.server.protocol.chat import ChatCompletionRequest
from pagoda.server.protocol.completion import CompletionRequest

BODIES: Final[dict[str, type[Body]]] = {
    "/v1/chat/completions": ChatCompletionRequest,
    "/v1/completions": CompletionRequest,
}


def described(app: FastAPI) -> dict[str, Any]:
    """The description, made once."""
    if app.openapi_schema is None:
        schema = get_openapi(title=app.title, version=app.version, routes=app.routes)
        models = [(body, "validation") for body in BODIES.values()]
        _, definitions = models_json_schema(models, ref_template="#/components/schemas/{model}")  # type: ignore[arg-type]
        schema.setdefault("components", {}).setdefault("schemas", {}).update(definitions["$defs"])
        for path, body in BODIES.items():
            content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{body.__name__}"}}}
            schema["paths"][path]["post"]["requestBody"] = {"content": content, "required": True}
        app.openapi_schema = schema
    return app.openapi_schema
