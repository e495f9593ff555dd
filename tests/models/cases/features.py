"""What backends may tell apart in a model's specification: features, and pairs of them that occur together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import MISSING, Field, fields, is_dataclass
from itertools import combinations
from typing import Any

from pagoda.common.models.spec import Layer, ModelSpec

Feature = str
"""Where something is and what: a class, a choice, a mechanism that is there. Numbers count by being there."""
Pair = tuple[Feature, Feature]
"""In alphabetical order; twice the same stands for the feature by itself."""


def layer_features(layer: Layer) -> frozenset[Feature]:
    """Features of a layer: of its mixers and their ropes and caches, of its ffn, its norms, and how they are joined."""
    features = {f"mixers {len(layer.mixers)}", f"ffn {type(layer.ffn).__name__}"}
    for field in fields(layer):
        if field.name != "mixers":
            features |= set(_of_field(layer, field, ""))
    for mixer in layer.mixers:
        features |= set(_features(mixer, type(mixer).__name__))
        features |= {f"cache {type(cache).__name__}" for cache in mixer.caches()}
    return frozenset(features)


def frame_features(spec: ModelSpec) -> frozenset[Feature]:
    """Features of a model outside of its layers: of its embedding, its final norm and its head."""
    return frozenset(
        feature for field in fields(spec) if field.name != "layers" for feature in _of_field(spec, field, "")
    )


def whole_features(spec: ModelSpec) -> frozenset[Feature]:
    """What layers are together: which caches they have, whether they share tables of positions, which are alike."""
    kinds = sorted({type(cache).__name__ for cache in spec.caches})
    ropes = f"tables of positions {min(len(spec.ropes), 2)}"
    return frozenset(
        {f"all caches {' '.join(kinds)}", ropes, f"layers alike {len(set(spec.layers)) < len(spec.layers)}"}
    )


def pairs(features: Iterable[Feature]) -> set[Pair]:
    """Every two features that occur together, and each by itself."""
    ordered = sorted(features)
    return set(combinations(ordered, 2)) | {(feature, feature) for feature in ordered}


def pairs_of(spec: ModelSpec) -> set[Pair]:
    """Pairs of features that a model has in one of its layers, or outside of them; and features of all layers."""
    layers = (pairs(layer_features(layer)) for layer in set(spec.layers))
    return set().union(pairs(frame_features(spec)), ((feature, feature) for feature in whole_features(spec)), *layers)


def _features(value: Any, where: str) -> Iterator[Feature]:
    match value:
        case None | False:
            pass
        case True:
            yield where
        case str():
            yield f"{where} {value}"
        case tuple():
            yield from (feature for part in value if is_dataclass(part) for feature in _features(part, where))
            yield where
        case _ if is_dataclass(value):
            yield f"{where} {type(value).__name__}"
            for field in fields(value):
                yield from _of_field(value, field, where)
        case _:
            yield where


def _of_field(owner: Any, field: Field[Any], where: str) -> Iterator[Feature]:
    value, name = getattr(owner, field.name), f"{where}.{field.name}".removeprefix(".")
    if field.default is not MISSING and value == field.default:
        return
    if value is None or value is False:
        yield f"no {name}"  # by default there is one
    elif field.default is not MISSING or not isinstance(value, int | float) or value is True:
        yield from _features(value, name)
