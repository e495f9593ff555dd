"""The layers of a model that pools: whole prompts at once, no cache. Causal or not, as the spec says."""

from __future__ import annotations

from torch import Tensor

from pagoda.backends.reference.execution import PackedPrompts
from pagoda.backends.torch_cuda.attention_backends.triton_attn import TritonAttn
from pagoda.backends.torch_cuda.device import Device
from pagoda.backends.torch_cuda.model.decoder import CudaDecoderLayer, Stream
from pagoda.backends.torch_cuda.model.packed_attention import CudaPackedAttention
from pagoda.backends.torch_cuda.model.parameters import RankParams
from pagoda.backends.torch_cuda.model.parts import CudaBuildContext, CudaTokenEmbedding, rotary_tables
from pagoda.backends.torch_cuda.parallel.comm import ALONE
from pagoda.common.models.spec import ModelSpec


class CudaEncoder:
    """A batch of prompts in, hidden states out. Reads no tensor's values on the host."""

    def __init__(self, spec: ModelSpec, params: RankParams, device: Device, max_len: int) -> None:
        build = CudaBuildContext(params, device, ALONE, TritonAttn(device))
        tables = rotary_tables(spec, max_len, device.torch)
        self.embed = CudaTokenEmbedding(spec.embedding, build)
        self.layers = tuple(
            CudaDecoderLayer(
                layer,
                CudaPackedAttention(layer.mixer, tables[layer.mixer.rope], build, f"layers.{index}.mixer"),
                build,
                f"layers.{index}",
            )
            for index, layer in enumerate(spec.layers)
        )
        self.final_norm = build.norm(spec.final_norm, "final_norm")
        self.embed_out = build.linear("embed_out") if params.get("embed_out") is not None else None

    def hidden(self, batch: PackedPrompts) -> Tensor:
        """Hidden states [T, D] after the last norm, as a pooler reads them."""
        stream: Stream = None, self.embed(batch.token_ids, batch.positions, batch.token_types)
        for layer in self.layers:
            stream = layer(stream, batch)
        residual, update = stream
        hidden = self.final_norm(update, residual)[0]
        return hidden if self.embed_out is None else self.embed_out(hidden)
