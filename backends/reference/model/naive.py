"""The readable definition of every model: the whole sequence at once, plain torch, no cache and no paging.

This is the oracle of the fast decoder, so it prefers clarity to speed everywhere.

Axis letters: T tokens, N query heads, K KV heads, H head dim, D width, V vocab.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from pagoda.backends.reference.model import ops
from pagoda.common.backend import Weight
from pagoda.common.errors import WeightError
from pagoda.common.models.mixers import Attention, GatedDelta, Indexer, LatentAttention, Mixer
from pagoda.common.models.primitives import Norm
from pagoda.common.models.rope import Rope, cos_sin
from pagoda.common.models.shapes import params
from pagoda.common.models.spec import Ffn, Layer, Mlp, ModelSpec, Moe
from pagoda.common.weights.quantization import dequantized


class NaiveModel:
    """A model that computes the logits of one sequence.

    `max_len`: the context length, which some rotary scalings depend on; default: the spec's. Raises WeightError if a
    parameter of the spec is missing.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: Iterable[Weight],
        dtype: torch.dtype = torch.float32,
        max_len: int | None = None,
    ) -> None:
        self.spec = spec
        self.dtype = dtype
        self.max_len = max_len or spec.max_positions
        self._weights = {name: ops.to_torch(array).to(dtype) for name, array in dequantized(weights, "naive")}
        self._keys_values: dict[str, tuple[Tensor, Tensor]] = {}  # [T, K, H] each, by mixer
        missing = params(spec).keys() - self._weights.keys()
        if missing:
            raise WeightError(f"no weights for {', '.join(sorted(missing))}")

    @torch.inference_mode()
    def logits(self, token_ids: list[int]) -> Tensor:
        """Return the logits [T, V] after each token of one sequence."""
        x = self._embed(token_ids)
        for index, layer in enumerate(self.spec.layers):
            x = self._layer(f"layers.{index}", layer, x)
        return self._head(self._norm("final_norm", self.spec.final_norm, x))

    @torch.inference_mode()
    def greedy(self, token_ids: list[int], count: int) -> list[int]:
        """Return the next `count` tokens, sampled greedily."""
        tokens = list(token_ids)
        for _ in range(count):
            tokens.append(int(self.logits(tokens)[-1].argmax()))
        return tokens[len(token_ids) :]

    def _embed(self, token_ids: list[int]) -> Tensor:
        embedding = self.spec.embedding
        x = self._weights["embed"][torch.tensor(token_ids)]
        x = x * torch.tensor(embedding.scale, dtype=self.dtype)
        if embedding.width not in (None, self.spec.width):
            x = self._linear("embed_in", x)
        if embedding.positions is not None:
            x = x + self._weights["positions"][torch.arange(len(token_ids)) + embedding.position_offset]
        return x

    def _layer(self, name: str, layer: Layer, x: Tensor) -> Tensor:
        h = self._norm(f"{name}.norms.before_mixer", layer.norms.before_mixer, x)
        mixed = [self._mixer(f"{name}.mixers.{index}", mixer, h) for index, mixer in enumerate(layer.mixers)]
        y = self._add(f"{name}.norms.after_mixer", layer.norms.after_mixer, layer, x, torch.stack(mixed).sum(0))
        if layer.ffn is None:
            return y
        if not layer.parallel:
            h = self._norm(f"{name}.norms.before_ffn", layer.norms.before_ffn, y)
        elif layer.norms.before_ffn is not None:
            h = self._norm(f"{name}.norms.before_ffn", layer.norms.before_ffn, x)
        fed = self._ffn(f"{name}.ffn", layer.ffn, h)
        return self._add(f"{name}.norms.after_ffn", layer.norms.after_ffn, layer, y, fed)

    def _add(self, name: str, norm: Norm | None, layer: Layer, x: Tensor, update: Tensor) -> Tensor:
        if layer.norm_after_add:
            return self._norm(name, norm, x + layer.residual_scale * update)
        return x + layer.residual_scale * self._norm(name, norm, update)

    def _mixer(self, name: str, mixer: Mixer, x: Tensor) -> Tensor:
        match mixer:
            case Attention():
                return self._attention(name, mixer, x)
            case LatentAttention():
                return self._latent_attention(name, mixer, x)
            case GatedDelta():
                return self._gated_delta(name, mixer, x)

    def _attention(self, name: str, mixer: Attention, x: Tensor) -> Tensor:
        queries, owner = self._heads(f"{name}.q", mixer, x), name
        if mixer.shares_cache_of is None:
            values = self._linear(f"{name}.v", x).view(len(x), -1, mixer.head_dim)
            self._keys_values[name] = self._heads(f"{name}.k", mixer, x), values
        else:
            owner = f"layers.{mixer.shares_cache_of}.mixers.0"
        group = mixer.heads // mixer.kv_heads
        k, v = (part.repeat_interleave(group, dim=1) for part in self._keys_values[owner])  # [T, N, H]
        heads = self._attend(mixer, queries, k, v, visible(len(x), mixer.window))
        if mixer.output_gate:
            heads = heads * self._linear(f"{name}.gate", x).sigmoid()
        return self._linear(f"{name}.o", heads)

    def _heads(self, name: str, mixer: Attention, x: Tensor) -> Tensor:
        """Return queries or keys, normalised and rotated, [T, N or K, H]."""
        heads = self._linear(name, x)
        if mixer.qk_norm_over == "full":
            heads = self._norm(f"{name}_norm", mixer.qk_norm, heads)
        heads = heads.view(len(x), -1, mixer.head_dim)
        if mixer.qk_norm_over == "per_head":
            heads = self._norm(f"{name}_norm", mixer.qk_norm, heads)
        return heads if mixer.rope is None else self._rotate(mixer.rope, heads)

    def _latent_attention(self, name: str, mixer: LatentAttention, x: Tensor) -> Tensor:
        seen = visible(len(x), None)
        if mixer.query_rank is None:
            q = self._linear(f"{name}.q", x)
        else:
            low_rank = self._norm(f"{name}.q_a_norm", mixer.norm, self._linear(f"{name}.q_a", x))
            q = self._linear(f"{name}.q_b", low_rank)
            if mixer.indexer is not None:
                seen = self._selected(f"{name}.indexer", mixer.indexer, x, low_rank, seen)
        q_nope, q_rope = q.view(len(x), mixer.heads, -1).split([mixer.nope_dim, mixer.rope.dim], -1)
        latent, k_rope = self._linear(f"{name}.kv_a", x).split([mixer.latent_dim, mixer.rope.dim], -1)
        kv = self._linear(f"{name}.kv_b", self._norm(f"{name}.kv_a_norm", mixer.norm, latent))
        k_nope, v = kv.view(len(x), mixer.heads, -1).split([mixer.nope_dim, mixer.value_dim], -1)
        q_rope, k_rope = self._rotate(mixer.rope, q_rope), self._rotate(mixer.rope, k_rope[:, None])
        q, k = torch.cat((q_nope, q_rope), -1), torch.cat((k_nope, k_rope.expand_as(q_rope)), -1)
        return self._linear(f"{name}.o", self._attend(mixer.expanded(), q, k, v, seen))

    def _selected(self, name: str, indexer: Indexer, x: Tensor, low_rank: Tensor, seen: Tensor) -> Tensor:
        """Return which tokens (columns) of `seen` each token (row) attends to, bool [T, T]."""
        q = self._rotate(indexer.rope, self._linear(f"{name}.q", low_rank).view(len(x), indexer.heads, -1))
        k = self._norm(f"{name}.k_norm", indexer.norm, self._linear(f"{name}.k", x))
        k, weights = self._rotate(indexer.rope, k[:, None])[:, 0], self._linear(f"{name}.weights", x)
        products = torch.einsum("tnh,sh->tns", q.float(), k.float()).relu()
        return ops.select(torch.einsum("tn,tns->ts", weights.float(), products), seen, indexer.top_k)

    def _gated_delta(self, name: str, mixer: GatedDelta, x: Tensor) -> Tensor:
        q, k, v = (self._convolved(name, part, x).unflatten(-1, (-1, dim)) for part, dim in zip("qkv", _dims(mixer)))
        q, k = ops.l2_norm(q) * mixer.key_dim**-0.5, ops.l2_norm(k)
        q, k = (part.repeat_interleave(mixer.value_heads // mixer.key_heads, dim=1) for part in (q, k))
        beta = self._linear(f"{name}.beta", x).float().sigmoid()
        softplus = F.softplus((self._linear(f"{name}.decay", x) + self._weights[f"{name}.decay_offset"]).float())
        decay = torch.exp(-self._weights[f"{name}.decay_rate"].float().exp() * softplus)
        state, heads = torch.zeros(mixer.value_heads, mixer.key_dim, mixer.value_dim), []
        for t in range(len(x)):
            state = state * decay[t, :, None, None]
            delta = beta[t, :, None] * (v[t] - torch.einsum("nk,nkv->nv", k[t], state))
            state = state + torch.einsum("nk,nv->nkv", k[t], delta)
            heads.append(torch.einsum("nk,nkv->nv", q[t], state))
        normed = self._norm(f"{name}.norm", mixer.norm, torch.stack(heads).to(self.dtype))
        gate = F.silu(self._linear(f"{name}.gate", x).float()).view(normed.shape)
        return self._linear(f"{name}.o", (normed * gate).to(self.dtype).flatten(1))

    def _convolved(self, name: str, part: str, x: Tensor) -> Tensor:
        """Project x [T, D], then return silu of the causal convolution of each channel in float32, [T, channels]."""
        projected, taps = self._linear(f"{name}.{part}", x).float(), self._weights[f"{name}.{part}_conv"].float()[:, 0]
        padded = F.pad(projected, (0, 0, taps.shape[1] - 1, 0))
        return F.silu(torch.stack([padded[at : at + len(x)] * taps[:, at] for at in range(taps.shape[1])]).sum(0))

    def _rotate(self, rope: Rope, x: Tensor) -> Tensor:
        """Rotate x [T, n, H] at positions 0 to T-1."""
        tables = cos_sin(rope, self.max_len, np.arange(len(x)))
        cos, sin = (torch.from_numpy(table).to(self.dtype) for table in tables)
        return ops.apply_rope(ops.deinterleave(x, rope.dim) if rope.interleaved else x, cos, sin, rope.dim)

    def _attend(self, spec: Attention, q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
        """Return softmax attention [T, N*V] of q, k [T, N, H] and v [T, N, V]; `seen`: see `visible`."""
        scores = torch.einsum("tnh,snh->nts", q, k) * spec.scale
        if spec.softcap is not None:
            scores = ops.softcap(scores, spec.softcap)
        scores = scores.masked_fill(~seen, -torch.inf)
        weights = scores.softmax(-1, dtype=torch.float32).to(self.dtype)
        return torch.einsum("nts,snh->tnh", weights, v).flatten(1)

    def _ffn(self, name: str, ffn: Ffn, x: Tensor) -> Tensor:
        match ffn:
            case Mlp():
                return self._mlp(name, ffn, x)
            case Moe():
                weights, experts = ops.route(self._linear(f"{name}.router", x), ffn.router)
                mixed = ops.mix_experts(
                    x, weights, experts, lambda e, rows: self._mlp(f"{name}.experts", ffn.expert, rows, expert=e)
                )
                if ffn.shared is None:
                    return mixed
                shared = self._mlp(f"{name}.shared", ffn.shared, x)
                return mixed + self._linear(f"{name}.shared_gate", x).sigmoid() * shared

    def _mlp(self, name: str, mlp: Mlp, x: Tensor, expert: int | None = None) -> Tensor:
        act = ops.activation(mlp.activation)
        up = self._linear(f"{name}.up", x, expert)
        hidden = act(self._linear(f"{name}.gate", x, expert)) * up if mlp.gated else act(up)
        return self._linear(f"{name}.down", hidden, expert)

    def _head(self, x: Tensor) -> Tensor:
        if self.spec.embedding.width not in (None, self.spec.width):
            x = self._linear("embed_out", x)
        logits = F.linear(x, self._weights["embed" if self.spec.tied else "head"], self._weights.get("head_bias"))
        logits = logits * self.spec.logit_scale
        return logits if self.spec.logit_softcap is None else ops.softcap(logits, self.spec.logit_softcap)

    def _linear(self, name: str, x: Tensor, expert: int | None = None) -> Tensor:
        weight, bias = self._weights[name], self._weights.get(f"{name}_bias")
        if expert is not None:
            weight, bias = weight[expert], None if bias is None else bias[expert]
        return F.linear(x, weight, bias)

    def _norm(self, name: str, norm: Norm | None, x: Tensor) -> Tensor:
        if norm is None:
            return x
        return ops.norm(x, norm, self._weights[name], self._weights.get(f"{name}_bias"))


def _dims(mixer: GatedDelta) -> tuple[int, int, int]:
    """Return the head dims of q, k and v."""
    return mixer.key_dim, mixer.key_dim, mixer.value_dim


def visible(tokens: int, window: int | None) -> Tensor:
    """Return which tokens (columns) each token (row) may see, bool [T, T]."""
    distance = torch.arange(tokens)[:, None] - torch.arange(tokens)
    seen = distance >= 0
    return seen if window is None else seen & (distance < window)
