"""Multi-head latent attention over a paged cache of latents, and within packed prompts.

A prefill expands the cached latents to keys and values of all heads. A decode step instead multiplies its query by the
keys' projection and the attended latents by the values': the same result with far fewer operations for one query.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from pagoda.backends.reference.execution import CacheSpan, PackedPrompts, StepBatch, attend
from pagoda.backends.reference.memory import LayerCache
from pagoda.backends.reference.model.attention import Rotations
from pagoda.backends.reference.model.ops import norm
from pagoda.backends.reference.weights import LatentAttentionParams
from pagoda.common.models.mixers import LatentAttention


class LatentProjection:
    """One layer's projections around attention. `out`: [T, N*V] -> [T, D], V the channels of a value head."""

    def __init__(self, spec: LatentAttention, params: LatentAttentionParams) -> None:
        self.spec, self.params, self.out = spec, params, params.out

    def queries(self, x: Tensor, rotations: Rotations) -> Tensor:
        """X [T, D] -> queries [T, N, H], their rotary channels last."""
        spec, params = self.spec, self.params
        if params.q_a is not None and params.q_a_norm is not None:
            x = norm(params.q_a(x), spec.norm, params.q_a_norm)
        nope, rotary = params.q(x).view(len(x), spec.heads, -1).split([spec.nope_dim, spec.rope.dim], -1)
        rotate = rotations[spec.rope]
        assert rotate is not None, "only no Rope has no rotation"
        return torch.cat((nope, rotate(rotary)), -1)

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


class PagedLatentAttention:
    """One layer's latent attention over the paged cache."""

    def __init__(self, spec: LatentAttention, params: LatentAttentionParams, number: int) -> None:
        """`number`: of its cache."""
        self.spec, self.params, self.project, self.number = spec, params, LatentProjection(spec, params), number

    def __call__(self, x: Tensor, batch: StepBatch, caches: Mapping[int, LayerCache], rotations: Rotations) -> Tensor:
        """X [T, D] -> [T, D]."""
        queries, latents = self.project.queries(x, rotations), self.project.latents(x, rotations)
        (cached,), view = caches[self.number].arrays, batch.views[caches[self.number].view]
        cached.index_copy_(1, view.write_slots, latents[None])
        out = queries.new_empty(len(x), self.spec.heads * self.spec.value_dim)
        for index, (sequence, span) in enumerate(zip(batch.sequences, view.spans)):
            attend = self._decode if index < batch.num_decodes else self._prefill
            out[sequence.begin : sequence.end] = attend(queries[sequence.begin : sequence.end], span, cached)
        return self.project.out(out)

    def _decode(self, queries: Tensor, span: CacheSpan, cached: Tensor) -> Tensor:
        """One query token [1, N, H] -> [1, N*V]; all heads read the latents as they are."""
        spec, latents = self.spec, span.read(cached)  # [1, C, R]
        nope, rotary = queries[0].split([spec.nope_dim, spec.rope.dim], -1)
        absorbed = torch.cat((torch.einsum("nh,nhr->nr", nope, self.params.key_up), rotary), -1)
        mixed = F.scaled_dot_product_attention(
            absorbed[None, None], latents[None], latents[None, :, :, : spec.latent_dim], scale=spec.scale
        )
        return torch.einsum("nr,nvr->nv", mixed[0, 0], self.params.value_up).reshape(1, -1)

    def _prefill(self, queries: Tensor, span: CacheSpan, cached: Tensor) -> Tensor:
        """Several query tokens [T, N, H] -> [T, N*V]: each sees the span up to itself."""
        keys, values = (part.transpose(0, 1)[None] for part in self.project.expand(span.read(cached)[0]))
        mixed = F.scaled_dot_product_attention(
            queries.transpose(0, 1)[None],
            keys,
            values,
            attn_mask=span.mask,
            is_causal=span.causal,
            scale=self.spec.scale,
        )
        return mixed[0].transpose(0, 1).flatten(1)


class PackedLatentAttention:
    """One layer's latent attention within each prompt."""

    def __init__(self, spec: LatentAttention, params: LatentAttentionParams) -> None:
        self.spec, self.project = spec.expanded(), LatentProjection(spec, params)

    def __call__(self, x: Tensor, batch: PackedPrompts, rotations: Rotations, *_: object) -> Tensor:
        """X [T, D] -> [T, D]."""
        keys, values = self.project.expand(self.project.latents(x, rotations))
        return self.project.out(attend(self.project.queries(x, rotations), keys, values, batch, self.spec))
