"""What an engine keeps on the device for as long as it lives, besides the KV cache."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from pagoda.backends.torch_cuda.attention_backends.protocol import Prefill
from pagoda.backends.torch_cuda.device import Device
from pagoda.backends.torch_cuda.execution.buffers import Buffers
from pagoda.backends.torch_cuda.kernels.decode_attention import choose_splits
from pagoda.backends.torch_cuda.kernels.prefill_attention import query_tile
from pagoda.backends.torch_cuda.memory.offload import Offload, choose_layers
from pagoda.backends.torch_cuda.memory.profile import check_weights
from pagoda.backends.torch_cuda.model.decoder import CudaDecoder
from pagoda.backends.torch_cuda.model.parameters import Empty, Pack
from pagoda.backends.torch_cuda.parallel.comm import Comm
from pagoda.backends.torch_cuda.parallel.sharding import RankShard
from pagoda.backends.torch_cuda.sampling import CudaSampler
from pagoda.backends.torch_cuda.weights import Loader
from pagoda.common.backend import Weight
from pagoda.common.config.engine import Limits
from pagoda.common.config.groups.cache import CacheConfig
from pagoda.common.engine.kv_cache.spec import KvLayout
from pagoda.common.engine.sampling import SamplerOptions
from pagoda.common.engine.shapes import GraphSizes
from pagoda.common.models.spec import ModelSpec

# Everything that is settled about a rank's engine before it reads a weight.


@dataclass(frozen=True, slots=True)
class RankConfig:
    """`dtype`: of weights and activations; `stored`: of K and V. `pack`: of the layers' matrices, if they are.

    `prefill`: the attention of prefill and mixed steps.
    """

    spec: ModelSpec
    limits: Limits
    layout: KvLayout
    cache: CacheConfig
    dtype: torch.dtype
    stored: torch.dtype
    sampling: SamplerOptions
    ladder: GraphSizes
    pack: Pack | None
    prefill: Prefill
    device: Device
    comm: Comm

    @property
    def shard(self) -> RankShard:
        """The part of the model that this rank holds."""
        return RankShard(self.comm.rank, self.comm.size)

    @property
    def splits(self) -> dict[int, int]:
        """Size of a decode step -> programs that share a sequence's keys, for the layer with the fewest KV heads."""
        kv_heads = min(self.shard.share(layer.mixer.kv_heads) for layer in self.spec.layers)
        longest, chip = self.limits.max_model_len, self.device.chip
        return {size: choose_splits(size, kv_heads, longest, chip) for size in self.ladder.sizes}

    @property
    def tile(self) -> int:
        """Query tokens of a tile of prefill attention, which suit every layer."""
        mixers = {layer.mixer for layer in self.spec.layers}
        return min(query_tile(m.heads // m.kv_heads, m.head_dim, self.dtype, self.device.chip) for m in mixers)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """`weights`: their bytes on the device; `loader` can fill them again."""

    loader: Loader
    weights: int
    decoder: CudaDecoder
    sampler: CudaSampler
    buffers: Buffers


def load(setup: RankConfig, weights: Iterable[Weight], empty: Empty) -> LoadedModel:
    """Take every parameter into memory that `empty` gives, those of layers that are offloaded into the host's.

    Raises WeightError, or ConfigError when they do not fit the device.
    """
    spec, limits, device = setup.spec, setup.limits, setup.device
    shapes = Loader(spec, setup.shard, setup.dtype, _nowhere, setup.pack).params
    on_host = choose_layers(shapes, setup.cache.cpu_offload_gb)
    num_bytes = shapes.num_bytes - on_host.saved
    if device.is_gpu:
        check_weights(device, setup.cache, num_bytes)
    offload = Offload(on_host, device, empty) if on_host.layers else None
    elsewhere = None if offload is None else offload.places()
    loader = Loader(spec, setup.shard, setup.dtype, empty, setup.pack, elsewhere)
    loader.fill(weights)
    pages = -(-limits.max_model_len // limits.block_size)
    return LoadedModel(
        loader,
        num_bytes,
        CudaDecoder(spec, loader.params, device, limits.max_model_len, setup.comm, setup.prefill, offload),
        CudaSampler(spec.vocab, limits.max_num_seqs, limits.max_model_len, device, setup.sampling),
        Buffers(limits.max_num_seqs, len(setup.layout.groups), pages, spec.vocab, device.torch),
    )


def _nowhere(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """For shapes alone."""
    return torch.empty(shape, dtype=dtype, device="meta")
