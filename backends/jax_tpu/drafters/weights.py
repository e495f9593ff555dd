"""Load a drafter's own parameters into the arrays of its module."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from pagoda.backends.jax_tpu.drafters.drafter import JaxDrafter
from pagoda.backends.jax_tpu.model.model import Leaves
from pagoda.backends.jax_tpu.weights.arrange import Path, Placement
from pagoda.backends.jax_tpu.weights.loading import WeightWriter, rotary_tables, unit_scales, zeros
from pagoda.backends.jax_tpu.weights.placement import once_stacked, placements
from pagoda.common.backend import Weight
from pagoda.common.models.drafters import (
    AttendedInputs,
    DrafterSpec,
    FeatureDrafter,
    HeadsDrafter,
    LanguageDrafter,
    StagesDrafter,
    drafter_params,
)
from pagoda.common.models.shapes import lacking

_DECODER: Path = ("decoder",)


def load_drafter(drafter: JaxDrafter, weights: Iterable[Weight]) -> Leaves:
    """Return every array. Raise WeightError for an unknown, repeated, misshapen or missing parameter."""
    spec = drafter.spec
    model = None
    if isinstance(spec, LanguageDrafter | FeatureDrafter):
        model = spec.model
    writer = WeightWriter(drafter, zeros(drafter), dict(_placements(spec, drafter.target.tensor)), model)
    for path, values in _constants(drafter).items():
        writer.send(path, (), values)
    missing = drafter_params(spec)
    writer.write(weights, missing)
    if missing:
        raise lacking(missing)
    return writer.leaves()


def _constants(drafter: JaxDrafter) -> dict[Path, npt.NDArray[np.float32]]:
    """Return the arrays that come from no checkpoint."""
    scales = unit_scales(drafter)
    length = drafter.target.max_len
    match drafter.spec:
        case LanguageDrafter(model):
            tables = rotary_tables(model.ropes, length)
            return {(*_DECODER, *path): table for path, table in tables.items()} | scales
        case FeatureDrafter():
            return rotary_tables(drafter.spec.ropes, length) | scales
        case _:
            return scales


def _placements(spec: DrafterSpec, tensor: int) -> Iterator[tuple[str, Placement]]:
    """Yield where each parameter lies in the module."""
    match spec:
        case LanguageDrafter(model):
            for name, place in placements(model, tensor).items():
                yield name, replace(place, target=(*_DECODER, *place.target))
        case FeatureDrafter():
            yield from _features(spec, tensor)
        case HeadsDrafter():
            for head in range(spec.heads):
                yield f"heads.{head}.head", Placement(("head",), (head,), _stacked)
                for block in range(spec.blocks):
                    for suffix, target in (("", "blocks"), ("_bias", "biases")):
                        name = f"heads.{head}.blocks.{block}{suffix}"
                        yield name, Placement((target,), (head, block), lambda values: values[None, None])
        case StagesDrafter():
            yield "stages.0.project", Placement(("first_project",))
            for stage in range(spec.stages):
                if stage:
                    yield f"stages.{stage}.project", Placement(("project",), (stage - 1,), _stacked)
                for part in ("embed", "norm", "norm_bias", "head"):
                    yield f"stages.{stage}.{part}", Placement((part,), (stage,), _stacked)


def _features(spec: FeatureDrafter, tensor: int) -> Iterator[tuple[str, Placement]]:
    yield from placements(spec.model, tensor).items()
    yield "target_ids", Placement(("target_ids",))
    yield "inputs.project", Placement(("inputs", "project"))
    yield "inputs.project_bias", Placement(("inputs", "project_bias"))
    for norm in ("embed_norm", "hidden_norm"):
        yield f"inputs.{norm}", Placement(("inputs", norm, "weight"))
        yield f"inputs.{norm}_bias", Placement(("inputs", norm, "bias"))
    if isinstance(spec.inputs, AttendedInputs):
        for name, place in once_stacked(spec.inputs.attention, tensor):
            yield f"inputs.attention.{name}", replace(place, target=("inputs", "attention", *place.target))


def _stacked(values: npt.NDArray[np.generic]) -> npt.NDArray[np.generic]:
    return values[None]
