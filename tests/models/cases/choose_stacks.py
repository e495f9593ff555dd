"""Choose the layers of the models in `stacks.py` and write them.

python tests/models/cases/choose_stacks.py
"""

from __future__ import annotations

import json
import sys
from collections.abc import Hashable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TypeVar

sys.path.insert(0, str(Path(__file__).parents[2]))

from models.cases.features import Pair, frame_features, layer_features, pairs, pairs_of
from models.cases.stacks import FILE, LayerName, Stack, specs_of, stands_alone
from models.oracles.kept_logits import read_cases

from pagoda.common.models.spec import Layer, ModelSpec

FULL, WINDOW, STATE, LATENT, INDEX = "FullCache", "WindowCache", "StateCache", "LatentCache", "IndexCache"
ROPE = "Rope"
PLACES = {
    **{f"full-{number}": (FULL, ROPE) for number in range(1, 4)},
    **{"window": (WINDOW, ROPE), "window-full": (FULL, WINDOW, ROPE)},
    **{"state": (STATE,), "state-full": (FULL, STATE, ROPE), "state-window-full": (FULL, STATE, WINDOW, ROPE)},
    **{"latent": (LATENT, ROPE), "latent-state": (LATENT, STATE, ROPE), "latent-index": (INDEX, LATENT, ROPE)},
    "full-index": (FULL, INDEX, ROPE),
}
"""Models to fill, and the caches that their layers may have: as families have them together. And whether positions."""
DISTINCT = ("window", "latent")
"""Models of distinct layers. In others the first two come twice, in turn: some backends roll equal layers up."""
SEEDS = {"state": 23, "latent-state": 17, "full-index": 25}
"""Of the weights of models whose first ones float32 rounds too much."""

NameT = TypeVar("NameT", bound=Hashable)


def cover(sets: Mapping[NameT, set[Pair]], done: set[Pair]) -> list[NameT]:
    """Return few names whose sets have together every pair that is not done: each time the one with most."""
    todo, chosen = set().union(*sets.values()) - done, list[NameT]()
    while todo:
        best = max(sets, key=lambda name: len(sets[name] & todo))
        chosen.append(best)
        todo -= sets[best]
    for name in list(chosen):
        if sets[name] <= done.union(*(sets[other] for other in chosen if other != name)):
            chosen.remove(name)
    return chosen


def kinds(layer: Layer) -> set[str]:
    """Return the kinds of a layer's caches, and ROPE if it has tables of positions."""
    ropes = {ROPE for mixer in layer.mixers for _ in mixer.ropes()}
    return ropes | {type(cache).__name__ for mixer in layer.mixers for cache in mixer.caches()}


def choose(specs: Mapping[str, ModelSpec]) -> dict[str, Stack]:
    """Return models that have together every pair of features of the specifications."""
    indivisible = [name for name, spec in specs.items() if spec.per_layer or not all(map(stands_alone, spec.layers))]
    models = cover({name: pairs_of(specs[name]) for name in indivisible}, set())
    done = set[Pair]().union(*(pairs_of(specs[name]) for name in models))
    width = next(iter(specs.values())).width
    alike = {name: spec for name, spec in specs.items() if spec.width == width}
    layers = {(name, index): layer for name, spec in alike.items() for index, layer in enumerate(spec.layers)}
    alone = {name: pairs(layer_features(layer)) for name, layer in layers.items() if stands_alone(layer)}
    frames = cover({name: pairs(frame_features(spec)) for name, spec in alike.items()}, done)
    placed: dict[str, list[LayerName]] = {place: [] for place in PLACES}
    for name in sorted(cover(alone, done), key=lambda name: -len(kinds(layers[name]))):
        fitting = [place for place, allowed in PLACES.items() if kinds(layers[name]) <= set(allowed)]
        placed[min(fitting, key=lambda place: len(placed[place]))].append(name)
    assert len(frames) <= len(PLACES), "more models are needed"
    stacks = {}
    for (place, layer_names), frame in zip(placed.items(), [*frames, *frames]):
        again = [] if place in DISTINCT else layer_names[:2]
        stacks[place] = Stack(frame, (*again, *layer_names), SEEDS.get(place, 0))
    return stacks | {name: Stack(name, ()) for name in models}


def write(stacks: Mapping[str, Stack]) -> None:
    """Write the models, a line for each."""
    lines = [f"{json.dumps(name)}: {json.dumps(asdict(stack))}" for name, stack in stacks.items()]
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    write(choose(specs_of(read_cases())))
