"""Everything that is settled about a rank's engine before it reads a weight."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pagoda.backends.torch_cuda.attention_backends.protocol import Prefill
from pagoda.backends.torch_cuda.comm import Comm
from pagoda.backends.torch_cuda.device import Device
from pagoda.backends.torch_cuda.kernels.decode_attention import choose_splits
from pagoda.backends.torch_cuda.kernels.prefill_attention import query_tile
from pagoda.backends.torch_cuda.ladder import Ladder
from pagoda.backends.torch_cuda.parameters import Pack
from pagoda.backends.torch_cuda.sharding import Shard
from pagoda.common.config.cache import CacheConfig
from pagoda.common.config.engine import Limits
from pagoda.common.engine.kv_spec import KvLayout
from pagoda.common.engine.sampling import SamplerOptions
from pagoda.common.models.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Setup:
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
    ladder: Ladder
    pack: Pack | None
    prefill: Prefill
    device: Device
    comm: Comm

    @property
    def shard(self) -> Shard:
        """The part of the model that this rank holds."""
        return Shard(self.comm.rank, self.comm.size)

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
