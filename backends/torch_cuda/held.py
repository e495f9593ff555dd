"""What an engine keeps on the device for as long as it lives, besides the KV cache."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from pagoda.backends.torch_cuda.buffers import Buffers
from pagoda.backends.torch_cuda.decoder import Decoder
from pagoda.backends.torch_cuda.offload import Offload, choose_layers
from pagoda.backends.torch_cuda.parameters import Empty
from pagoda.backends.torch_cuda.profile import check_weights
from pagoda.backends.torch_cuda.sampler import Sampler
from pagoda.backends.torch_cuda.setup import Setup
from pagoda.backends.torch_cuda.weights import Loader
from pagoda.common.backend import Weight


@dataclass(frozen=True, slots=True)
class Held:
    """`weights`: their bytes on the device; `loader` can fill them again."""

    loader: Loader
    weights: int
    decoder: Decoder
    sampler: Sampler
    buffers: Buffers


def hold(setup: Setup, weights: Iterable[Weight], empty: Empty) -> Held:
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
    return Held(
        loader,
        num_bytes,
        Decoder(spec, loader.params, device, limits.max_model_len, setup.comm, setup.prefill, offload),
        Sampler(spec.vocab, limits.max_num_seqs, limits.max_model_len, device, setup.sampling),
        Buffers(limits.max_num_seqs, len(setup.layout.groups), pages, spec.vocab, device.torch),
    )


def _nowhere(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """For shapes alone."""
    return torch.empty(shape, dtype=dtype, device="meta")
