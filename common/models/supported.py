"""The refusal of a model with a kind of mixer that a backend does not have."""

from __future__ import annotations

from collections.abc import Collection

from pagoda.common.errors import ModelError
from pagoda.common.models.spec import ModelSpec


def check_mixers(spec: ModelSpec, kinds: Collection[type], backend: str) -> None:
    """Raise ModelError naming the first layer with a mixer of another kind than those that a backend computes."""
    for index, layer in enumerate(spec.layers):
        for mixer in layer.mixers:
            if type(mixer) not in kinds:
                problem = f"layer {index} has a mixer of kind {type(mixer).__name__}"
                raise ModelError(f"{problem}, which {backend} does not support; use --backend reference")
