"""The readable definition of every model: the whole sequence at once, plain torch, no cache and no paging.

This is the oracle of the fast decoder, so it prefers clarity to speed everywhere.

Axis letters: T tokens, N query heads, K KV heads, H head dim, D width, V vocab.
"""

from __future__ import annotations

from collections.abc import Iterable
from statistics import NormalDist

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from pagoda.backends.reference.model import ops
from pagoda.backends.reference.model.naive import recurrent as naive_recurrent
from pagoda.backends.reference.model.naive.recurrent import NaiveParts
from pagoda.backends.torch_decoder import functions
from pagoda.backends.torch_decoder.feed_forward import xielu
from pagoda.common.backend import Weight
from pagoda.common.errors import WeightError
from pagoda.common.models.mixers import Attention, BlockIndexer, Indexer, LatentAttention, Mixer
from pagoda.common.models.primitives import Norm
from pagoda.common.models.rope import Rope, cos_sin
from pagoda.common.models.shapes import params
from pagoda.common.models.spec import AltUp, Ffn, Layer, Mlp, ModelSpec, Moe, SecondHalf, SideMoe
from pagoda.common.weights.quantization.tensors import dequantized


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
        expected = params(spec)
        self._weights = {
            name: ops.to_torch(array).to(torch.float32 if name in expected and expected[name].float32 else dtype)
            for name, array in dequantized(weights, "naive")
        }
        self._parts = NaiveParts(self._weights)
        self._keys_values: dict[str, tuple[Tensor, Tensor]] = {}  # [T, K, H] each, by mixer
        self._selection: Tensor | None = None  # bool [T, T]: what the last indexer selected
        missing = expected.keys() - self._weights.keys()
        if missing:
            raise WeightError(f"no weights for {', '.join(sorted(missing))}")
        for layer, owner in spec.shared_blocks.items():
            for part in ("block", "mixers.0"):
                first = f"layers.{owner}.{part}."
                own = f"layers.{layer}.{part}."
                shared = {own + name.removeprefix(first): name for name in self._weights if name.startswith(first)}
                self._weights |= {new: self._weights[name] for new, name in shared.items() if new not in self._weights}

    @torch.inference_mode()
    def logits(self, token_ids: list[int]) -> Tensor:
        """Return the logits [T, V] after each token of one sequence."""
        x = self._embed(token_ids)
        if self.spec.alt_up is not None:
            x = self._alternate(self.spec.alt_up, token_ids, x)
        else:
            parts = self._per_layer_parts(token_ids, x)
            before: list[Tensor] = []
            for index, layer in enumerate(self.spec.layers):
                before.append(x)
                if (blend := layer.blend) is not None:
                    x = blend.share * before[blend.layer] + (1 - blend.share) * x
                x = self._around(f"layers.{index}", layer, x, before[0])
                if parts is not None:
                    x = x + self._per_layer_update(f"layers.{index}.per_layer", x, parts[:, index])
                if layer.output_scale:
                    x = x * self._weights[f"layers.{index}.output_scale"]
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
        return self._norm("embed_norm", embedding.norm, x)

    def _per_layer_parts(self, token_ids: list[int], x: Tensor) -> Tensor | None:
        """Return the inputs of the layers' updates [T, L, P]."""
        spec = self.spec.per_layer
        if spec is None:
            return None
        rows = torch.tensor([token if token < spec.vocab else 0 for token in token_ids])
        tokens = self._weights["per_layer.table"][rows].unflatten(-1, (-1, spec.width)) * spec.width**0.5
        projected = (self._linear("per_layer.projection", x) / self.spec.width**0.5).unflatten(-1, (-1, spec.width))
        return (self._norm("per_layer.norm", spec.norm, projected) + tokens) / 2**0.5

    def _per_layer_update(self, name: str, x: Tensor, part: Tensor) -> Tensor:
        spec = self.spec.per_layer
        assert spec is not None
        gate = ops.activation(spec.activation)(self._linear(f"{name}.gate", x))
        return self._norm(f"{name}.norm", spec.norm, self._linear(f"{name}.out", gate * part))

    def _alternate(self, spec: AltUp, token_ids: list[int], x: Tensor) -> Tensor:
        """Run the layers over several streams, [T, D] each; see `AltUp`."""
        parts = self._per_layer_parts(token_ids, x)
        streams = [x, *(_with_rms_of(x, x @ matrix.T) for matrix in self._weights["alt_up.in"])]
        for index, layer in enumerate(self.spec.layers):
            name = f"layers.{index}.alt_up"
            mixing = self._linear(f"{name}.prediction", self._modes(name, spec, streams[spec.active]))
            mixing = mixing.unflatten(-1, (spec.streams, spec.streams))
            predicted = [
                stream + sum(mixing[:, s, i, None] * other for i, other in enumerate(streams))
                for s, stream in enumerate(streams)
            ]
            y = self._layer(f"layers.{index}", layer, predicted[spec.active])
            correction = self._linear(f"{name}.correction", self._modes(name, spec, y))
            error = y - predicted[spec.active]
            streams = [each + (1 + correction[:, s, None]) * error for s, each in enumerate(predicted)]
            if parts is not None:
                gating = streams[spec.active] * (self._weights[f"{name}.scale"] if spec.scaled else 1)
                update = self._per_layer_update(f"layers.{index}.per_layer", gating, parts[:, index])
                streams = [streams[0], *(stream + update for stream in streams[1:])]
        matrices = self._weights["alt_up.out"]
        others = [_with_rms_of(streams[0], each @ matrix.T) for each, matrix in zip(streams[1:], matrices)]
        return torch.stack([streams[0], *others]).mean(0)

    def _modes(self, name: str, spec: AltUp, x: Tensor) -> Tensor:
        return torch.tanh(self._linear(f"{name}.router", self._norm(f"{name}.norm", spec.norm, x) / self.spec.width))

    def _around(self, name: str, layer: Layer, x: Tensor, first: Tensor) -> Tensor:
        """Return the layer's output with that of its shortcut; `first`: the first hidden states."""
        y = self._layer(name, layer, x, None if layer.block is None else self._block(name, layer, x, first))
        if layer.shortcut is None:
            return y
        mixture = layer.shortcut.moe
        norm = layer.shortcut.norm
        return y + self._moe(f"{name}.shortcut.moe", mixture, self._norm(f"{name}.shortcut.norm", norm, x))

    def _block(self, name: str, layer: Layer, x: Tensor, first: Tensor) -> Tensor:
        """Return what the input block of a layer adds to its mixers' input."""
        assert layer.block is not None
        both = self._norm(f"{name}.block.norm", layer.block.norm, torch.cat((x, first), -1))
        h = self._norm(
            f"{name}.block.ffn_norm", layer.block.norm, self._mixer(f"{name}.mixers.0", layer.mixers[0], both)
        )
        return self._linear(f"{name}.block.out", self.block_ffn(name, layer, h))

    def block_ffn(self, name: str, layer: Layer, h: Tensor) -> Tensor:
        """Return the ffn of a layer's input block."""
        assert layer.block is not None
        block = f"{name}.block"
        gate, up = (self._linear(f"{block}.ffn.{part}", h) for part in ("gate", "up"))
        if layer.block.adapter_rank is not None:
            low = self._linear(f"{block}.ffn_adapter", h)
            gate = gate + self._linear(f"{block}.ffn.gate_adapter_out", low)
            up = up + self._linear(f"{block}.ffn.up_adapter_out", low)
        return self._linear(f"{block}.ffn.down", ops.gated(layer.block.ffn, gate, up))

    def _layer(self, name: str, layer: Layer, x: Tensor, added: Tensor | None = None) -> Tensor:
        """`added`: to the input of the mixers alone."""
        y = x
        if layer.mixers:
            h = self._norm(f"{name}.norms.before_mixer", layer.norms.before_mixer, x if added is None else x + added)
            of_first = layer.mixers if layer.second is None else layer.mixers[:-1]
            mixers = [mixer for mixer in enumerate(of_first) if layer.block is None or mixer[0]]
            mixed = [self._mixer(f"{name}.mixers.{index}", mixer, h) for index, mixer in mixers]
            residual = h if layer.norm_residual else x
            y = self._add(
                f"{name}.norms.after_mixer", layer.norms.after_mixer, layer, residual, torch.stack(mixed).sum(0)
            )
        if layer.low_rank is not None:
            low = self._linear(f"{name}.low_rank.right", self._linear(f"{name}.low_rank.left", h))
            y = (y + h + self._norm(f"{name}.low_rank.norm", layer.low_rank.norm, low)) / 2**0.5
        if layer.ffn is None:
            return y
        if not layer.parallel:
            h = self._norm(f"{name}.norms.before_ffn", layer.norms.before_ffn, y)
        elif layer.norms.before_ffn is not None:
            h = self._norm(f"{name}.norms.before_ffn", layer.norms.before_ffn, x)
        fed = self._ffn(f"{name}.ffn", layer.ffn, h)
        if layer.side_moe is not None:
            fed = self._side_moe(f"{name}.side", layer.side_moe, fed, y)
        residual = h if layer.norm_residual else y
        y = self._add(f"{name}.norms.after_ffn", layer.norms.after_ffn, layer, residual, fed)
        return y if layer.second is None else self._second_half(name, layer, layer.second, y, h)

    def _second_half(self, name: str, layer: Layer, second: SecondHalf, x: Tensor, fed: Tensor) -> Tensor:
        """Return the layer's output; `fed`: what its first ffn reads."""
        last = len(layer.mixers) - 1
        h = self._norm(f"{name}.second.mixer_norm", second.norm, x)
        x = x + self._mixer(f"{name}.mixers.{last}", layer.mixers[last], h)
        h = self._norm(f"{name}.second.ffn_norm", second.norm, x)
        return x + self._mlp(f"{name}.second.ffn", second.ffn, h) + self._moe(f"{name}.second.moe", second.moe, fed)

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
            case _:
                return naive_recurrent.recurrent(self._parts, name, mixer, x, self._rotate)

    def _attention(self, name: str, mixer: Attention, x: Tensor) -> Tensor:
        queries = self._heads(f"{name}.q", mixer, x)
        owner = name
        if mixer.query_growth is not None:
            queries = queries * functions.query_growth(mixer.query_growth, torch.arange(len(x))).to(self.dtype)
        if mixer.shares_cache_of is None:
            projection = f"{name}.k" if mixer.values_are_keys else f"{name}.v"
            values = self._clipped(projection, mixer, x).view(len(x), mixer.kv_heads, -1)
            values = self._norm(f"{name}.v_norm", mixer.value_norm, values)
            self._keys_values[name] = self._heads(f"{name}.k", mixer, x), values
        else:
            owner = f"layers.{mixer.shares_cache_of}.mixers.0"
        group = mixer.heads // mixer.kv_heads
        k, v = (part.repeat_interleave(group, dim=1) for part in self._keys_values[owner])  # [T, N, H]
        sinks = self._weights[f"{name}.sinks"][:, None] if mixer.sinks else None
        seen = visible(len(x), mixer)
        if mixer.blocks is not None:
            seen = self._in_blocks(f"{name}.blocks", mixer, mixer.blocks, x).repeat_interleave(group, 0)
        heads = self._attend(mixer, queries, k, v, seen, sinks)
        heads = self._norm(f"{name}.out_norm", mixer.out_norm, heads)
        if mixer.output_gate:
            gate = self._linear(f"{name}.gate", x).sigmoid()
            heads = heads * (gate.repeat_interleave(mixer.value_width, 1) if mixer.gate_per_head else gate)
        return self._linear(f"{name}.o", heads)

    def _in_blocks(self, name: str, mixer: Attention, spec: BlockIndexer, x: Tensor) -> Tensor:
        """Return which tokens (columns) each token attends to, bool [K, T, T], token by token."""
        q = self._linear(f"{name}.q", x).view(len(x), mixer.kv_heads, -1)
        q = self._rotate(spec.rope, self._norm(f"{name}.q_norm", spec.norm, q))
        k = self._norm(f"{name}.k_norm", spec.norm, self._linear(f"{name}.k", x))[:, None]
        k = self._rotate(spec.rope, k)[:, 0]
        seen = torch.zeros(mixer.kv_heads, len(x), len(x), dtype=torch.bool)
        for head in range(mixer.kv_heads):
            for token in range(len(x)):
                scores = [float(part.max()) for part in (k[: token + 1] @ q[token, head]).split(spec.tokens)]
                last = len(scores) - 1
                order = sorted(range(len(scores)), key=lambda b: (b <= last - spec.local, -scores[b]))
                for block in order[: spec.top_k]:
                    seen[head, token, block * spec.tokens : (block + 1) * spec.tokens] = True
        return seen & visible(len(x))

    def _heads(self, name: str, mixer: Attention, x: Tensor) -> Tensor:
        """Return queries or keys, normalised and rotated, [T, N or K, H]."""
        heads = self._clipped(name, mixer, x)
        norm = f"{name}_norm"
        if mixer.qk_norm_over == "full":
            heads = self._norm(norm, mixer.qk_norm, heads)
        heads = heads.view(len(x), -1, mixer.head_dim)
        if mixer.qk_norm_over != "full" and not mixer.qk_norm_after_rope:
            heads = self._norm(norm, mixer.qk_norm, heads)
        if mixer.rope is not None:
            heads = self._rotate(mixer.rope, heads)
        return self._norm(norm, mixer.qk_norm, heads) if mixer.qk_norm_after_rope else heads

    def _clipped(self, name: str, mixer: Attention, x: Tensor) -> Tensor:
        heads = self._linear(name, x)
        if mixer.adapter_rank is not None:
            heads = heads + self._linear(f"{name}_adapter_out", self._linear(f"{name}_adapter", x))
        return heads if mixer.qkv_clip is None else heads.clamp(-mixer.qkv_clip, mixer.qkv_clip)

    def _latent_attention(self, name: str, mixer: LatentAttention, x: Tensor) -> Tensor:
        seen = visible(len(x))
        if mixer.query_rank is None:
            q = self._linear(f"{name}.q", x)
        else:
            low_rank = self._norm(f"{name}.q_a_norm", mixer.norm, self._linear(f"{name}.q_a", x))
            q = self._linear(f"{name}.q_b", low_rank)
            if mixer.indexer is not None:
                seen = self._selected(f"{name}.indexer", mixer.indexer, x, low_rank, seen)
                self._selection = seen
            elif mixer.shared_top_k is not None:
                assert self._selection is not None, "a layer before it has an indexer"
                seen = self._selection
        q_nope, q_rope = q.view(len(x), mixer.heads, -1).split([mixer.nope_dim, mixer.rope.dim], -1)
        latent, k_rope = self._linear(f"{name}.kv_a", x).split([mixer.latent_dim, mixer.rope.dim], -1)
        kv = self._linear(f"{name}.kv_b", self._norm(f"{name}.kv_a_norm", mixer.norm, latent))
        k_nope, v = kv.view(len(x), mixer.heads, -1).split([mixer.nope_dim, mixer.value_dim], -1)
        q_rope = self._rotate(mixer.rope, q_rope)
        k_rope = self._rotate(mixer.rope, k_rope[:, None])
        q = torch.cat((q_nope, q_rope), -1)
        k = torch.cat((k_nope, k_rope.expand_as(q_rope)), -1)
        if mixer.query_growth is not None:
            q = q * functions.query_growth(mixer.query_growth, torch.arange(len(x))).to(self.dtype)
        heads = self._attend(mixer.expanded(), q, k, v, seen)
        if mixer.gate_per_head:
            heads = heads * self._linear(f"{name}.gate", x).sigmoid().repeat_interleave(mixer.value_dim, 1)
        return self._linear(f"{name}.o", heads)

    def _selected(self, name: str, indexer: Indexer, x: Tensor, low_rank: Tensor, seen: Tensor) -> Tensor:
        """Return which tokens (columns) of `seen` each token (row) attends to, bool [T, T]."""
        q = self._rotate(indexer.rope, self._linear(f"{name}.q", low_rank).view(len(x), indexer.heads, -1))
        k = self._norm(f"{name}.k_norm", indexer.norm, self._linear(f"{name}.k", x))
        k = self._rotate(indexer.rope, k[:, None])[:, 0]
        weights = self._linear(f"{name}.weights", x)
        products = torch.einsum("tnh,sh->tns", q.float(), k.float()).relu()
        return functions.select(torch.einsum("tn,tns->ts", weights.float(), products), seen, indexer.top_k)

    def _rotate(self, rope: Rope, x: Tensor) -> Tensor:
        """Rotate x [T, n, H] at positions 0 to T-1."""
        tables = cos_sin(rope, self.max_len, np.arange(len(x)))
        cos, sin = (torch.from_numpy(table).to(self.dtype) for table in tables)
        return functions.apply_rope(functions.deinterleave(x, rope.dim) if rope.interleaved else x, cos, sin, rope.dim)

    def _attend(
        self, spec: Attention, q: Tensor, k: Tensor, v: Tensor, seen: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        """Return softmax attention [T, N*V] of q, k [T, N, H] and v [T, N, V]; `seen`: see `visible`; sinks [N, 1]."""
        scores = torch.einsum("tnh,snh->nts", q, k) * spec.scale
        if spec.softcap is not None:
            scores = functions.softcap(scores, spec.softcap)
        if spec.alibi_slopes is not None:
            scores = scores + functions.alibi(
                spec.alibi_slopes,
                queries=len(q),
                keys=len(k),
                like=scores,
                causal=spec.causal,
                root=spec.alibi_root,
            )
        scores = scores.masked_fill(~seen, -torch.inf)
        weights = functions.softmax(scores, sinks).to(self.dtype)
        return torch.einsum("nts,snh->tnh", weights, v).flatten(1)

    def _ffn(self, name: str, ffn: Ffn, x: Tensor) -> Tensor:
        match ffn:
            case Mlp():
                return self._mlp(name, ffn, x)
            case Moe():
                return self._moe(name, ffn, x)

    def _moe(self, name: str, moe: Moe, x: Tensor) -> Tensor:
        correction = self._weights.get(f"{name}.router_correction")
        weights, experts = ops.route(self._linear(f"{name}.router", x), moe.router, correction)
        routed = x if moe.latent is None else self._linear(f"{name}.latent_in", x)
        if moe.weighs_input:
            routed = routed * weights.to(self.dtype)
            weights = torch.ones_like(weights)

        def expert(number: int, rows: Tensor) -> Tensor:
            if number >= moe.experts:
                return rows
            return self._mlp(f"{name}.experts", moe.expert, rows, expert=number)

        mixed = ops.mix_experts(routed, weights, experts, expert)
        if moe.latent is not None:
            mixed = self._linear(f"{name}.latent_out", mixed)
        if moe.shared is None:
            return mixed
        shared = self._mlp(f"{name}.shared", moe.shared, x)
        return mixed + (self._linear(f"{name}.shared_gate", x).sigmoid() * shared if moe.shared_gate else shared)

    def _side_moe(self, name: str, side: SideMoe, fed: Tensor, x: Tensor) -> Tensor:
        routed = self._norm(f"{name}.router_norm", side.norm, x) / self.spec.width**0.5
        weights, experts = ops.route(self._linear(f"{name}.moe.router", routed), side.moe.router)
        weights = weights * self._weights[f"{name}.expert_scale"][experts]
        rows = self._norm(f"{name}.input_norm", side.norm, x)
        mixed = ops.mix_experts(
            rows, weights, experts, lambda e, some: self._mlp(f"{name}.moe.experts", side.moe.expert, some, expert=e)
        )
        return self._norm(f"{name}.ffn_norm", side.norm, fed) + self._norm(f"{name}.output_norm", side.norm, mixed)

    def _mlp(self, name: str, mlp: Mlp, x: Tensor, expert: int | None = None) -> Tensor:
        up = self._linear(f"{name}.up", x, expert)
        if mlp.learned is not None:
            p = self._weights[f"{name}.curvature_p"]
            n = self._weights[f"{name}.curvature_n"]
            hidden = self._norm(f"{name}.inner_norm", mlp.inner_norm, xielu(up, mlp.learned, p, n))
            return self._linear(f"{name}.down", hidden)
        if mlp.gated:
            gate = self._linear(f"{name}.gate", x, expert)
            if mlp.sparsity:
                gate = ops.sparse(gate, NormalDist().inv_cdf(mlp.sparsity))
            hidden = ops.gated(mlp, gate, up)
        else:
            hidden = ops.activation(mlp.activation)(up)
        return self._linear(f"{name}.down", self._norm(f"{name}.inner_norm", mlp.inner_norm, hidden), expert)

    def _head(self, x: Tensor) -> Tensor:
        if self.spec.embedding.width not in (None, self.spec.width):
            x = self._linear("embed_out", x)
        logits = F.linear(x, self._weights["embed" if self.spec.tied else "head"], self._weights.get("head_bias"))
        logits = logits * self.spec.logit_scale
        return logits if self.spec.logit_softcap is None else functions.softcap(logits, self.spec.logit_softcap)

    def _linear(self, name: str, x: Tensor, expert: int | None = None) -> Tensor:
        return self._parts.linear(name, x, expert)

    def _norm(self, name: str, norm: Norm | None, x: Tensor) -> Tensor:
        return self._parts.norm(name, norm, x)


def _with_rms_of(like: Tensor, x: Tensor) -> Tensor:
    """Return x [T, D] scaled to the RMS of `like`."""
    size = x.square().mean(-1, keepdim=True).clamp(min=1e-5).sqrt()
    return x * like.square().mean(-1, keepdim=True).sqrt() / size


def visible(tokens: int, spec: Attention | None = None) -> Tensor:
    """Return which tokens (columns) each token (row) may see, bool [T, T]."""
    positions = torch.arange(tokens)
    distance = positions[:, None] - positions
    seen = distance >= 0
    if spec is not None and spec.chunk is not None:
        seen &= positions[:, None] // spec.chunk - positions // spec.chunk <= spec.chunk_lookback
    return seen if spec is None or spec.window is None else seen & (distance < spec.window)
