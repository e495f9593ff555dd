"""Encoder for pooling models: whole prompts in one pass, without a KV cache; causal or not, as the spec says."""

from __future__ import annotations

import torch
from torch import Tensor

from pagoda.backends.reference.execution import PackedPrompts, attend
from pagoda.backends.torch_cuda.attention_backends.triton_attn import TritonAttn
from pagoda.backends.torch_cuda.device import Device
from pagoda.backends.torch_cuda.kernels.rope_cache import rope_and_cache
from pagoda.backends.torch_cuda.model.attention import make_projection_norm, per_head_norm
from pagoda.backends.torch_cuda.model.decoder import CudaDecoderLayer, Stream
from pagoda.backends.torch_cuda.model.parameters import RankParams
from pagoda.backends.torch_cuda.model.parts import CudaBuildContext, CudaTokenEmbedding, rotary_tables
from pagoda.backends.torch_cuda.parallel import SINGLE_RANK
from pagoda.common.models.mixers import Attention
from pagoda.common.models.spec import ModelSpec

PAGE = 16
"""Tokens per page of the temporary K and V; slot 0 is unused."""


class CudaEncoder:
    """A batch of prompts in, hidden states out, without synchronizing with the host."""

    def __init__(self, spec: ModelSpec, params: RankParams, device: Device, max_len: int) -> None:
        build = CudaBuildContext(params, device, SINGLE_RANK, TritonAttn(device))
        tables = rotary_tables(spec, max_len, device.torch)
        self.embed = CudaTokenEmbedding(spec.embedding, build)
        self.layers = tuple(
            CudaDecoderLayer(
                layer,
                CudaPackedAttention(layer.attention, tables[layer.attention.rope], build, f"layers.{index}.mixers.0"),
                build,
                f"layers.{index}",
            )
            for index, layer in enumerate(spec.layers)
        )
        self.final_norm = build.norm(spec.final_norm, "final_norm")
        self.embed_out = build.linear("embed_out") if params.get("embed_out") is not None else None

    def hidden(self, batch: PackedPrompts) -> Tensor:
        """Return hidden states [T, D] after the last norm."""
        stream: Stream = None, self.embed(batch.token_ids, batch.positions, batch.token_types)
        for layer in self.layers:
            stream = layer(stream, batch)
        residual, update = stream
        hidden = self.final_norm(update, residual)[0]
        return hidden if self.embed_out is None else self.embed_out(hidden)


class CudaPackedAttention:
    """Attention within each prompt of a step. Head n reads KV head n // (N/K).

    K and V are normalised and rotated by the kernel that fills the KV cache, here into temporary pages.
    """

    def __init__(self, spec: Attention, cos_sin: Tensor | None, build: CudaBuildContext, prefix: str) -> None:
        self.spec, self.cos_sin, self.device = spec, cos_sin, build.device
        self.qkv, self.out = build.linear(f"{prefix}.qkv"), build.linear(f"{prefix}.out")
        self.q_norm = per_head_norm(spec, build, f"{prefix}.q_norm")
        self.k_norm = per_head_norm(spec, build, f"{prefix}.k_norm")
        full = spec.qk_norm if spec.qk_norm_over == "full" else None
        self.full_norm = None if full is None else make_projection_norm(spec, full, build, prefix)

    def __call__(self, x: Tensor, batch: PackedPrompts) -> Tensor:
        """Return [T, D] of x [T, D]."""
        qkv, tokens = self.qkv(x), len(x)
        if self.full_norm is not None:
            qkv = self.full_norm(qkv)
        spec = self.spec
        pages = qkv.new_empty(2, tokens // PAGE + 1, spec.kv_heads, PAGE, spec.head_dim)
        queries = rope_and_cache(
            qkv,
            batch.positions.int(),
            torch.arange(1, tokens + 1, dtype=torch.int32, device=x.device),
            pages[0],
            pages[1],
            heads=spec.heads,
            kv_heads=spec.kv_heads,
            cos_sin=self.cos_sin,
            q_norm=self.q_norm,
            k_norm=self.k_norm,
            use_kernel=self.device.use_kernels,
            chip=self.device.chip,
        )
        keys, values = pages.transpose(2, 3).flatten(1, 2)[:, 1 : tokens + 1]
        return self.out(attend(queries, keys, values, batch, spec))
