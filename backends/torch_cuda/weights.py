"""The stream of canonical weights -> a rank's tensors: each parameter's part straight into its place.

A matrix that is packed is put together beside the others first, and packed when its last part has come.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from pagoda.backends.reference.ops import to_torch
from pagoda.backends.torch_cuda.kernels.weight_only import Packed
from pagoda.backends.torch_cuda.layout import Place, make_layout
from pagoda.backends.torch_cuda.parameters import Empty, Matrix, ModelParams, Pack
from pagoda.backends.torch_cuda.sharding import Shard
from pagoda.common.backend import Weight
from pagoda.common.errors import WeightError
from pagoda.common.models.shapes import params
from pagoda.common.models.spec import ModelSpec


class Loader:
    """A rank's parameters in memory that `empty` gives, and what fills them.

    `pack`: for the matrices of layers. `elsewhere`: the memory of those that shall not lie in what `empty` gives.
    """

    def __init__(
        self,
        spec: ModelSpec,
        shard: Shard,
        dtype: torch.dtype,
        empty: Empty,
        pack: Pack | None = None,
        elsewhere: Mapping[str, Empty] | None = None,
    ) -> None:
        self._spec, self._dtype, self._pack = spec, dtype, pack
        self._layout = make_layout(spec, shard)
        self._unfinished: dict[str, Tensor] = {}
        own = elsewhere or {}
        self.params = ModelParams({name: self._allocate(name, own.get(name, empty)) for name in self._layout.shapes})

    def _allocate(self, name: str, empty: Empty) -> Matrix:
        shape = self._layout.shapes[name]
        if self._pack is None or name not in self._layout.matrices:
            return empty(shape, self._dtype)
        like = self._pack(torch.empty(shape, dtype=self._dtype, device="meta"))
        data, scale = (empty(tuple(part.shape), part.dtype) for part in (like.data, like.scale))
        return replace(like, data=data, scale=scale)

    @torch.inference_mode()
    def fill(self, weights: Iterable[Weight]) -> None:
        """Take every parameter, each once; of each only the rank's part is read. Can be called again.

        Raises WeightError naming a parameter that is unknown, repeated, misshapen or missing.
        """
        waiting, places = params(self._spec), self._layout.places
        parts = Counter(place.tensor for place in places.values() if place is not None)
        for name, array in weights:
            param = waiting.pop(name, None)
            if param is None:
                raise WeightError(f"parameter {name} is unknown or came twice")
            if array.shape != param.shape:
                raise WeightError(f"parameter {name} has shape {array.shape}, the model needs {param.shape}")
            if (place := places[name]) is None:
                continue
            self._put(place, to_torch(array[place.cut]))
            parts[place.tensor] -= 1
            if not parts[place.tensor]:
                self._finish(place.tensor)
        if waiting:
            raise WeightError(f"the checkpoint lacks {len(waiting)} parameters, first {next(iter(waiting))}")

    def _put(self, place: Place, part: Tensor) -> None:
        target = self._target(place.tensor)
        if part.dtype != target.dtype:
            part = part.to(target.device)  # cast there
        target[place.into].copy_(part)

    def _target(self, name: str) -> Tensor:
        """Where the parts of a matrix are put together."""
        held = self.params.matrix(name)
        if isinstance(held, Tensor):
            return held
        if name not in self._unfinished:
            shape = self._layout.shapes[name]
            self._unfinished[name] = torch.empty(shape, dtype=self._dtype, device=held.data.device)
        return self._unfinished[name]

    def _finish(self, name: str) -> None:
        """All parts are there."""
        held = self.params.matrix(name)
        if isinstance(held, Packed):
            assert self._pack is not None, "what is packed can be packed again"
            packed = self._pack(self._unfinished.pop(name))
            held.data.copy_(packed.data)
            held.scale.copy_(packed.scale)
        elif (filled := self._layout.filled.get(name)) is not None:
            held[filled:].zero_()
