"""The decoder of a rank, built once from a model spec and called once per step.

`match` runs at build time only. The residual stream and the pending update travel separately, so that each addition is
fused into the norm that follows it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import assert_never

import torch
import torch.nn.functional as F
from torch import Tensor

from pagoda.backends.torch_cuda.attention_backends.protocol import PrefillAttention
from pagoda.backends.torch_cuda.attention_backends.triton_attn import TritonAttn
from pagoda.backends.torch_cuda.device import Device
from pagoda.backends.torch_cuda.execution.step_input import CudaStepBatch
from pagoda.backends.torch_cuda.kernels import activation
from pagoda.backends.torch_cuda.kernels.moe import moe
from pagoda.backends.torch_cuda.memory.cache import CudaLayerCache
from pagoda.backends.torch_cuda.memory.offload import Offload
from pagoda.backends.torch_cuda.model.attention import CudaAttention
from pagoda.backends.torch_cuda.model.parameters import RankParams
from pagoda.backends.torch_cuda.model.parts import (
    CudaBuildContext,
    CudaTokenEmbedding,
    Linear,
    NormStep,
    linear,
    rotary_tables,
)
from pagoda.backends.torch_cuda.parallel import SINGLE_RANK, Comm
from pagoda.common.models.spec import Ffn, Layer, Mlp, ModelSpec, Moe

Stream = tuple[Tensor | None, Tensor]
"""(residual stream [T, D], None for zero; update [T, D] to be added to it)."""


class CudaDecoder:
    """Tokens in, hidden states and logits out, without synchronizing with the host."""

    def __init__(
        self,
        spec: ModelSpec,
        params: RankParams,
        device: Device,
        max_len: int,
        comm: Comm = SINGLE_RANK,
        prefill: PrefillAttention | None = None,
        offload: Offload | None = None,
    ) -> None:
        build = CudaBuildContext(
            params if offload is None else offload.staged(params), device, comm, prefill or TritonAttn(device)
        )
        tables = rotary_tables(spec, max_len, device.torch)
        self.spec, self.build = spec, build
        self.embed = CudaTokenEmbedding(spec.embedding, build)
        layers = tuple(
            CudaDecoderLayer(
                layer,
                CudaAttention(layer.attention, tables[layer.attention.rope], build, f"layers.{index}.mixers.0"),
                build,
                f"layers.{index}",
            )
            for index, layer in enumerate(spec.layers)
        )
        self.layers = layers if offload is None else offload.wrap(layers)
        self.final_norm = build.norm(spec.final_norm, "final_norm")
        self.embed_out = build.linear("embed_out") if params.get("embed_out") is not None else None
        self.head = linear(params["embed" if spec.tied else "head"], params.get("head_bias"), device)

    @torch.inference_mode()
    def hidden(self, batch: CudaStepBatch, caches: Mapping[int, CudaLayerCache]) -> Tensor:
        """Return hidden states [T, D] after the final norm; K and V are written to the caches."""
        stream: Stream = None, self.embed(batch.token_ids, batch.positions, embedded=batch.embedded)
        for index, layer in enumerate(self.layers):
            stream = layer(stream, batch, caches[index])
        residual, update = stream
        return self.final_norm(update, residual)[0]

    @torch.inference_mode()
    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """Return float32 logits [R, V] of hidden [R, D], contiguous, on every rank; in `out` if given."""
        spec = self.spec
        if self.embed_out is not None:
            hidden = self.embed_out(hidden)
        narrow = self.build.comm.gather_last(self.head(hidden))[:, : spec.vocab]
        logits = narrow.float().contiguous() if out is None else out.copy_(narrow)
        if spec.logit_scale != 1.0:
            logits *= spec.logit_scale
        if spec.logit_softcap is not None:
            logits.div_(spec.logit_softcap).tanh_().mul_(spec.logit_softcap)
        return logits


class CudaDecoderLayer:
    """One layer: mixer and ffn, each between its norms, on the residual stream.

    `mixer`: (x [T, D], *mixer_inputs) -> [T, D].
    """

    def __init__(self, spec: Layer, mixer: Callable[..., Tensor], build: CudaBuildContext, prefix: str) -> None:
        norms = spec.norms
        self.mixer = mixer
        self.ffn = make_ffn(spec.feed_forward, build, f"{prefix}.ffn")
        self.norm_after_add = spec.norm_after_add
        self.before_mixer = build.norm(norms.before_mixer, f"{prefix}.norms.before_mixer")
        self.after_mixer = build.norm(norms.after_mixer, f"{prefix}.norms.after_mixer")
        self.before_ffn = build.norm(norms.before_ffn, f"{prefix}.norms.before_ffn")
        self.after_ffn = build.norm(norms.after_ffn, f"{prefix}.norms.after_ffn")

    def __call__(self, stream: Stream, *mixer_inputs: object) -> Stream:
        residual, update = stream
        x, residual = self.before_mixer(update, residual)
        residual, update = self._after(self.after_mixer, residual, self.mixer(x, *mixer_inputs))
        x, residual = self.before_ffn(update, residual)
        return self._after(self.after_ffn, residual, self.ffn(x))

    def _after(self, norm: NormStep, residual: Tensor, update: Tensor) -> Stream:
        if self.norm_after_add:
            return None, norm(update, residual)[0]
        return residual, norm(update, None)[0]


def make_ffn(spec: Ffn, build: CudaBuildContext, prefix: str) -> Linear:
    """Return the feed-forward block as a function of x [T, D]."""
    match spec:
        case Mlp():
            return _mlp(spec, build, prefix)
        case Moe():
            return make_moe(spec, build, prefix)
        case _:
            assert_never(spec)


def _mlp(spec: Mlp, build: CudaBuildContext, prefix: str) -> Linear:
    inner, down = build.linear(f"{prefix}.inner"), build.summed(f"{prefix}.down")
    act = activation.gated if spec.gated else activation.plain
    name, use_kernel = spec.activation, build.device.use_kernels

    def mlp(x: Tensor) -> Tensor:
        return down(act(inner(x), name, use_kernel=use_kernel))

    return mlp


def make_moe(spec: Moe, build: CudaBuildContext, prefix: str) -> Linear:
    """Return the routed mixture as a function of x [T, D]. Each expert's width is sharded: tokens are not exchanged."""
    params, device, comm = build.params, build.device, build.comm
    router = params[f"{prefix}.router"]
    inner, down = params.matrix(f"{prefix}.experts.inner"), params.matrix(f"{prefix}.experts.down")
    inner_bias, down_bias = params.get(f"{prefix}.experts.inner_bias"), params.get(f"{prefix}.experts.down_bias")

    def mixture(x: Tensor) -> Tensor:
        mixed = moe(
            x,
            F.linear(x, router).float(),
            inner,
            down,
            router=spec.router,
            expert=spec.expert,
            inner_bias=inner_bias,
            down_bias=down_bias,
            use_kernel=device.use_kernels,
            chip=device.chip,
        )
        return comm.all_reduce(mixed)

    return mixture
