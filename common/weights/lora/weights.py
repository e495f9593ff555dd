"""What an adapter adds to a model's matrices, by canonical parameter name, and which matrices can have an adapter.

Axis letters: F output channels, D input channels, E experts, V vocab, R rank.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import prod

import numpy as np
import numpy.typing as npt

from pagoda.common.config.groups.model import LORA_RANKS
from pagoda.common.models.primitives import Param
from pagoda.common.models.shapes import params
from pagoda.common.models.spec import Mlp, ModelSpec, Moe

Float32 = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class LowRank:
    """The product b a that is added to a matrix [F, D]; of experts' matrices [E, F, D] one for each expert.

    The embedding table is a matrix [V, D], too: row b[t] a is added to the embedding of token t. With `factor`, as
    DoRA has it, the base matrix W becomes diag(factor) W + b a; the embedding table becomes W diag(factor) + b a. With
    `copy` that is in place of W.
    """

    a: Float32  # Shape [R, D] or [E, R, D].
    b: Float32  # Shape [F, R] or [E, F, R], multiplied by the adapter's scale.
    factor: Float32 | None = None  # Shape [F], of the embedding table [D]; None: 1. Experts have none.
    copy: Float32 | None = None  # Shape [F, D], of `LoraOptions.copies` alone, without a factor; None: the base's W.

    @property
    def num_bytes(self) -> int:
        """Bytes of all arrays."""
        return sum(array.nbytes for array in (self.a, self.b, self.factor, self.copy) if array is not None)


@dataclass(frozen=True, slots=True, eq=False)
class AdapterWeights:
    """An adapter's matrices by canonical parameter name. A parameter that is missing is not changed.

    `head` is the output head's, of tied models too, where `embed` changes the embeddings only. Of a mixer whose values
    are its keys the product of `k` is there again as that of `v`.
    """

    rank: int  # The R of every matrix, one of LORA_RANKS: smaller ones are padded with zeros.
    matrices: Mapping[str, LowRank]
    # Parameter -> the lengths of the rows of W + b a, [F], that DoRA trains; of the embedding table those of the
    # columns, [D]. The files of an adapter have them; `dora.with_factors` replaces them by the factors of `matrices`,
    # and a backend is given none.
    magnitudes: Mapping[str, Float32] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        """Bytes of all matrices."""
        return sum(matrix.num_bytes for matrix in self.matrices.values())


@dataclass(frozen=True, slots=True)
class LoraOptions:
    """The slots for adapters that a backend is created with."""

    slots: int  # Number of adapters that steps may mix.
    max_rank: int  # The largest rank of an adapter, one of LORA_RANKS.
    dtype: str  # Data type of the adapters' matrices in the slots, not `auto`.
    copies: tuple[str, ...] = ()  # Parameters of which a slot has room for a whole copy: `embed`, `head` or both.
    fully_sharded: bool = False  # The matrix a is sharded over tensor-parallel devices, too; there is no DoRA then.


def adaptable(spec: ModelSpec) -> dict[str, Param]:
    """Return the matrices that an adapter may change, by canonical name, in the order of `shapes.params`.

    Those of attention, recurrent mixers, MLPs and experts, the embedding table and the head. Not those that multi-head
    latent attention absorbs (`kv_b`), routers, indexers, mixtures beside an ffn, and blocks that several layers share.
    """
    matrices = params(spec)
    names = {name for name in _names(spec) if name in matrices}
    chosen = {name: param for name, param in matrices.items() if name in names}
    for index, layer in enumerate(spec.layers):
        for number, mixer in enumerate(layer.mixers):
            for copy, original in mixer.lora_copies().items():
                name = f"layers.{index}.mixers.{number}.{copy}"
                source = f"layers.{index}.mixers.{number}.{original}"
                if source in chosen:
                    chosen[name] = replace(chosen[source], name=name)
    if spec.pooler is None:
        chosen["head"] = matrices["head"] if "head" in matrices else replace(matrices["embed"], name="head")
    return chosen


def _names(spec: ModelSpec) -> Iterator[str]:
    yield "embed"
    for index, layer in enumerate(spec.layers):
        for number, mixer in enumerate(layer.mixers):
            if layer.block is None or number:
                yield from (f"layers.{index}.mixers.{number}.{part}" for part in mixer.lora_targets)
        for of in ("ffn", "second.ffn"):
            match layer.ffns.get(of):
                case Mlp():
                    owners = [of]
                case Moe():
                    owners = [f"{of}.experts", f"{of}.shared"]
                case None:
                    owners = []
            yield from (f"layers.{index}.{owner}.{part}" for owner in owners for part in ("gate", "up", "down"))


def slot_elements(matrices: Collection[Param], rank: int) -> int:
    """Return the numbers in a slot for adapters of `rank` of these matrices."""
    return sum(rank * prod(param.shape[:-2]) * sum(param.shape[-2:]) for param in matrices)


def copy_elements(matrices: Mapping[str, Param], copies: Collection[str]) -> int:
    """Return the numbers in a slot for whole copies of these parameters."""
    return sum(prod(matrices[name].shape) for name in copies if name in matrices)


def factor_elements(matrices: Collection[Param]) -> int:
    """Return the numbers in a slot for DoRA's factors of these matrices: one for each output of those without experts.

    The factors of an embedding table are as many as its columns.
    """
    plain = (param for param in matrices if has_factors(param))
    return sum(param.shape[1 if param.name == "embed" else 0] for param in plain)


def has_factors(param: Param) -> bool:
    """Return whether an adapter may scale the matrix: DoRA is not served for experts."""
    return len(param.shape) == 2


def rank_bucket(rank: int) -> int:
    """Return the smallest of LORA_RANKS that is at least `rank`."""
    return next(bucket for bucket in LORA_RANKS if bucket >= rank)
