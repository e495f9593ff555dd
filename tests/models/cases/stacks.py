"""Models whose layers are those of many families, for the backends that compile: fewer models, every feature.

`tests/data/parity/stacks.json` names their layers, and families whose layers depend on each other, which run as they
are. `choose_stacks.py` writes it.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
from models.oracles.kept_logits import FOLDER, TOKENS, Kept

from pagoda.common.backend import Weight
from pagoda.common.models.primitives import Param
from pagoda.common.models.shapes import params
from pagoda.common.models.spec import Layer, ModelSpec

FILE = FOLDER / "stacks.json"
LayerName = tuple[str, int]
"""A case and the number of its layer."""


@dataclass(frozen=True)
class Stack:
    """`frame`: the case with the embedding, the final norm and the head. No layers: the case as it is."""

    frame: str
    layers: tuple[LayerName, ...]
    seed: int = 0

    def spec(self, specs: Mapping[str, ModelSpec]) -> ModelSpec:
        """Return the model."""
        spec = specs[self.frame]
        if not self.layers:
            return spec
        return replace(spec, layers=tuple(specs[case].layers[number] for case, number in self.layers))

    def weights(self, cases: Mapping[str, Kept], spec: ModelSpec) -> list[Weight]:
        """Return the parameters: random ones, or those of the case."""
        return list(random_weights(spec, self.seed) if self.layers else cases[self.frame].weights())


def specs_of(cases: Mapping[str, Kept]) -> dict[str, ModelSpec]:
    """Return the specifications of all cases whose maths are their own."""
    return {name: case.spec for name, case in cases.items() if not case.names_only}


def read_stacks() -> dict[str, Stack]:
    """Return the models by name."""
    return {
        name: Stack(entry["frame"], tuple((case, number) for case, number in entry["layers"]), entry["seed"])
        for name, entry in json.loads(FILE.read_text()).items()
    }


def stands_alone(layer: Layer) -> bool:
    """Return whether a layer depends on no other one."""
    shares = any(getattr(mixer, "shares_cache_of", None) is not None for mixer in layer.mixers)
    return not any(mixer.shares_selection for mixer in layer.mixers) and not (shares or layer.blend or layer.block)


def random_weights(spec: ModelSpec, seed: int) -> Iterator[Weight]:
    """Yield random parameters: matrices that keep the scale of their input, states that last."""
    for param in params(spec).values():
        generator = np.random.RandomState(zlib.crc32(f"{seed} {param.name}".encode()))
        mean, std = _moments(param)
        yield param.name, np.asarray(generator.standard_normal(param.shape) * std + mean, np.float32)


def _moments(param: Param) -> tuple[float, float]:
    """Return mean and deviation."""
    kind = param.name.rsplit(".", 1)[-1]
    if kind == "decay_rate":
        return -2.0, 1.0  # a state that holds the last token alone is ill-conditioned, for it is normalised
    if kind in ("embed", "positions"):
        return 0.0, 2.0  # of a stream to which each of many layers adds a part
    if len(param.shape) > 1:
        return 0.0, param.shape[-1] ** -0.5
    if kind.endswith(("bias", "offset", "correction")):
        return 0.0, 0.2
    return 1.0, 0.3


def prompt() -> list[int]:
    """Return tokens that every vocabulary has."""
    return np.random.RandomState(0).randint(0, 97, TOKENS).tolist()
