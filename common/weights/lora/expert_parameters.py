"""Adapters of parameters that have all experts of a mixture: peft's `target_parameters`.

Such a parameter has one `lora_A` [E * R, x], experts outside, and one `lora_B` [y, R * E], experts inside. From peft
0.19 on x are the inputs; before, the parameter is [E, x, y]. Wrappers are named by the module: of a module with two
adapted parameters one is `experts`, the other `experts.base_layer`. So shapes tell which parameter it is.

Axis letters: E experts, R rank, F output channels, D input channels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from pagoda.common.errors import ModelError
from pagoda.common.models.families.experts import FUSED_EXPERT_RULES
from pagoda.common.models.family import Rename, Rule, Split
from pagoda.common.models.primitives import Param
from pagoda.common.weights.lora.weights import Float32, LowRank
from pagoda.common.weights.rules import TensorMatch, match_tensor, split_rows

_WRAPPER: Final = ".base_layer"


@dataclass(frozen=True, slots=True)
class ExpertParameter:
    """A parameter of a checkpoint that has all experts' matrices."""

    name: str  # Name of the tensor in the base model.
    rule: Rename | Split
    params: tuple[Param, ...]  # Parameters that the tensor fills, [E, F, D] each.
    stores_inputs_first: bool | None  # None: the shape decides.

    @property
    def experts(self) -> int:
        """Return E."""
        return self.params[0].shape[0]

    @property
    def shape(self) -> tuple[int, int]:
        """Return the outputs of all `params`, and the inputs."""
        return sum(param.shape[1] for param in self.params), self.params[0].shape[2]

    def factors(self, a: Float32, b: Float32, *, reads_inputs: bool) -> dict[str, LowRank]:
        """Return the factors by canonical name of lora_A, and of lora_B times the scale.

        `reads_inputs`: lora_A has the inputs, whatever the parameter's layout. Raises ModelError if neither that nor
        the shapes tell which side has them.
        """
        first = a.reshape(self.experts, -1, a.shape[1])  # Shape [E, R, x].
        second = b.reshape(len(b), -1, self.experts).transpose(2, 1, 0)  # Shape [E, R, y].
        inputs_first = self._inputs_first(a.shape[1], len(b), reads_inputs)
        down, up = (first, second) if inputs_first else (second, first)
        rows = up.swapaxes(1, 2)  # Shape [E, F of all, R].
        split: list[tuple[str, Any]]
        if isinstance(self.rule, Rename):
            split = [(self.params[0].name, rows)]
        else:
            parts = [_narrow(param, rows.shape[2]) for param in self.params]
            split = list(split_rows(self.name, rows, self.rule, parts))
        scales = {param.name: np.float32(param.scale) for param in self.params}
        return {
            name: LowRank(np.ascontiguousarray(down), np.ascontiguousarray(rows_of_param * scales[name]))
            for name, rows_of_param in split
        }

    def _inputs_first(self, x: int, y: int, reads_inputs: bool) -> bool:
        outputs, inputs = self.shape
        if outputs != inputs or reads_inputs:
            return (x, y) == (inputs, outputs)
        if self.stores_inputs_first is None:
            raise ModelError(f"{self.name}: an adapter of square matrices does not tell inputs from outputs; merge it")
        return self.stores_inputs_first


def expert_parameter(
    module: str, shape: tuple[int, int], names: Sequence[str], rules: Sequence[Rule], params: Mapping[str, Param]
) -> ExpertParameter | None:
    """Return the parameter that a wrapper adapts; None if it is that of an ordinary module.

    `shape`: columns of lora_A, rows of lora_B; `names`: last parts of the adapted parameters' names. Raises ModelError
    if the module's parameters have other shapes.
    """
    candidates: list[ExpertParameter] = []
    stem = module
    while stem.endswith(_WRAPPER):
        stem = stem.removesuffix(_WRAPPER)
    for name in names:
        # The code of transformers stacks experts that checkpoints have one by one.
        for among in (rules, FUSED_EXPERT_RULES):
            match = match_tensor(among, f"{stem}.{name}", params)
            parameter = None if match is None else _parameter(f"{stem}.{name}", match, params, of_family=among is rules)
            candidates += [] if parameter is None else [parameter]
    if not candidates:
        return None
    for candidate in candidates:
        if sorted(candidate.shape) == sorted(shape):
            return candidate
    shapes = " or ".join(str(list(candidate.shape)) for candidate in candidates)
    raise ModelError(
        f"module {module} is [{shape[1]}, {shape[0]}] in the adapter and {shapes} in the model; "
        "the adapter is of another base model"
    )


def _parameter(
    name: str, match: TensorMatch, known_params: Mapping[str, Param], *, of_family: bool
) -> ExpertParameter | None:
    params = tuple(known_params[target] for target in match.targets)
    if not isinstance(match.rule, Rename | Split) or any(len(param.shape) != 3 for param in params):
        return None
    transpose = match.rule.transpose
    first = transpose if isinstance(transpose, bool) else None if of_family else False
    return ExpertParameter(name, match.rule, params, first)


def _narrow(param: Param, rank: int) -> Param:
    return Param(param.name, (*param.shape[:2], rank), param.axes)
