"""Building blocks shared by decoder and encoder: linear maps, norms, embedding, rotary tables."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from pagoda.backends.reference.execution import Embedded
from pagoda.backends.torch_cuda.attention_backends.protocol import PrefillAttention
from pagoda.backends.torch_cuda.device import Device
from pagoda.backends.torch_cuda.kernels.norm import norm
from pagoda.backends.torch_cuda.kernels.weight_only import weight_only_linear
from pagoda.backends.torch_cuda.model.parameters import Matrix, RankParams
from pagoda.backends.torch_cuda.parallel import Comm, RankShard
from pagoda.common.models.primitives import Norm
from pagoda.common.models.rope import Rope, cos_sin
from pagoda.common.models.spec import Embedding, ModelSpec

Linear = Callable[[Tensor], Tensor]
"""[T, in] -> [T, out]."""


def linear(weight: Matrix, bias: Tensor | None, device: Device) -> Linear:
    """Return the map of weight [out, in], packed or not, and bias [out]; it follows in-place updates of both."""
    if isinstance(weight, Tensor):
        return partial(F.linear, weight=weight, bias=bias)
    return partial(weight_only_linear, packed=weight, bias=bias, use_kernel=device.use_kernels, chip=device.chip)


NormStep = Callable[[Tensor, Tensor | None], tuple[Tensor, Tensor]]
"""(update [T, D], residual [T, D] or None) -> (their sum normalised, their sum)."""


@dataclass(frozen=True, slots=True)
class CudaBuildContext:
    """What a model's layers are built from: a rank's parameters, device, communication and prefill attention."""

    params: RankParams
    device: Device
    comm: Comm
    prefill: PrefillAttention

    @property
    def shard(self) -> RankShard:
        return RankShard(self.comm.rank, self.comm.size)

    def linear(self, name: str) -> Linear:
        """Return the linear map `name`; where its outputs are sharded, this rank's part."""
        return linear(self.params.matrix(name), self.params.get(f"{name}_bias"), self.device)

    def summed(self, name: str) -> Linear:
        """Return the linear map `name`, whose inputs are sharded, all-reduced over the ranks."""
        partial_sum, comm = self.linear(name), self.comm
        return partial_sum if comm.size == 1 else lambda x: comm.all_reduce(partial_sum(x))

    def norm(self, spec: Norm | None, name: str) -> NormStep:
        """Return the norm `name`; without a spec, the sum alone."""
        if spec is None:
            return _add
        normalise = partial(
            norm,
            weight=self.params[name],
            bias=self.params.get(f"{name}_bias"),
            eps=spec.eps,
            kind=spec.kind,
            unit_offset=spec.unit_offset,
            use_kernel=self.device.use_kernels,
        )
        return lambda update, residual: normalise(update, residual=residual)


def _add(update: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
    total = update if residual is None else update + residual
    return total, total


class CudaTokenEmbedding:
    """Token ids -> first hidden states: table (sharded by rows), scale, projection, positions, types, norm."""

    def __init__(self, spec: Embedding, build: CudaBuildContext) -> None:
        params = build.params
        self.spec, self.comm = spec, build.comm
        self.table, self.positions = params["embed"], params.get("positions")
        self.types = params.get("token_types")
        self.norm = build.norm(spec.norm, "embed_norm")
        self.project = build.linear("embed_in") if params.get("embed_in") is not None else None
        self.scale = float(torch.tensor(spec.scale).to(self.table.dtype))  # rounded to the weights' dtype, as trained

    def __call__(
        self,
        token_ids: Tensor,
        positions: Tensor,
        token_types: Tensor | None = None,
        embedded: Embedded | None = None,
    ) -> Tensor:
        """Return [T, D] of token_ids, positions, token_types [T]; None: all types are 0.

        `embedded`: replaces rows after lookup and scaling.
        """
        x = self._rows(token_ids if embedded is None else embedded.mask_ids(token_ids))
        if self.scale != 1.0:
            x = x * self.scale
        if embedded is not None:
            x = embedded.insert(x)
        if self.project is not None:
            x = self.project(x)
        if self.positions is not None:
            x = x + F.embedding(positions + self.spec.position_offset, self.positions)
        if self.types is not None:
            x = x + (self.types[0] if token_types is None else F.embedding(token_types, self.types))
        return self.norm(x, None)[0]

    def _rows(self, token_ids: Tensor) -> Tensor:
        if self.comm.size == 1:
            return F.embedding(token_ids, self.table)
        rows = token_ids - self.comm.rank * len(self.table)
        absent = (rows < 0) | (rows >= len(self.table))
        x = F.embedding(rows.masked_fill(absent, 0), self.table)
        return self.comm.all_reduce(x.masked_fill(absent[:, None], 0))


def rotary_tables(spec: ModelSpec, max_len: int, device: torch.device) -> dict[Rope | None, Tensor | None]:
    """Return float32 [max_len, 2, R/2] of cos and sin for each distinct Rope, computed in float64; None for None."""
    tables: dict[Rope | None, Tensor | None] = {None: None}
    for rope in spec.ropes:
        both = np.stack(cos_sin(rope, max_len, np.arange(max_len)), axis=1)
        tables[rope] = torch.from_numpy(both.astype(np.float32)).to(device)
    return tables
