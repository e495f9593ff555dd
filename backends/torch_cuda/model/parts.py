"""Building blocks shared by decoder and encoder: linear maps, norms, embedding, rotary tables."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from pagoda.backends.reference.model.ops import sigmoid
from pagoda.backends.torch_cuda.attention_backends.protocol import AttentionKernels
from pagoda.backends.torch_cuda.device import Device
from pagoda.backends.torch_cuda.kernels.linear.invariant_linear import invariant_linear
from pagoda.backends.torch_cuda.kernels.linear.packed_linear import packed_linear, takes_rounded_rows
from pagoda.backends.torch_cuda.kernels.linear.quantize_rows import QuantizedRows
from pagoda.backends.torch_cuda.kernels.linear.weight_only import FEW
from pagoda.backends.torch_cuda.kernels.pointwise import activation
from pagoda.backends.torch_cuda.kernels.pointwise.norm import RowNorm
from pagoda.backends.torch_cuda.model.adapters import CudaAdapters
from pagoda.backends.torch_cuda.model.parameters import Matrix, RankParams
from pagoda.backends.torch_cuda.parallel.tensor_parallel import Comm, RankShard
from pagoda.backends.torch_decoder.ops import Linear, NormStep, RoundingNorm, Stream
from pagoda.common.models.primitives import Norm
from pagoda.common.models.rope import Rope, cos_sin
from pagoda.common.models.spec import Activation


def linear(
    weight: Matrix,
    bias: Tensor | None,
    device: Device,
    *,
    batch_invariant: bool = False,
    dtype: torch.dtype | None = None,
) -> Linear:
    """Return the map of weight [out, in], packed or not, and bias [out]; it follows in-place updates of both.

    `batch_invariant`: a row's result does not depend on the others. `dtype`: of the result of a weight that is not
    packed, the weight's or float32; default: the weight's.
    """
    if batch_invariant:
        assert isinstance(weight, Tensor), "packed weights are refused with --batch-invariant"
        return partial(
            invariant_linear,
            weight=weight,
            bias=bias,
            dtype=dtype,
            use_kernel=device.use_kernels,
            chip=device.chip,
        )
    if isinstance(weight, Tensor):
        wider = dtype is not None and dtype != weight.dtype
        return partial(_float32_linear if wider else F.linear, weight=weight, bias=bias)
    return partial(packed_linear, packed=weight, bias=bias, use_kernel=device.use_kernels, chip=device.chip)


def _float32_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return `F.linear` in float32 of 16-bit x [T, in] and weight, whose products are summed without rounding."""
    if x.is_cuda:
        product: Tensor = torch.mm(x, weight.T, out_dtype=torch.float32)
    else:
        product = F.linear(x.float(), weight.float())
    return product if bias is None else product + bias


Rows = Tensor | QuantizedRows
"""Input of a linear map [T, D]; rounded only where `CudaBuildContext.rounds` says that the map takes it."""


@dataclass(frozen=True, slots=True)
class CudaBuildContext:
    """What a model's layers are built from: a rank's parameters, device, communication and attention kernels."""

    params: RankParams
    device: Device
    comm: Comm
    attention: AttentionKernels
    width: int  # of the residual stream
    span: int | None = None  # positions per span of batch-invariant attention; None: without --batch-invariant
    adapters: CudaAdapters | None = None  # LoRA adapters that the linear maps add; None: of no request

    @property
    def batch_invariant(self) -> bool:
        return self.span is not None

    @property
    def shard(self) -> RankShard:
        return RankShard(self.comm.rank, self.comm.size)

    @property
    def table_dtype(self) -> torch.dtype:
        return self.params["embed"].dtype

    @property
    def compute_dtype(self) -> torch.dtype:
        return self.params["embed"].dtype

    def has(self, name: str) -> bool:
        return name in self.params.by_name

    def get(self, name: str) -> Tensor | None:
        return self.params.get(name)

    def tensor(self, name: str) -> Tensor:
        return self.params[name]

    def rows(self, name: str, token_ids: Tensor) -> Tensor:
        """Return rows of a table that is sharded by rows over the ranks."""
        x = lookup(self.params[name], token_ids, self.comm)
        if name != "embed" or self.adapters is None:
            return x
        return self.adapters.add_to_embeddings(x, token_ids, self.comm)

    def activation(self, name: Activation) -> Linear:
        return partial(activation.plain, name=name, use_kernel=self.device.use_kernels)

    def add(self, residual: Tensor | None, update: Tensor) -> Tensor:
        return update if residual is None else residual + update

    def add_both(self, residual: Tensor | None, first: Tensor, second: Tensor) -> Stream:
        return residual, first + second

    def linear(self, name: str) -> Linear:
        """Return the linear map `name`, with adapters; where its outputs are sharded, this rank's part."""
        weight = self.params.matrix(name)
        bias = self.params.get(f"{name}_bias")
        plain = linear(weight, bias, self.device, batch_invariant=self.batch_invariant)
        return plain if self.adapters is None else self.adapters.wrap(name, plain, bias)

    def summed(self, name: str) -> Linear:
        """Return the linear map `name`, whose inputs are sharded, all-reduced over the ranks."""
        partial_sum = self.linear(name)
        comm = self.comm
        return partial_sum if comm.size == 1 else lambda x: comm.all_reduce(partial_sum(x))

    def sum_over_ranks(self, x: Tensor) -> Tensor:
        return self.comm.all_reduce(x)

    def sigmoid(self, x: Tensor) -> Tensor:
        return sigmoid(x) if self.batch_invariant else torch.sigmoid(x)

    def adapted(self, layer: Linear, first: str, *seconds: str) -> Linear:
        """Return a linear map with low-rank adapters; without any, the map itself.

        `first`: the first factors of all, each with as many rows; `seconds`: the second ones, of consecutive outputs.
        """
        if self.params.get(first) is None:
            return layer
        down = self.linear(first)
        ups = [self.linear(name) for name in seconds]

        def both(x: Tensor) -> Tensor:
            parts = down(x).chunk(len(ups), -1)
            return layer(x) + torch.cat([up(part) for up, part in zip(ups, parts)], -1)

        return both

    def norm(self, spec: Norm | None, name: str) -> NormStep:
        """Return the norm `name`; without a spec, the sum alone."""
        return _add if spec is None else self._row_norm(spec, name)

    def rows_norm(self, spec: Norm, name: str) -> Linear:
        """Return the norm `name` as a function of rows [n, H]."""
        norm = self._row_norm(spec, name)
        return lambda x: norm(x)[0]

    def split_norm(self, spec: Norm, name: str, channels: int) -> Linear:
        """Return the plain norm `name` of x [T, n], of whose `channels` each rank has a part."""
        comm = self.comm
        if comm.size == 1:
            return self.rows_norm(spec, name)
        weight = self.params[name].float()

        def norm(x: Tensor) -> Tensor:
            wide = x.float()
            squares = comm.all_reduce(wide.square().sum(1, keepdim=True))
            return (wide * torch.rsqrt(squares / channels + spec.eps) * weight).to(x.dtype)

        return norm

    def _row_norm(self, spec: Norm, name: str) -> RowNorm:
        return RowNorm(
            self.params[name] if spec.scale else self.params["embed"].new_ones(self.width),
            self.params.get(f"{name}_bias"),
            eps=spec.eps,
            kind=spec.kind,
            unit_offset=spec.unit_offset,
            use_kernel=self.device.use_kernels,
            chip=self.device.chip,
        )

    def rounds(self, name: str) -> bool:
        """Return whether the linear map `name` takes rounded rows, if there are more than FEW."""
        adapted = self.adapters is not None or self.batch_invariant
        return not adapted and takes_rounded_rows(self.params.matrix(name), self.device.chip)

    def rounding_norm(self, spec: Norm | None, name: str, reader: str | None) -> RoundingNorm:
        """Return the norm `name`, which rounds what the linear map `reader`, its only one, takes rounded."""
        if spec is None or reader is None or not self.rounds(reader):
            return self.norm(spec, name)
        norm = self._row_norm(spec, name)

        def rounded(update: Tensor, residual: Tensor | None) -> tuple[Any, Tensor]:
            if len(update) <= FEW:
                return norm(update, residual)
            data, scales, total = norm.quantised(update, residual)
            return QuantizedRows(data, scales, update.dtype), total

        return rounded


def _add(update: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
    total = update if residual is None else update + residual
    return total, total


def lookup(table: Tensor, token_ids: Tensor, comm: Comm) -> Tensor:
    """Return the rows [T, n] of tokens [T], of a table whose rows are sharded over the ranks."""
    if comm.size == 1:
        return F.embedding(token_ids, table)
    rows = token_ids - comm.rank * len(table)
    absent = (rows < 0) | (rows >= len(table))
    x = F.embedding(rows.masked_fill(absent, 0), table)
    return comm.all_reduce(x.masked_fill(absent[:, None], 0))


def most_likely(scores: Tensor, vocab: int, comm: Comm) -> Tensor:
    """Return the most likely tokens int64 [R], the first of equal ones, the same on every rank.

    `scores` float32 [R, V / ranks]: this rank's part of `vocab` tokens, with padding. Ranks exchange their best token
    alone, not their scores.
    """
    own = RankShard(comm.rank, comm.size).cut("V", vocab)
    if comm.size == 1:
        return scores[:, own].argmax(-1)
    count = own.stop - own.start
    if count:
        best, column = scores[:, :count].max(-1)
    else:  # all rows of this rank are padding
        best = scores.new_full(scores.shape[:1], -torch.inf)
        column = torch.zeros_like(best, dtype=torch.int64)
    pair = torch.stack([best.view(torch.int32), (column + own.start).to(torch.int32)], -1)
    pairs = comm.gather_last(pair).view(-1, comm.size, 2)
    winner = pairs[:, :, 0].contiguous().view(torch.float32).argmax(-1, keepdim=True)
    return pairs[:, :, 1].gather(1, winner)[:, 0].long()


def rotary_tables(ropes: Iterable[Rope], max_len: int, device: torch.device) -> dict[Rope | None, Tensor | None]:
    """Return float32 [max_len, 2, R/2] of cos and sin for each distinct Rope, computed in float64; None for None."""
    tables: dict[Rope | None, Tensor | None] = {None: None}
    for rope in ropes:
        both = np.stack(cos_sin(rope, max_len, np.arange(max_len)), axis=1)
        tables[rope] = torch.from_numpy(both.astype(np.float32)).to(device)
    return tables
