"""What an adapter adds to a model's matrices, by canonical parameter name, and which matrices can have an adapter.

Axis letters: F output channels, D input channels, E experts, V vocab, R rank.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
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

    The embedding table is a matrix [V, D], too: row b[t] a is added to the embedding of token t.
    """

    a: Float32  # Shape [R, D] or [E, R, D].
    b: Float32  # Shape [F, R] or [E, F, R], multiplied by the adapter's scale.


@dataclass(frozen=True, slots=True, eq=False)
class AdapterWeights:
    """An adapter's matrices by canonical parameter name. A parameter that is missing is not changed.

    `head` is the output head's, of tied models too, where `embed` changes the embeddings only. Of a mixer whose values
    are its keys the product of `k` is there again as that of `v`.
    """

    rank: int  # The R of every matrix, one of LORA_RANKS: smaller ones are padded with zeros.
    matrices: Mapping[str, LowRank]

    @property
    def num_bytes(self) -> int:
        """Bytes of all matrices."""
        return sum(matrix.a.nbytes + matrix.b.nbytes for matrix in self.matrices.values())


@dataclass(frozen=True, slots=True)
class LoraOptions:
    """The slots for adapters that a backend is created with."""

    slots: int  # Number of adapters that steps may mix.
    max_rank: int  # The largest rank of an adapter, one of LORA_RANKS.
    dtype: str  # Data type of the adapters' matrices in the slots, not `auto`.
    fully_sharded: bool = False  # The matrix a is sharded over tensor-parallel devices, too.


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


def rank_bucket(rank: int) -> int:
    """Return the smallest of LORA_RANKS that is at least `rank`."""
    return next(bucket for bucket in LORA_RANKS if bucket >= rank)
