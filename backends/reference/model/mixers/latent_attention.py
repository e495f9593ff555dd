"""Multi-head latent attention over a paged cache of latents, and within packed prompts.

A prefill expands the cached latents to keys and values of all heads. A decode step instead multiplies its query by the
keys' projection and the attended latents by the values': the same result with far fewer operations for one query.

With an indexer, whose keys are in a second cache, each query attends to the tokens that it selects: a prefill masks the
others, a decode step reads the selected latents only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from pagoda.backends.reference.execution import CacheSpan, StepBatch
from pagoda.backends.reference.memory import LayerCache
from pagoda.backends.reference.model.linear import Linear
from pagoda.backends.reference.model.mixers.interface import MixerOps
from pagoda.backends.reference.model.mixers.rotary import Rotations, rotation_of
from pagoda.backends.reference.model.ops import sigmoid
from pagoda.backends.reference.model.params import NormParams
from pagoda.backends.reference.weights.arrange import NamedWeights
from pagoda.backends.torch_decoder.functions import norm, query_growth
from pagoda.backends.torch_decoder.mixers.indexer import IndexProjection, TokenSelector
from pagoda.backends.torch_decoder.mixers.packed_attention import attend
from pagoda.backends.torch_decoder.packed import PackedPrompts
from pagoda.common.models.mixers import LatentAttention


@dataclass(frozen=True, slots=True)
class IndexerParams:
    """`q`: low-rank queries -> [N*H]; `k`: [D] -> [H]; `weights`: [D] -> [N]."""

    q: Linear
    k: Linear
    k_norm: NormParams
    weights: Linear


@dataclass(frozen=True, slots=True)
class LatentAttentionParams:
    """R latent channels. `kv_b` and its parts `key_up`, `value_up` serve prefill and decode."""

    q_a: Linear | None  # [D] -> low-rank queries, None if `q` reads x
    q_a_norm: Tensor | None
    q: Linear  # -> [N*H]
    kv_a: Linear  # [D] -> latent, rotary key
    kv_a_norm: Tensor
    kv_b: Linear  # [R] -> [N * (keys without RoPE, values)]
    key_up: Tensor  # [N, keys without RoPE, R]
    value_up: Tensor  # [N, V, R]
    out: Linear  # [N*V] -> [D]
    gate: Linear | None  # [D] -> [N], None without an output gate
    indexer: IndexerParams | None


class LatentProjection:
    """One layer's projections around attention."""

    def __init__(self, spec: LatentAttention, params: LatentAttentionParams) -> None:
        self.spec = spec
        self.params = params

    def out(self, heads: Tensor, x: Tensor) -> Tensor:
        """Attended heads [T, N*V], V channels each, and the layer's input x [T, D], for the output gate -> [T, D]."""
        if self.params.gate is None:
            return self.params.out(heads)
        return self.params.out(heads * sigmoid(self.params.gate(x)).repeat_interleave(self.spec.value_dim, 1))

    def low_rank(self, x: Tensor) -> Tensor:
        """X [T, D] -> what queries are projected from: the normalised low-rank queries, or x."""
        params = self.params
        if params.q_a is None or params.q_a_norm is None:
            return x
        return norm(params.q_a(x), self.spec.norm, params.q_a_norm)

    def queries(self, low_rank: Tensor, rotations: Rotations) -> Tensor:
        """`low_rank(x)` -> queries [T, N, H], their rotary channels last."""
        spec = self.spec
        queries = self.params.q(low_rank).view(len(low_rank), spec.heads, -1)
        nope, rotary = queries.split([spec.nope_dim, spec.rope.dim], -1)
        rotate = rotation_of(rotations, spec.rope)
        return torch.cat((nope, rotate(rotary)), -1)

    def grown(self, queries: Tensor, positions: Tensor) -> Tensor:
        """Return the queries times their factor, if it grows with their position."""
        growth = self.spec.query_growth
        return queries if growth is None else queries * query_growth(growth, positions).to(queries.dtype)

    def latents(self, x: Tensor, rotations: Rotations) -> Tensor:
        """X [T, D] -> [T, R]: the normalised latent, then the rotated rotary key."""
        spec = self.spec
        latent, rotary = self.params.kv_a(x).split([spec.latent_dim, spec.rope.dim], -1)
        rotate = rotation_of(rotations, spec.rope)
        return torch.cat((norm(latent, spec.norm, self.params.kv_a_norm), rotate(rotary[:, None])[:, 0]), -1)

    def expand(self, latents: Tensor) -> tuple[Tensor, Tensor]:
        """Latents [C, R] -> keys [C, N, H] and values [C, N, V]."""
        spec = self.spec
        latent, rotary = latents.split([spec.latent_dim, spec.rope.dim], -1)
        kv = self.params.kv_b(latent).view(len(latents), spec.heads, -1)
        nope, values = kv.split([spec.nope_dim, spec.value_dim], -1)
        return torch.cat((nope, rotary[:, None].expand(-1, spec.heads, -1)), -1), values


def token_index(spec: LatentAttention, params: LatentAttentionParams) -> TokenSelector | None:
    """Return the layer's indexer, None if it has none."""
    own = params.indexer
    indexer = spec.indexer
    if indexer is None or own is None:
        return None
    weights = own.k_norm
    project = IndexProjection(
        q=own.q,
        k=own.k,
        q_norm=None,
        k_norm=lambda x: norm(x, indexer.norm, weights.weight, weights.bias),
        heads=indexer.heads,
    )
    return TokenSelector(indexer, project, own.weights)


class PagedLatentAttention:
    """One layer's latent attention over the paged cache."""

    def __init__(self, spec: LatentAttention, params: LatentAttentionParams, caches: tuple[int, ...]) -> None:
        """`caches`: the numbers of the latents' cache and, with an indexer, of its keys'."""
        self.spec = spec
        self.params = params
        self.project = LatentProjection(spec, params)
        self.number = caches[0]
        index = token_index(spec, params)
        self.indexer = None if index is None else PagedIndexer(index, caches[1])

    def __call__(self, x: Tensor, batch: StepBatch, caches: Mapping[int, LayerCache], rotations: Rotations) -> Tensor:
        """X [T, D] -> [T, D]."""
        low_rank = self.project.low_rank(x)
        queries = self.project.queries(low_rank, rotations)
        latents = self.project.latents(x, rotations)
        queries = self.project.grown(queries, batch.positions)
        (cached,) = caches[self.number].arrays
        view = batch.views[caches[self.number].view]
        cached.index_copy_(1, view.write_slots, latents[None])
        selected: Sequence[Tensor | None] = [None] * len(batch.sequences)
        if self.indexer is not None:
            selected = self.indexer(x, low_rank, batch, caches, rotations)
            batch.selection[:] = selected
        elif self.spec.shared_top_k is not None:
            selected = batch.selection
        out = queries.new_empty(len(x), self.spec.heads * self.spec.value_dim)
        for index, (sequence, span, chosen) in enumerate(zip(batch.sequences, view.spans, selected)):
            attend = self._decode if index < batch.num_decodes else self._prefill
            out[sequence.begin : sequence.end] = attend(queries[sequence.begin : sequence.end], span, cached, chosen)
        return self.project.out(out, x)

    def _decode(self, queries: Tensor, span: CacheSpan, cached: Tensor, selected: Tensor | None) -> Tensor:
        """One query token [1, N, H] -> [1, N*V]; all heads read the latents as they are."""
        spec = self.spec  # [1, C, R]
        latents = span.read(cached)
        if selected is not None:
            latents = latents[:, selected[0]]
        nope, rotary = queries[0].split([spec.nope_dim, spec.rope.dim], -1)
        absorbed = torch.cat((torch.einsum("nh,nhr->nr", nope, self.params.key_up), rotary), -1)
        mixed = F.scaled_dot_product_attention(
            absorbed[None, None], latents[None], latents[None, :, :, : spec.latent_dim], scale=spec.scale
        )
        return torch.einsum("nr,nvr->nv", mixed[0, 0], self.params.value_up).reshape(1, -1)

    def _prefill(self, queries: Tensor, span: CacheSpan, cached: Tensor, selected: Tensor | None) -> Tensor:
        """Several query tokens [T, N, H] -> [T, N*V]: each sees the span up to itself, or what is selected of it."""
        keys, values = (part.transpose(0, 1)[None] for part in self.project.expand(span.read(cached)[0]))
        mixed = F.scaled_dot_product_attention(
            queries.transpose(0, 1)[None],
            keys,
            values,
            attn_mask=span.mask if selected is None else selected,
            is_causal=span.causal and selected is None,
            scale=self.spec.scale,
        )
        return mixed[0].transpose(0, 1).flatten(1)


class PagedIndexer:
    """Writes an indexer's keys to their paged cache, and selects from them."""

    def __init__(self, index: TokenSelector, number: int) -> None:
        """`number`: of the cache."""
        self.index = index
        self.number = number

    def __call__(
        self, x: Tensor, low_rank: Tensor, batch: StepBatch, caches: Mapping[int, LayerCache], rotations: Rotations
    ) -> list[Tensor | None]:
        """Return for each sequence which tokens of its span its queries attend to, bool [T, C]; None: all they see."""
        top_k = self.index.spec.top_k
        rotate = rotation_of(rotations, self.index.spec.rope)
        (cached,) = caches[self.number].arrays
        view = batch.views[caches[self.number].view]
        cached.index_copy_(1, view.write_slots, self.index.project.keys(x, rotate)[None])
        queries = self.index.queries(x, low_rank, rotate)
        return [
            queries.select(slice(sequence.begin, sequence.end), span.read(cached)[0], _seen(span))
            if span.length > top_k
            else None
            for sequence, span in zip(batch.sequences, view.spans)
        ]


def _seen(span: CacheSpan) -> Tensor | None:
    """Return which of the span's tokens each query sees, bool [T, C]; None: all."""
    return torch.ones(span.length, span.length, dtype=torch.bool).tril() if span.causal else span.mask


class PackedLatentAttention:
    """One layer's latent attention within each prompt."""

    def __init__(self, spec: LatentAttention, params: LatentAttentionParams) -> None:
        self.spec = spec.expanded()
        self.shares = spec.shared_top_k is not None
        self.project = LatentProjection(spec, params)
        self.indexer = token_index(spec, params)

    def __call__(self, x: Tensor, batch: PackedPrompts, rotations: Rotations, *_: object) -> Tensor:
        """X [T, D] -> [T, D]."""
        low_rank = self.project.low_rank(x)
        queries = self.project.grown(self.project.queries(low_rank, rotations), batch.positions)
        masks = batch.selection if self.shares else {}
        if self.indexer is not None:
            rotate = rotation_of(rotations, self.indexer.spec.rope)
            masks = self.indexer.packed_masks(x, low_rank, rotate, batch)
        keys, values = self.project.expand(self.project.latents(x, rotations))
        return self.project.out(attend(queries, keys, values, batch, self.spec, masks), x)


def _load(weights: NamedWeights, prefix: str, mixer: LatentAttention) -> LatentAttentionParams:
    low_rank = mixer.query_rank is not None
    up = weights.values(f"{prefix}.kv_b").to(weights.numerics.compute).unflatten(0, (mixer.heads, -1))
    return LatentAttentionParams(
        q_a=weights.linear(f"{prefix}.q_a") if low_rank else None,
        q_a_norm=weights.wide(f"{prefix}.q_a_norm"),
        q=weights.linear(f"{prefix}.q_b" if low_rank else f"{prefix}.q"),
        kv_a=weights.linear(f"{prefix}.kv_a"),
        kv_a_norm=weights.take_wide(f"{prefix}.kv_a_norm"),
        kv_b=weights.linear(f"{prefix}.kv_b"),
        key_up=up[:, : mixer.nope_dim].contiguous(),
        value_up=up[:, mixer.nope_dim :].contiguous(),
        out=weights.linear(f"{prefix}.o"),
        gate=weights.linear(f"{prefix}.gate") if mixer.gate_per_head else None,
        indexer=None if mixer.indexer is None else _load_indexer(weights, f"{prefix}.indexer"),
    )


def _load_indexer(weights: NamedWeights, prefix: str) -> IndexerParams:
    k_norm = weights.norm(f"{prefix}.k_norm")
    assert k_norm is not None, "the weights are complete"
    q, k, factors = (weights.linear(f"{prefix}.{part}") for part in ("q", "k", "weights"))
    return IndexerParams(q, k, k_norm, factors)


LATENT_ATTENTION: Final = MixerOps(
    LatentAttention,
    load=_load,
    paged=lambda spec, params, caches, build: PagedLatentAttention(spec, params, caches),
    packed=lambda spec, params, shared: PackedLatentAttention(spec, params),
)
