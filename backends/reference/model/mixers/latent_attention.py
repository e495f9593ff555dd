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

from pagoda.backends.reference.execution import CacheSpan, PackedPrompts, StepBatch
from pagoda.backends.reference.memory import LayerCache
from pagoda.backends.reference.model.linear import Linear
from pagoda.backends.reference.model.mixers.attention.packed import attend
from pagoda.backends.reference.model.mixers.interface import MixerOps
from pagoda.backends.reference.model.mixers.rotary import Rotations
from pagoda.backends.reference.model.ops import sigmoid
from pagoda.backends.reference.model.params import NormParams
from pagoda.backends.reference.weights.arrange import NamedWeights
from pagoda.backends.torch_decoder.functions import norm, query_growth, select
from pagoda.common.models.mixers import Indexer, LatentAttention

_QUERIES: Final = 16
"""Queries whose products with all keys of an indexer, head by head, are in memory at a time."""


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
        rotate = rotations[spec.rope]
        assert rotate is not None, "only no Rope has no rotation"
        return torch.cat((nope, rotate(rotary)), -1)

    def grown(self, queries: Tensor, positions: Tensor) -> Tensor:
        """Return the queries times their factor, if it grows with their position."""
        growth = self.spec.query_growth
        return queries if growth is None else queries * query_growth(growth, positions).to(queries.dtype)

    def latents(self, x: Tensor, rotations: Rotations) -> Tensor:
        """X [T, D] -> [T, R]: the normalised latent, then the rotated rotary key."""
        spec = self.spec
        latent, rotary = self.params.kv_a(x).split([spec.latent_dim, spec.rope.dim], -1)
        rotate = rotations[spec.rope]
        assert rotate is not None, "only no Rope has no rotation"
        return torch.cat((norm(latent, spec.norm, self.params.kv_a_norm), rotate(rotary[:, None])[:, 0]), -1)

    def expand(self, latents: Tensor) -> tuple[Tensor, Tensor]:
        """Latents [C, R] -> keys [C, N, H] and values [C, N, V]."""
        spec = self.spec
        latent, rotary = latents.split([spec.latent_dim, spec.rope.dim], -1)
        kv = self.params.kv_b(latent).view(len(latents), spec.heads, -1)
        nope, values = kv.split([spec.nope_dim, spec.value_dim], -1)
        return torch.cat((nope, rotary[:, None].expand(-1, spec.heads, -1)), -1), values


@dataclass(frozen=True, slots=True)
class IndexQueries:
    """Queries of an indexer, which select the tokens to attend to."""

    spec: Indexer
    heads: Tensor  # float32 [T, N, H]
    weights: Tensor  # float32 [T, N]

    def select(self, rows: slice, keys: Tensor, seen: Tensor | None) -> Tensor:
        """Return which of the keys [C, H] the queries of `rows` attend to, bool [T, C].

        `seen`: bool [T, C]; None: every query sees all.
        """
        columns = keys.float().T
        heads = self.heads[rows]
        weights = self.weights[rows]
        selected = []
        for tile in (slice(start, start + _QUERIES) for start in range(0, len(heads), _QUERIES)):
            scores = torch.einsum("tn,tnc->tc", weights[tile], (heads[tile] @ columns).relu_())
            selected.append(select(scores, None if seen is None else seen[tile], self.spec.top_k))
        return torch.cat(selected)


class IndexProjection:
    """One layer's projections to an indexer's keys and queries."""

    def __init__(self, spec: Indexer, params: IndexerParams) -> None:
        self.spec = spec
        self.params = params

    def keys(self, x: Tensor, rotations: Rotations) -> Tensor:
        """X [T, D] -> keys [T, H]."""
        k_norm = self.params.k_norm
        rotate = rotations[self.spec.rope]
        assert rotate is not None, "only no Rope has no rotation"
        return rotate(norm(self.params.k(x), self.spec.norm, k_norm.weight, k_norm.bias)[:, None])[:, 0]

    def queries(self, x: Tensor, low_rank: Tensor, rotations: Rotations) -> IndexQueries:
        """Return the queries of x [T, D]. `low_rank`: see LatentProjection."""
        rotate = rotations[self.spec.rope]
        assert rotate is not None, "only no Rope has no rotation"
        heads = rotate(self.params.q(low_rank).view(len(x), self.spec.heads, -1))
        return IndexQueries(self.spec, heads.float(), self.params.weights(x).float())


def index_projection(spec: LatentAttention, params: LatentAttentionParams) -> IndexProjection | None:
    """Return the projections of the layer's indexer, None if it has none."""
    if spec.indexer is None or params.indexer is None:
        return None
    return IndexProjection(spec.indexer, params.indexer)


class PagedLatentAttention:
    """One layer's latent attention over the paged cache."""

    def __init__(self, spec: LatentAttention, params: LatentAttentionParams, caches: tuple[int, ...]) -> None:
        """`caches`: the numbers of the latents' cache and, with an indexer, of its keys'."""
        self.spec = spec
        self.params = params
        self.project = LatentProjection(spec, params)
        self.number = caches[0]
        projection = index_projection(spec, params)
        self.indexer = None if projection is None else PagedIndexer(projection, caches[1])

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

    def __init__(self, project: IndexProjection, number: int) -> None:
        """`number`: of the cache."""
        self.project = project
        self.number = number

    def __call__(
        self, x: Tensor, low_rank: Tensor, batch: StepBatch, caches: Mapping[int, LayerCache], rotations: Rotations
    ) -> list[Tensor | None]:
        """Return for each sequence which tokens of its span its queries attend to, bool [T, C]; None: all they see."""
        top_k = self.project.spec.top_k
        (cached,) = caches[self.number].arrays
        view = batch.views[caches[self.number].view]
        cached.index_copy_(1, view.write_slots, self.project.keys(x, rotations)[None])
        queries = self.project.queries(x, low_rank, rotations)
        return [
            queries.select(slice(sequence.begin, sequence.end), span.read(cached)[0], _seen(span))
            if span.length > top_k
            else None
            for sequence, span in zip(batch.sequences, view.spans)
        ]


def _seen(span: CacheSpan) -> Tensor | None:
    """Return which of the span's tokens each query sees, bool [T, C]; None: all."""
    return _causal(span.length) if span.causal else span.mask


def _causal(length: int) -> Tensor:
    return torch.ones(length, length, dtype=torch.bool).tril()


class PackedLatentAttention:
    """One layer's latent attention within each prompt."""

    def __init__(self, spec: LatentAttention, params: LatentAttentionParams) -> None:
        self.spec = spec.expanded()
        self.project = LatentProjection(spec, params)
        self.indexer = index_projection(spec, params)

    def __call__(self, x: Tensor, batch: PackedPrompts, rotations: Rotations, *_: object) -> Tensor:
        """X [T, D] -> [T, D]."""
        low_rank = self.project.low_rank(x)
        queries = self.project.grown(self.project.queries(low_rank, rotations), batch.positions)
        masks = {}
        if self.indexer is not None:
            masks = _packed_masks(self.indexer, x, low_rank, batch, rotations)
        keys, values = self.project.expand(self.project.latents(x, rotations))
        return self.project.out(attend(queries, keys, values, batch, self.spec, masks), x)


def _packed_masks(
    indexer: IndexProjection, x: Tensor, low_rank: Tensor, batch: PackedPrompts, rotations: Rotations
) -> dict[int, Tensor]:
    """Return by length which tokens the tokens of each prompt attend to, bool [n, 1, length, length]."""
    keys = indexer.keys(x, rotations)
    queries = indexer.queries(x, low_rank, rotations)
    masks = {}
    for group in batch.groups:
        if group.length > indexer.spec.top_k:
            seen = _causal(group.length)
            prompts = [queries.select(rows, keys[rows], seen) for rows in group.prompts]
            masks[group.length] = torch.stack(prompts)[:, None]
    return masks


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
