"""The kinds of mixer that a backend computes, so that a model with another is refused at load by name."""

from __future__ import annotations

from dataclasses import dataclass

from pagoda.common.errors import ModelError
from pagoda.common.models.mixers import Mixer
from pagoda.common.models.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Supported:
    """The kinds of mixer that a backend computes; it computes everything else of the specification."""

    backend: str
    mixers: tuple[type, ...]

    def check(self, spec: ModelSpec) -> None:
        """Raise ModelError naming the first layer with a mixer that the backend does not compute."""
        for index, layer in enumerate(spec.layers):
            for mixer in layer.mixers:
                if not isinstance(mixer, self.mixers):
                    problem = f"layer {index} has a mixer of kind {type(mixer).__name__}"
                    raise ModelError(f"{problem}, which {self.backend} does not support; use --backend reference")


def unsupported_mixer(mixer: Mixer) -> ModelError:
    """Return the error for a kind of mixer that a backend does not have; `Supported.check` refuses it before."""
    return ModelError(f"the backend has no mixer of kind {type(mixer).__name__}")
