"""JSON objects laid over each other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def merged(lower: Mapping[str, Any], upper: Mapping[str, Any]) -> dict[str, Any]:
    """`upper` over `lower`, objects within objects merged too."""
    found = dict(lower)
    for key, value in upper.items():
        below = found.get(key)
        found[key] = merged(below, value) if isinstance(below, Mapping) and isinstance(value, Mapping) else value
    return found
