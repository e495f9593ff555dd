"""Multi-head latent attention over a paged cache of latents, which every rank has whole; ranks share the heads.

Decodes multiply their queries by the keys' projection, attend to the latents, and multiply what they attended by the
values' projection. Prefills expand the cached latents to keys and values instead: more memory, fewer operations.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from pagoda.backends.torch_cuda.execution.step_input import CudaStepBatch
from pagoda.backends.torch_cuda.kernels.attention.latent_attention import (
    even_latent_pieces,
    latent_selected,
    write_latents,
)
from pagoda.backends.torch_cuda.kernels.attention.latent_prefill import latent_prefill, query_tile
from pagoda.backends.torch_cuda.kernels.attention.rope_cache import NormWeights, rotated
from pagoda.backends.torch_cuda.kernels.attention.token_selection import select_tokens
from pagoda.backends.torch_cuda.memory.cache import CudaArrayCache, CudaCache
from pagoda.backends.torch_cuda.model.mixers.interface import PROJECTIONS, CudaMixerOps, RotaryTables
from pagoda.backends.torch_cuda.model.parts import CudaBuildContext
from pagoda.backends.torch_decoder.functions import query_growth
from pagoda.backends.torch_decoder.mixers.indexer import IndexProjection, TokenSelector
from pagoda.backends.torch_decoder.mixers.packed_attention import attend
from pagoda.backends.torch_decoder.packed import PackedPrompts
from pagoda.common.models.mixers import LatentAttention, Mixer


class LatentProjections:
    """One layer's parameters on a rank, and its projections before attention."""

    def __init__(self, spec: LatentAttention, cos_sin: Tensor | None, build: CudaBuildContext, prefix: str) -> None:
        assert cos_sin is not None, "latent attention has RoPE"
        assert spec.norm.kind == "rms", "the kernel computes an RMSNorm"
        assert spec.norm.scale, "the kernel multiplies by a weight"
        self.spec = spec
        self.cos_sin = cos_sin
        self.device = build.device
        self.heads = build.shard.share(spec.heads)
        self.latents = build.linear(f"{prefix}.latents")  # low-rank queries, if any, latent and rotary key
        self.q = build.linear(f"{prefix}.qkv" if spec.query_rank is None else f"{prefix}.q_b")
        self.q_norm = None if spec.query_rank is None else build.norm(spec.norm, f"{prefix}.q_a_norm")
        self.norm = NormWeights(build.params[f"{prefix}.kv_a_norm"], spec.norm.eps, spec.norm.unit_offset)
        self.kv_b = build.params[f"{prefix}.kv_b"]  # [N * (nope_dim + V), R]
        self.gate = build.linear(f"{prefix}.gate") if spec.gate_per_head else None

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries [T, N, H] and latents [T, R+D] of x [T, D], neither rotated nor the latents normalised.

        The third is what queries are projected from: normalised low-rank queries, or x.
        """
        spec = self.spec
        latents = self.latents(x)
        low_rank = x
        if self.q_norm is not None:
            assert spec.query_rank is not None, "it has the norm"
            low_rank = latents[:, : spec.query_rank]
            latents = latents[:, spec.query_rank :]
            low_rank = self.q_norm(low_rank, None)[0]
        return self.q(low_rank).view(len(x), self.heads, -1), latents, low_rank

    def write(self, q: Tensor, latents: Tensor, positions: Tensor, slots: Tensor, cache: Tensor) -> None:
        """Write the latents to the cache, and rotate and scale q in place; see `write_latents`."""
        use_kernel = self.device.use_kernels
        write_latents(q, latents, positions, slots, cache, self.cos_sin, self.norm, use_kernel=use_kernel)
        if self.spec.query_growth is not None:
            q.mul_(query_growth(self.spec.query_growth, positions).to(q.dtype))

    def gated(self, heads: Tensor, x: Tensor) -> Tensor:
        """Return the attended values [T, N*V] of heads [T, N, V], times the gate of x [T, D] if there is one."""
        return (heads if self.gate is None else heads * self.gate(x).sigmoid()[..., None]).flatten(1)

    @property
    def per_head(self) -> tuple[Tensor, Tensor]:
        """The projections of keys [N, nope_dim, R] and values [N, V, R], views of kv_b."""
        spec = self.spec
        key_up, value_up = self.kv_b.view(self.heads, -1, spec.latent_dim).split([spec.nope_dim, spec.value_dim], 1)
        return key_up, value_up


class CudaLatentAttention:
    """One layer's latent attention over a rank's share of the heads."""

    def __init__(
        self,
        spec: LatentAttention,
        tables: RotaryTables,
        build: CudaBuildContext,
        prefix: str,
        numbers: tuple[int, ...],
    ) -> None:
        """`numbers`: of its caches, that of the indexer's keys second."""
        self.spec = spec
        self.device = build.device
        self.numbers = numbers
        self.decode = build.attention.latent_decode
        self.project = LatentProjections(spec, tables[spec.rope], build, prefix)
        self.indexer = token_index(spec, build, prefix)
        self.index_cos_sin = None if spec.indexer is None else tables[spec.indexer.rope]
        self.out = build.summed(f"{prefix}.out")
        self.tile = query_tile(spec.nope_dim, spec.value_dim, build.params["embed"].dtype, build.device.chip)

    def __call__(self, x: Tensor, batch: CudaStepBatch, caches: Mapping[int, CudaCache]) -> Tensor:
        """Return [T, D] of x [T, D]."""
        cache = caches[self.numbers[0]]
        assert isinstance(cache, CudaArrayCache), "latent attention keeps latents"
        q, latents, low_rank = self.project(x)
        self.project.write(q, latents, batch.positions, batch.groups[cache.group].slots, cache.array)
        if self.spec.selected_tokens is None:
            return self.out(self.project.gated(self._attend(q, batch, cache), x))
        if self.indexer is not None:
            batch.selection[:] = self._select(self.indexer, x, low_rank, batch, caches)
        rows, selected, counts = batch.selection
        return self.out(self.project.gated(self._attend_selected(q, batch, cache, rows, selected, counts), x))

    def _select(
        self,
        indexer: TokenSelector,
        x: Tensor,
        low_rank: Tensor,
        batch: CudaStepBatch,
        caches: Mapping[int, CudaCache],
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Keep the index keys of x [T, D]; return sequences [T], selected positions [T, top_k] and counts [T]."""
        keys = caches[self.numbers[1]]
        assert isinstance(keys, CudaArrayCache), "an indexer keeps keys"
        rows, lens = contexts(batch)
        rotate = partial(rotated, positions=batch.positions, cos_sin=self.index_cos_sin)
        slots = batch.groups[keys.group].slots
        keys.array.view(-1, keys.array.shape[2]).index_copy_(0, slots.long(), indexer.project.keys(x, rotate))
        selected, counts = select_tokens(
            indexer.project.queries(low_rank, rotate).contiguous(),
            indexer.weights(x),
            keys.array,
            batch.groups[keys.group].tables,
            rows,
            lens,
            top=indexer.spec.top_k,
            use_kernel=self.device.use_kernels,
        )
        return rows, selected, counts

    def _attend_selected(
        self, q: Tensor, batch: CudaStepBatch, cache: CudaArrayCache, rows: Tensor, selected: Tensor, counts: Tensor
    ) -> Tensor:
        """Return [T, N, V] of queries [T, N, H] over the positions selected for each; absorbed, prefills too."""
        key_up, value_up = self.project.per_head
        absorbed = torch.bmm(q[..., : self.spec.nope_dim].transpose(0, 1), key_up).transpose(0, 1)
        work = None
        if batch.tiles is None:
            tokens, heads, _ = q.shape
            work = even_latent_pieces(tokens, heads, selected.shape[1], q.device, self.device.chip)
        attended = latent_selected(
            absorbed,
            q,
            cache.array,
            batch.groups[cache.group].tables,
            rows,
            selected,
            counts,
            scale=self.spec.scale,
            work=work,
            use_kernel=self.device.use_kernels,
            chip=self.device.chip,
        )
        return torch.bmm(attended.transpose(0, 1), value_up.mT).transpose(0, 1)

    def _attend(self, q: Tensor, batch: CudaStepBatch, cache: CudaArrayCache) -> Tensor:
        """Return [T, N, V] of queries [T, N, H]."""
        if batch.tiles is None:
            return self._decode(q, batch, cache)
        out = q.new_empty(*q.shape[:2], self.spec.value_dim)
        decodes = batch.num_decodes * batch.query_len
        if decodes:
            out[:decodes] = self._decode(q[:decodes], batch, cache)
        return latent_prefill(
            q,
            cache.array,
            self.project.kv_b,
            batch.groups[cache.group].tables,
            batch.query_start,
            batch.kv_lens,
            batch.tiles,
            batch.rounds,
            nope_dim=self.spec.nope_dim,
            scale=self.spec.scale,
            out=out,
            tile=batch.tile or self.tile,
            use_kernel=self.device.use_kernels,
            chip=self.device.chip,
        )

    def _decode(self, q: Tensor, batch: CudaStepBatch, cache: CudaArrayCache) -> Tensor:
        key_up, value_up = self.project.per_head
        absorbed = torch.bmm(q[..., : self.spec.nope_dim].transpose(0, 1), key_up).transpose(0, 1)
        attended = self.decode(absorbed, q, batch, cache, self.spec)
        return torch.bmm(attended.transpose(0, 1), value_up.mT).transpose(0, 1)


def token_index(spec: LatentAttention, build: CudaBuildContext, prefix: str) -> TokenSelector | None:
    """Return the layer's indexer, whole on every rank; None if it has none."""
    if spec.indexer is None:
        return None
    own = f"{prefix}.indexer"
    project = IndexProjection(
        q=build.linear(f"{own}.q"),
        k=build.linear(f"{own}.k"),
        q_norm=None,
        k_norm=build.rows_norm(spec.indexer.norm, f"{own}.k_norm"),
        heads=spec.indexer.heads,
    )
    return TokenSelector(spec.indexer, project, build.linear(f"{own}.weights"))


def contexts(batch: CudaStepBatch) -> tuple[Tensor, Tensor]:
    """Return of each token [T] its sequence and how many tokens it sees, itself included; 0 of padding. Both int32."""
    tokens = torch.arange(len(batch.positions), dtype=torch.int32, device=batch.positions.device)
    rows = torch.searchsorted(batch.query_start[1:].contiguous(), tokens, right=True, out_int32=True)
    padding = (rows >= len(batch.kv_lens)) | (tokens >= batch.query_start[-1])
    rows = rows.clamp_(max=len(batch.kv_lens) - 1)
    padding |= batch.kv_lens[rows.long()] == 0
    return rows, (batch.positions + 1).masked_fill(padding, 0)


class CudaPackedLatentAttention:
    """One layer's latent attention within each prompt of a step: keys and values of all tokens are expanded."""

    def __init__(self, spec: LatentAttention, tables: RotaryTables, build: CudaBuildContext, prefix: str) -> None:
        self.spec = spec
        self.attention = spec.expanded()
        self.project = LatentProjections(spec, tables[spec.rope], build, prefix)
        self.indexer = token_index(spec, build, prefix)
        self.index_cos_sin = None if spec.indexer is None else tables[spec.indexer.rope]
        self.out = build.linear(f"{prefix}.out")

    def __call__(self, x: Tensor, batch: PackedPrompts, *_: object) -> Tensor:
        """Return [T, D] of x [T, D]."""
        spec = self.spec
        q, latents, low_rank = self.project(x)
        rows = x.new_empty(1, len(x), latents.shape[1])  # a single page
        slots = torch.arange(len(x), dtype=torch.int32, device=x.device)
        self.project.write(q, latents, batch.positions.int(), slots, rows)
        latent, rotary = rows[0].split([spec.latent_dim, spec.rope.dim], 1)
        expanded = F.linear(latent, self.project.kv_b).view(len(x), spec.heads, -1)
        nope, values = expanded.split([spec.nope_dim, spec.value_dim], 2)
        keys = torch.cat((nope, rotary[:, None].expand(-1, spec.heads, -1)), 2)
        masks = {} if spec.shared_top_k is None else batch.selection
        if self.indexer is not None:
            rotate = partial(rotated, positions=batch.positions, cos_sin=self.index_cos_sin)
            masks = self.indexer.packed_masks(x, low_rank, rotate, batch)
        heads = attend(q, keys, values, batch, self.attention, masks).unflatten(1, (spec.heads, -1))
        return self.out(self.project.gated(heads, x))


def latent_attentions(mixers: Iterable[Mixer]) -> tuple[LatentAttention, ...]:
    """Return the distinct latent attention mixers."""
    return tuple(dict.fromkeys(mixer for mixer in mixers if isinstance(mixer, LatentAttention)))


LATENT_ATTENTION: Final = CudaMixerOps(
    LatentAttention,
    CudaLatentAttention,
    lambda spec, tables, build, prefix, shared: CudaPackedLatentAttention(spec, tables, build, prefix),
    fused={**PROJECTIONS, "q_a": "latents", "kv_a": "latents"},
    matrices=frozenset({"qkv", "latents", "q_b", "gate", "out"}),
    small_matrices=frozenset({"indexer.q", "indexer.k"}),
)
