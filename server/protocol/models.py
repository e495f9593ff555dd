"""The list of models, in OpenAI's shape with vLLM's extras."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


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
