"""The decoder of a rank, built once from a model spec and run once per step.

`match` happens here, at build time; a step only calls what was built. The residual stream and the update that is to be
added to it travel apart, so that each addition happens in the norm that follows it. Knows layers and tensors; does not
know requests, sampling or where weights came from.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from pagoda.backends.torch_cuda.attention_backends.protocol import Prefill
from pagoda.backends.torch_cuda.attention_backends.triton_attn import TritonAttn
from pagoda.backends.torch_cuda.batch import Batch
from pagoda.backends.torch_cuda.build import Build, NormStep
from pagoda.backends.torch_cuda.cache import LayerCache
from pagoda.backends.torch_cuda.comm import ALONE, Comm
from pagoda.backends.torch_cuda.device import Device
from pagoda.backends.torch_cuda.embedding import TokenEmbedding
from pagoda.backends.torch_cuda.ffn import make_ffn
from pagoda.backends.torch_cuda.linear import linear
from pagoda.backends.torch_cuda.mixers.attention import AttentionMixer
from pagoda.backends.torch_cuda.offload import Offload
from pagoda.backends.torch_cuda.parameters import ModelParams
from pagoda.backends.torch_cuda.rotary import rotary_tables
from pagoda.common.models.spec import Layer, ModelSpec

Stream = tuple[Tensor | None, Tensor]
"""The residual stream [T, D], None for zero, and the update [T, D] to be added to it."""


class Decoder:
    """Tokens in, hidden states and logits out. Neither reads a tensor's values on the host."""

    def __init__(
        self,
        spec: ModelSpec,
        params: ModelParams,
        device: Device,
        max_len: int,
        comm: Comm = ALONE,
        prefill: Prefill | None = None,
        offload: Offload | None = None,
    ) -> None:
        build = Build(
            params if offload is None else offload.staged(params), device, comm, prefill or TritonAttn(device)
        )
        tables = rotary_tables(spec, max_len, device.torch)
        self.spec, self.build = spec, build
        self.embed = TokenEmbedding(spec.embedding, build)
        layers = tuple(
            DecoderLayer(
                layer,
                AttentionMixer(layer.mixer, tables[layer.mixer.rope], build, f"layers.{index}.mixer"),
                build,
                f"layers.{index}",
            )
            for index, layer in enumerate(spec.layers)
        )
        self.layers = layers if offload is None else offload.around(layers)
        self.final_norm = build.norm(spec.final_norm, "final_norm")
        self.embed_out = build.linear("embed_out") if params.get("embed_out") is not None else None
        self.head = linear(params["embed" if spec.tied else "head"], params.get("head_bias"), device)

    @torch.inference_mode()
    def hidden(self, batch: Batch, caches: Mapping[int, LayerCache]) -> Tensor:
        """Hidden states [T, D] after the final norm; K and V land in the caches."""
        stream: Stream = None, self.embed(batch.token_ids, batch.positions, embedded=batch.embedded)
        for index, layer in enumerate(self.layers):
            stream = layer(stream, batch, caches[index])
        residual, update = stream
        return self.final_norm(update, residual)[0]

    @torch.inference_mode()
    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """Hidden [R, D] -> float32 logits [R, V], contiguous, on every rank; in `out` where that is given."""
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


class DecoderLayer:
    """One layer: mixer and ffn, each between its norms, on the residual stream.

    `mixer`: x [T, D] and whatever else it reads -> [T, D].
    """

    def __init__(self, spec: Layer, mixer: Callable[..., Tensor], build: Build, prefix: str) -> None:
        norms = spec.norms
        self.mixer = mixer
        self.ffn = make_ffn(spec.ffn, build, f"{prefix}.ffn")
        self.norm_after_add = spec.norm_after_add
        self.before_mixer = build.norm(norms.before_mixer, f"{prefix}.norms.before_mixer")
        self.after_mixer = build.norm(norms.after_mixer, f"{prefix}.norms.after_mixer")
        self.before_ffn = build.norm(norms.before_ffn, f"{prefix}.norms.before_ffn")
        self.after_ffn = build.norm(norms.after_ffn, f"{prefix}.norms.after_ffn")

    def __call__(self, stream: Stream, *mixer_reads: object) -> Stream:
        """The stream before the layer -> after it."""
        residual, update = stream
        x, residual = self.before_mixer(update, residual)
        residual, update = self._after(self.after_mixer, residual, self.mixer(x, *mixer_reads))
        x, residual = self.before_ffn(update, residual)
        return self._after(self.after_ffn, residual, self.ffn(x))

    def _after(self, norm: NormStep, residual: Tensor, update: Tensor) -> Stream:
        if self.norm_after_add:
            return None, norm(update, residual)[0]
        return residual, norm(update, None)[0]
