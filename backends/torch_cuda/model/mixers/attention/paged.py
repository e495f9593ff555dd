"""Grouped-query attention over the paged cache.

Order within a layer: project, normalise, rotate, write K and V of *all* sequences, then attend: a sequence may read
blocks that another one fills in the same step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from pagoda.backends.reference.model.ops import sigmoid
from pagoda.backends.torch_cuda.attention_backends.protocol import DecodeAttention, PrefillAttention, score_rules
from pagoda.backends.torch_cuda.device import Device
from pagoda.backends.torch_cuda.execution.step_input import CudaStepBatch
from pagoda.backends.torch_cuda.kernels.attention.decode_attention import PagedDecode
from pagoda.backends.torch_cuda.kernels.attention.invariant_attention import SequenceTokens, invariant_attention
from pagoda.backends.torch_cuda.kernels.attention.rope_cache import NormWeights, RopeCache, rope_queries, rotated
from pagoda.backends.torch_cuda.kernels.attention.shared import HeadTerms, ScoreRules
from pagoda.backends.torch_cuda.kernels.pointwise.norm import RowNorm
from pagoda.backends.torch_cuda.memory.cache import CudaCache, CudaLayerCache
from pagoda.backends.torch_cuda.model.parts import CudaBuildContext
from pagoda.backends.torch_cuda.parallel.tensor_parallel import RankShard
from pagoda.backends.torch_decoder.functions import query_growth
from pagoda.backends.torch_decoder.ops import Linear
from pagoda.common.models.mixers import Attention
from pagoda.common.models.primitives import Norm

Normalise = Callable[[Sequence[Tensor]], list[Tensor]]
"""q, and k if the layer projects it -> the same, normalised."""


class CudaPagedHeads:
    """Attention of projected heads, whose K and V are in the cache. Head n reads KV head n // (N/K)."""

    def __init__(
        self,
        spec: Attention,
        device: Device,
        prefill: PrefillAttention,
        terms: HeadTerms,
        span: int | None = None,
        decode: DecodeAttention | None = None,
    ) -> None:
        """`span`: positions per span of batch-invariant attention; None: decodes and prefills have own kernels.

        `decode`: in place of our own kernel.
        """
        self.spec = spec
        self.device = device
        self.prefill = prefill
        self.terms = terms
        self.span = span
        self.decode = decode

    def attend(self, queries: Tensor, batch: CudaStepBatch, cache: CudaLayerCache) -> Tensor:
        """Return [T, N, V] of queries [T, N, H]."""
        if self.span is not None:
            return self._attend_invariantly(queries, batch, cache, self.span)
        if batch.tiles is None and self.decode is not None:
            return self.decode(queries, batch, cache, self.spec)
        out = self._results(queries)
        decodes = batch.num_decodes * batch.query_len
        if batch.tiles is None:
            return self._decode(queries, batch, cache, out)
        if decodes:
            self._decode(queries[:decodes], batch, cache, out[:decodes])
        self.prefill(queries, batch, cache, self.spec, self.terms, out)
        return out

    def _results(self, queries: Tensor) -> Tensor:
        """Return memory for the results of queries [T, N, H]."""
        return queries.new_empty(*queries.shape[:2], self.spec.value_width)

    def _attend_invariantly(self, queries: Tensor, batch: CudaStepBatch, cache: CudaLayerCache, span: int) -> Tensor:
        spec = self.spec
        tables = batch.groups[cache.group].tables
        decodes = batch.num_decodes
        rules = ScoreRules(
            spec.scale,
            spec.window,
            spec.softcap,
            self.terms.sinks,
            self.terms.slopes,
            cache.k_scale,
            cache.v_scale,
            root=spec.alibi_root,
        )
        out = self._results(queries)

        def attend(tables: Tensor, tokens: SequenceTokens) -> None:
            invariant_attention(
                queries,
                cache.keys,
                cache.values,
                tables,
                tokens,
                rules,
                span=span,
                out=out,
                use_kernel=self.device.use_kernels,
                chip=self.device.chip,
            )

        if decodes:
            counts = None if batch.query_counts is None else batch.query_counts[:decodes]
            attend(tables[:decodes], SequenceTokens(batch.kv_lens[:decodes], batch.query_len, counts))
        if batch.tiles is not None:
            assert batch.tile is not None, "tiles have a size"
            start = batch.query_start
            attend(tables, SequenceTokens(batch.kv_lens, query_start=start, tiles=batch.tiles, tile=batch.tile))
        return out

    def _decode(self, queries: Tensor, batch: CudaStepBatch, cache: CudaLayerCache, out: Tensor) -> Tensor:
        if self.decode is not None:
            return out.copy_(self.decode(queries, batch, cache, self.spec))
        attend: PagedDecode | None = cache.prepared.get((self, batch.query_len))
        if attend is None:
            attend = cache.prepared[self, batch.query_len] = self._decode_over(cache, queries, batch.query_len)
        tables = batch.groups[cache.group].tables
        kv_lens = batch.kv_lens
        if kv_lens.shape[0] > batch.num_decodes:
            tables = tables[: batch.num_decodes]
            kv_lens = kv_lens[: batch.num_decodes]
        return attend(queries, tables, kv_lens, out, query_counts=batch.query_counts, work=batch.work)

    def _decode_over(self, cache: CudaLayerCache, queries: Tensor, query_len: int) -> PagedDecode:
        return PagedDecode(
            cache.keys,
            cache.values,
            score_rules(self.spec, self.terms, cache),
            dtype=queries.dtype,
            group=queries.shape[1] // cache.keys.shape[1],
            query_len=query_len,
            use_kernel=self.device.use_kernels,
            chip=self.device.chip,
        )


class CudaAttention(CudaPagedHeads):
    """One layer's attention over a rank's share of the heads."""

    def __init__(
        self, spec: Attention, cos_sin: Tensor | None, build: CudaBuildContext, prefix: str, number: int
    ) -> None:
        """`number`: of the cache that it reads."""
        terms = head_terms(spec, build, prefix)
        kernels = build.attention
        super().__init__(spec, build.device, kernels.prefill, terms, build.span, kernels.decode)
        self.number = number
        self.project = CudaProjection(spec, cos_sin, build, prefix)

    def __call__(self, x: Tensor, batch: CudaStepBatch, caches: Mapping[int, CudaCache]) -> Tensor:
        """Return [T, D] of x [T, D]."""
        cache = caches[self.number]
        assert isinstance(cache, CudaLayerCache), "attention keeps K and V"
        queries = self.queries(x, batch, cache)
        if self.spec.query_growth is not None:
            queries = queries * query_growth(self.spec.query_growth, batch.positions).to(queries.dtype)
        return self.project.out(self.attend(queries, batch, cache), x)

    def queries(self, x: Tensor, batch: CudaStepBatch, cache: CudaLayerCache) -> Tensor:
        """Return queries [T, N, H], normalised and rotated; K and V are written to the cache if it is the layer's."""
        projected = self.project(x, batch.positions)
        if self.spec.shares_cache_of is not None:
            return self.project.queries(projected, batch.positions)
        write: RopeCache | None = cache.prepared.get(self)
        if write is None:
            write = self.project.writer(cache.keys, cache.values, k_scale=cache.k_scale, v_scale=cache.v_scale)
            cache.prepared[self] = write
        return write(projected, batch.positions, batch.groups[cache.group].slots)


class CudaProjection:
    """One layer's projections around attention to a rank's share of the heads."""

    def __init__(self, spec: Attention, cos_sin: Tensor | None, build: CudaBuildContext, prefix: str) -> None:
        self.spec = spec
        self.device = build.device
        self.heads = build.shard.share(spec.heads)
        self.kv_heads = build.shard.share(spec.kv_heads)
        self._sigmoid = sigmoid if build.batch_invariant else torch.sigmoid
        self._qkv = projection(spec, build, f"{prefix}.qkv")
        self._out = build.summed(f"{prefix}.out")
        self._gate = build.linear(f"{prefix}.gate") if spec.output_gate else None
        self._out_norm = None
        if spec.out_norm is not None:
            self._out_norm = build.split_norm(spec.out_norm, f"{prefix}.out_norm", spec.heads * spec.value_width)
        self._q_norm = per_head_norm(spec, build, f"{prefix}.q_norm")
        self._k_norm = per_head_norm(spec, build, f"{prefix}.k_norm") if spec.shares_cache_of is None else None
        self._v_norm = value_norm(spec, build)
        self._prepare = make_preparation(spec, cos_sin, build, prefix)
        self._cos_sin = None if spec.qk_norm_after_rope else cos_sin

    def __call__(self, x: Tensor, positions: Tensor) -> Tensor:
        """Return q, k and v [T, (N+K)*H + K*V] of x [T, D], or q alone, as the kernel reads them."""
        projected = self._qkv(x)
        return projected if self._prepare is None else self._prepare(projected, positions)

    def queries(self, projected: Tensor, positions: Tensor) -> Tensor:
        """Return queries [T, N, H], normalised and rotated, of a layer that reads the K and V of another one."""
        return rope_queries(
            projected,
            positions,
            heads=self.heads,
            cos_sin=self._cos_sin,
            q_norm=self._q_norm,
            use_kernel=self.device.use_kernels,
        )

    def writer(
        self, keys: Tensor, values: Tensor, *, k_scale: Tensor | None = None, v_scale: Tensor | None = None
    ) -> RopeCache:
        """Return what writes K and V to keys [P, K, B, H] and values [P, K, B, V], and returns the queries."""
        return RopeCache(
            keys,
            values,
            heads=self.heads,
            kv_heads=self.kv_heads,
            cos_sin=self._cos_sin,
            q_norm=self._q_norm,
            k_norm=self._k_norm,
            v_norm=self._v_norm,
            values_are_keys=self.spec.values_are_keys,
            k_scale=k_scale,
            v_scale=v_scale,
            use_kernel=self.device.use_kernels,
            chip=self.device.chip,
        )

    def out(self, heads: Tensor, x: Tensor) -> Tensor:
        """Return [T, D] of attended heads [T, N, V] and the layer's input x [T, D], of which the gate is computed."""
        if self._gate is not None:
            heads = heads * self._sigmoid(self._gate(x)).unflatten(1, (self.heads, -1))  # one per channel, or per head
        flat = heads.flatten(1)
        return self._out(flat if self._out_norm is None else self._out_norm(flat))


def head_terms(spec: Attention, build: CudaBuildContext, prefix: str) -> HeadTerms:
    """Return the sinks and ALiBi slopes of the rank's heads."""
    slopes = None
    if spec.alibi_slopes is not None:
        own = build.shard.cut("N", spec.heads, spec.kv_heads)
        slopes = torch.tensor(spec.alibi_slopes[own], dtype=torch.float32, device=build.device.torch)
    return HeadTerms(build.params.get(f"{prefix}.sinks"), slopes)


def projection(spec: Attention, build: CudaBuildContext, name: str) -> Linear:
    """Return the map of x [T, D] to qkv [T, (N+K)*H + K*V], or to q alone, clamped if the layer says so."""
    prefix = name.removesuffix(".qkv")
    limit = spec.qkv_clip
    outs = (f"{prefix}.{part}_adapter_out" for part in "qkv")
    project = build.adapted(build.linear(name), f"{prefix}.adapter", *outs)
    return project if limit is None else lambda x: project(x).clamp_(-limit, limit)


def per_head_norm(spec: Attention, build: CudaBuildContext, name: str) -> NormWeights | None:
    """Return the weights of a norm of heads that the kernel applies, if the layer has one."""
    if spec.qk_norm is None or not _in_kernel(spec, spec.qk_norm):
        return None
    weight = build.params[name] if spec.qk_norm.scale else build.params["embed"].new_ones(spec.head_dim)
    return NormWeights(weight, spec.qk_norm.eps, spec.qk_norm.unit_offset)


def value_norm(spec: Attention, build: CudaBuildContext) -> NormWeights | None:
    """Return the norm of value heads, which has no weights, if the layer has one."""
    if spec.value_norm is None:
        return None
    return NormWeights(build.params["embed"].new_ones(spec.value_width), spec.value_norm.eps)


def _in_kernel(spec: Attention, norm: Norm) -> bool:
    """Whether the kernel that rotates and writes to the cache applies the qk norm."""
    return norm.kind == "rms" and spec.qk_norm_over == "per_head" and not spec.qk_norm_after_rope


Prepare = Callable[[Tensor, Tensor], Tensor]
"""(qkv [T, (N+K)*H + K*V], positions int32 [T]) -> qkv; or q alone of a layer that reads another one's K and V."""


def make_preparation(spec: Attention, cos_sin: Tensor | None, build: CudaBuildContext, prefix: str) -> Prepare | None:
    """Return what normalises (and with `qk_norm_after_rope` first rotates) q and k before the kernel; None: nothing."""
    norm = spec.qk_norm
    if norm is None or _in_kernel(spec, norm):
        return None
    assert not spec.values_are_keys, "values are the keys before their norm"
    if spec.qk_norm_over == "full":
        full_norm = make_projection_norm(spec, norm, build, prefix)
        return lambda qkv, positions: full_norm(qkv)
    head_norms = [_head_norm(spec, norm, build, f"{prefix}.{name}") for name in _normed(spec)]
    sizes = _projected(spec, build.shard)

    def prepare(qkv: Tensor, positions: Tensor) -> Tensor:
        parts = qkv.split(sizes, dim=1)
        normed = [part.unflatten(1, (-1, spec.head_dim)) for part in parts[: len(head_norms)]]
        if spec.qk_norm_after_rope:
            normed = [rotated(part, positions, cos_sin) for part in normed]
        heads = (norm(part).flatten(1) for norm, part in zip(head_norms, normed))
        return torch.cat([*heads, *parts[len(head_norms) :]], dim=1)

    return prepare


def _projected(spec: Attention, shard: RankShard) -> list[int]:
    """Return the channels of the parts that a rank projects: q, k and v, or q alone."""
    queries = shard.share(spec.heads) * spec.head_dim
    kv_heads = shard.share(spec.kv_heads)
    return (
        [queries]
        if spec.shares_cache_of is not None
        else [queries, kv_heads * spec.head_dim, kv_heads * spec.value_width]
    )


def _normed(spec: Attention) -> tuple[str, ...]:
    """Return the norms of a layer with QK norm."""
    return ("q_norm", "k_norm") if spec.shares_cache_of is None else ("q_norm",)


def _head_norm(spec: Attention, norm: Norm, build: CudaBuildContext, name: str) -> Linear:
    """Return the norm of each head of x [T, n, H]."""
    weight = build.params[name]
    bias = build.params.get(f"{name}_bias")
    own = spec.qk_norm_over == "own_weights"
    normalise = RowNorm(
        torch.ones_like(weight[0]) if own else weight,
        None if own else bias,
        eps=norm.eps,
        kind=norm.kind,
        unit_offset=norm.unit_offset,
        use_kernel=build.device.use_kernels,
    )

    def head_norm(x: Tensor) -> Tensor:
        y = normalise(x.reshape(-1, spec.head_dim))[0].view(x.shape)
        if own:
            y = y * weight if bias is None else y * weight + bias
        return y

    return head_norm


def make_projection_norm(spec: Attention, norm: Norm, build: CudaBuildContext, prefix: str) -> Linear:
    """Return a function of qkv [T, (N+K)*H + K*V] that normalises q and k, each over its whole projection."""
    shard = build.shard
    count = len(_normed(spec))
    sizes = _projected(spec, shard)
    on_one = shard.size == 1
    normalise = _norm_on_one_rank(spec, norm, build, prefix) if on_one else _norm_over_ranks(spec, norm, build, prefix)

    def full_norm(qkv: Tensor) -> Tensor:
        parts = qkv.split(sizes, dim=1)
        return torch.cat([*normalise(parts[:count]), *parts[count:]], dim=1)

    return full_norm


def _norm_on_one_rank(spec: Attention, norm: Norm, build: CudaBuildContext, prefix: str) -> Normalise:
    norms = [build.norm(norm, f"{prefix}.{name}") for name in _normed(spec)]
    return lambda parts: [step(part, None)[0] for step, part in zip(norms, parts)]


def _norm_over_ranks(spec: Attention, norm: Norm, build: CudaBuildContext, prefix: str) -> Normalise:
    """Sum squares over all ranks; a KV head replicated on several ranks counts once."""
    comm = build.comm
    copies = build.shard.copies(spec.kv_heads)
    weights = [build.params[f"{prefix}.{name}"] for name in _normed(spec)]
    counts = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim * copies

    def normalise(parts: Sequence[Tensor]) -> list[Tensor]:
        wide = [part.float() for part in parts]
        means = [part.square().sum(1, keepdim=True) / count for part, count in zip(wide, counts)]
        length = torch.rsqrt(comm.all_reduce(torch.cat(means, dim=1)) + norm.eps)
        return [
            _scaled(part * length[:, index : index + 1], weight, norm)
            for index, (part, weight) in enumerate(zip(wide, weights))
        ]

    return normalise


def _scaled(wide: Tensor, weight: Tensor, norm: Norm) -> Tensor:
    """Round as `torch_decoder.functions.norm` does."""
    if norm.unit_offset:
        return (wide * (1 + weight.float())).to(weight.dtype)
    return wide.to(weight.dtype) * weight
