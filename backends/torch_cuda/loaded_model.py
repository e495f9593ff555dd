"""Configuration and loading of one rank's model: everything an engine keeps on the device but the KV cache."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pagoda.backends.torch_cuda.attention_backends.protocol import AttentionKernels
from pagoda.backends.torch_cuda.attention_backends.triton import TritonAttn
from pagoda.backends.torch_cuda.device import Device
from pagoda.backends.torch_cuda.execution.mixed_steps import MixedShapes, mixed_sizes
from pagoda.backends.torch_cuda.execution.step_input import CudaStepBatch, DecodeBuffers, GroupBatch
from pagoda.backends.torch_cuda.kernels.attention.decode_attention import choose_pieces
from pagoda.backends.torch_cuda.kernels.attention.invariant_attention import query_tile as invariant_tile
from pagoda.backends.torch_cuda.kernels.attention.latent_attention import choose_latent_pieces
from pagoda.backends.torch_cuda.kernels.attention.latent_prefill import query_tile as latent_tile
from pagoda.backends.torch_cuda.kernels.attention.latent_prefill import round_capacity
from pagoda.backends.torch_cuda.kernels.attention.prefill_attention import make_tiles, query_tile
from pagoda.backends.torch_cuda.kernels.recurrent.state_step import CHUNK
from pagoda.backends.torch_cuda.memory.cache import CudaCache, CudaLayerCache, allocate, arrays_of
from pagoda.backends.torch_cuda.memory.offload import Offload, choose_layers
from pagoda.backends.torch_cuda.memory.plan import check_weights
from pagoda.backends.torch_cuda.model.adapters import CudaAdapters
from pagoda.backends.torch_cuda.model.decoder import CudaDecoder
from pagoda.backends.torch_cuda.model.drafters import CudaDraftModel, DrafterBuild
from pagoda.backends.torch_cuda.model.mixers.attention import attentions
from pagoda.backends.torch_cuda.model.mixers.latent_attention import latent_attentions
from pagoda.backends.torch_cuda.model.mixers.registry import ops_of
from pagoda.backends.torch_cuda.model.parameters import Empty, Pack
from pagoda.backends.torch_cuda.parallel.tensor_parallel import Comm, RankShard
from pagoda.backends.torch_cuda.sampling import CudaSampler
from pagoda.backends.torch_cuda.weights.load import Loader, make_layout
from pagoda.backends.torch_decoder.media_rows import MediaRows
from pagoda.common.backend import Weight
from pagoda.common.config.engine import Limits
from pagoda.common.config.groups.cache import CacheConfig
from pagoda.common.engine.kv_cache.spec import KvLayout
from pagoda.common.engine.sampling.processors import SamplerOptions
from pagoda.common.engine.steps.shapes import GraphSizes
from pagoda.common.models.drafters import DrafterSpec, mixers_of
from pagoda.common.models.mixers import Mixer
from pagoda.common.models.spec import ModelSpec
from pagoda.common.models.transformers_spec import AnySpec, TransformersSpec
from pagoda.common.weights.lora.weights import LoraOptions
from pagoda.common.weights.quantization.schemes import Scheme

if TYPE_CHECKING:
    from pagoda.backends.torch_cuda.model.transformers_decoder import CudaTransformersDecoder

CALIBRATION_TOKENS: Final = 512
"""Tokens that calibrate the scales of an 8-bit KV cache."""

MARGIN: Final = 1.25
"""Factor between the largest K or V in calibration and the largest that is stored exactly."""


DEFAULT_TILE: Final = 64
"""Query tokens per tile of a model without softmax attention over K and V."""


def all_mixers(spec: AnySpec, drafter: DrafterSpec | None = None) -> tuple[Mixer, ...]:
    """Return the mixers of a model and its drafter."""
    return (*spec.mixers, *mixers_of(drafter))


@dataclass(frozen=True, slots=True)
class RankConfig:
    """A rank's engine configuration, complete before weights are loaded."""

    spec: AnySpec
    limits: Limits
    layout: KvLayout
    cache: CacheConfig
    dtype: torch.dtype  # of weights and activations
    kv_dtype: torch.dtype
    sampling: SamplerOptions
    graph_sizes: GraphSizes
    pack: Pack | None  # quantizes the matrices of layers; None: not quantized
    schemes: Mapping[str, Scheme]  # of parameters that the checkpoint holds quantised
    attention: AttentionKernels
    device: Device
    comm: Comm
    batch_invariant: bool = False
    lora: LoraOptions | None = None  # slots for LoRA adapters
    lora_dtype: torch.dtype = torch.float32  # of their matrices
    drafter: DrafterSpec | None = None
    captures_mixed: bool = False  # prefill and mixed steps, where the model allows it

    @property
    def mixed_shapes(self) -> MixedShapes | None:
        """The captured prefill and mixed steps; None: they run eagerly.

        Their inputs must have shapes that depend on the number of tokens alone: those of latent attention, of recurrent
        mixers, of selected blocks, of drafts and of the kernels of others do not.
        """
        spec = self.spec
        limits = self.limits
        plain = all(ops_of(mixer).fixed_shapes(mixer) for mixer in spec.mixers)
        drafts = limits.max_drafts > 0
        offloads = self.cache.cpu_offload_gb > 0
        own_kernels = isinstance(self.attention.prefill, TritonAttn) and self.attention.planned is None
        if not (self.captures_mixed and isinstance(spec, ModelSpec) and plain and own_kernels):
            return None
        if drafts or offloads or self.batch_invariant:
            return None
        return MixedShapes(mixed_sizes(limits.max_num_batched_tokens), self.query_tile, limits.max_num_seqs)

    @property
    def replayed(self) -> int:
        """The drafts of a sequence that recurrent mixers may run again; 0: none, or no state."""
        return self.limits.max_drafts if self.layout.has_states else 0

    @property
    def mixers(self) -> tuple[Mixer, ...]:
        """The mixers of the model and its drafter."""
        return all_mixers(self.spec, self.drafter)

    @property
    def shard(self) -> RankShard:
        return RankShard(self.comm.rank, self.comm.size)

    @property
    def quantised(self) -> bool:
        """True if matrices are quantised, at load or in the checkpoint."""
        return self.pack is not None or bool(self.schemes)

    @property
    def pieces(self) -> dict[int, int]:
        """Decode batch size -> pieces that its sequences are cut into together, for the layer with the fewest KV heads.

        Empty with --batch-invariant, whose attention adds spans of fixed positions, and without attention.
        """
        chip = self.device.chip
        share = self.shard.share
        kv_heads = [share(mixer.kv_heads) for mixer in attentions(self.mixers)]
        heads = [share(mixer.heads) for mixer in latent_attentions(self.mixers)]
        if self.batch_invariant or not (kv_heads or heads):
            return {}

        def pieces(size: int) -> int:
            of_attention = choose_pieces(size, min(kv_heads), chip) if kv_heads else 1
            return max(of_attention, choose_latent_pieces(size, min(heads), chip) if heads else 1)

        return {size: pieces(size) for size in self.graph_sizes.sizes}

    @property
    def query_tile(self) -> int:
        """Query tokens per tile of prefill attention: the smallest tile over all layers."""
        chip = self.device.chip
        mixers = attentions(self.mixers)
        tile_of = invariant_tile if self.batch_invariant else query_tile
        tiles = [tile_of(m.heads // m.kv_heads, m.head_dim, self.dtype, chip) for m in mixers]
        tiles += [latent_tile(m.nope_dim, m.value_dim, self.dtype, chip) for m in latent_attentions(self.mixers)]
        return min(tiles, default=DEFAULT_TILE)

    @property
    def round_tokens(self) -> int:
        """Tokens of a round of latent prefill, 0 without latent attention; at least those of the largest step fit."""
        mixers = latent_attentions(self.mixers)
        limits = self.limits
        sizes = [self.shard.share(mixer.heads) * (mixer.nope_dim + mixer.value_dim) for mixer in mixers]
        return round_capacity(max(sizes) * self.dtype.itemsize, limits.max_num_batched_tokens) if sizes else 0


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A rank's model in device memory."""

    loader: Loader | None  # can fill the weights again, in place; None: transformers computes the model
    weight_bytes: int  # on the device
    decoder: CudaDecoder | CudaTransformersDecoder
    sampler: CudaSampler
    buffers: DecodeBuffers
    adapters: CudaAdapters | None = None
    media: MediaRows | None = None  # the row cache; None: prompts have no media
    drafter: CudaDraftModel | None = None

    @property
    def adapter_bytes(self) -> int:
        """Return the bytes of the slots for LoRA adapters."""
        return 0 if self.adapters is None else self.adapters.num_bytes


def load_drafter(config: RankConfig, model: LoadedModel, weights: Iterable[Weight], empty: Empty) -> LoadedModel:
    """Return the model with its drafter. Raises WeightError."""
    assert config.drafter is not None, "there is a drafter"
    target = model.decoder if isinstance(model.decoder, CudaDecoder) else None
    build = DrafterBuild(
        target,
        config.dtype,
        config.device,
        config.comm,
        config.attention,
        config.limits.max_model_len,
        empty,
        config.batch_invariant,
    )
    drafter = build.load(config.drafter, weights)
    return replace(model, drafter=drafter, weight_bytes=model.weight_bytes + drafter.num_bytes)


def load_model(config: RankConfig, weights: Iterable[Weight], empty: Empty) -> LoadedModel:
    """Load every parameter into memory from `empty`, those of offloaded layers into host memory.

    Raise WeightError, or ConfigError if they do not fit the device.
    """
    spec = config.spec
    limits = config.limits
    device = config.device
    if isinstance(spec, TransformersSpec):
        return _load_transformers(config, spec, weights)
    shapes = Loader(spec, config.shard, config.dtype, _meta, config.pack, schemes=config.schemes).params
    on_host = choose_layers(shapes, config.cache.cpu_offload_gb, spec.shared_blocks.values())
    num_bytes = shapes.num_bytes - on_host.saved
    if device.is_gpu:
        slots = 0 if (planned := _make_adapters(config, spec, _meta)) is None else planned.num_bytes
        check_weights(device, config.cache, num_bytes + slots, quantised=config.quantised)
    offload = Offload(on_host, device, empty) if on_host.layers else None
    host_memory = None if offload is None else offload.allocators()
    loader = Loader(spec, config.shard, config.dtype, empty, config.pack, host_memory, config.schemes)
    loader.fill(weights)
    adapters = _make_adapters(config, spec, empty)
    decoder = CudaDecoder(
        spec,
        loader.params,
        device,
        limits.max_model_len,
        config.comm,
        config.attention,
        offload,
        batch_invariant=config.batch_invariant,
        adapters=adapters,
    )
    weight_bytes = loader.params.num_bytes - on_host.saved
    return LoadedModel(
        loader=loader,
        weight_bytes=weight_bytes,
        decoder=decoder,
        sampler=_make_sampler(config),
        buffers=_make_buffers(config),
        adapters=adapters,
        media=_make_media(config, decoder.embedding_dtype),
    )


def _make_adapters(config: RankConfig, spec: ModelSpec, empty: Empty) -> CudaAdapters | None:
    """Return the slots for LoRA adapters, empty; None without --enable-lora."""
    if config.lora is None:
        return None
    layout = make_layout(spec, config.shard)
    return CudaAdapters(spec, layout, config.lora, config.lora_dtype, config.device, empty, config.comm)


def _load_transformers(config: RankConfig, spec: TransformersSpec, weights: Iterable[Weight]) -> LoadedModel:
    from pagoda.backends.torch_cuda.model.transformers_decoder import CudaTransformersDecoder

    max_len = config.limits.max_model_len
    decoder = CudaTransformersDecoder(spec, weights, config.dtype, max_len, config.device, config.attention.prefill)
    if config.device.is_gpu:
        check_weights(config.device, config.cache, decoder.num_bytes, quantised=False)
    decoder.place()
    return LoadedModel(
        loader=None,
        weight_bytes=decoder.num_bytes,
        decoder=decoder,
        sampler=_make_sampler(config),
        buffers=_make_buffers(config),
        media=_make_media(config, decoder.embedding_dtype),
    )


def _make_media(config: RankConfig, dtype: torch.dtype) -> MediaRows | None:
    """Return the row cache of media; None if prompts have none. `dtype`: of the embedding table."""
    rows = config.limits.media_rows
    return MediaRows(rows, config.spec.hidden_width, dtype, config.device.torch) if rows else None


def _make_sampler(config: RankConfig) -> CudaSampler:
    limits = config.limits
    return CudaSampler(
        config.spec.vocab,
        limits.max_num_seqs,
        limits.max_model_len,
        config.device,
        config.sampling,
        limits.max_drafts,
        config.comm,
        guesses=limits.device_drafts,
        replays=config.replayed > 0,
    )


def _make_buffers(config: RankConfig) -> DecodeBuffers:
    limits = config.limits
    return DecodeBuffers(
        limits.max_num_seqs,
        len(config.layout.groups),
        -(-limits.max_model_len // limits.block_size),
        config.spec.vocab,
        config.device.torch,
        limits.block_size,
        limits.max_drafts,
        0 if config.lora is None else config.lora.slots,
        guesses=limits.device_drafts,
        pieces=config.pieces,
        replayed=config.replayed,
    )


def _meta(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


@torch.inference_mode()
def calibrate_kv_scales(
    decoder: CudaDecoder, caches: Mapping[int, CudaCache], layout: KvLayout, *, max_len: int, tile: int
) -> None:
    """Set `k_scale` and `v_scale` of every layer's 8-bit cache, in place.

    One sequence of at most `max_len` random tokens runs through the model with a cache of the activations' type; the
    largest K and V of each layer, times MARGIN, map to the largest 8-bit value. Larger values saturate. Each rank
    calibrates its own heads.
    """
    build = decoder.build
    tokens = min(CALIBRATION_TOKENS, max_len)
    pages = -(-tokens // layout.block_size)
    groups = len(layout.groups)
    blocks = 1 + np.arange(groups * pages, dtype=np.int32).reshape(groups, pages)
    device = build.device.torch

    def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    num_blocks = (1 + groups * pages,) * len(layout.pools)
    plain = allocate(layout, num_blocks, decoder.build.table_dtype, build.shard, zeros)
    ids = np.random.default_rng(0).integers(decoder.spec.vocab, size=tokens, dtype=np.int32)
    decoder.hidden(_one_sequence(ids, blocks, layout.block_size, tile, device), plain)
    for number, cache in caches.items():
        if not isinstance(cache, CudaLayerCache) or number >= len(decoder.spec.caches):  # those of a drafter
            continue
        first = int(blocks[cache.group][0])
        end = int(blocks[cache.group][-1]) + 1
        for scale, observed in zip((cache.k_scale, cache.v_scale), arrays_of(plain[number])):
            assert scale is not None, "only an 8-bit cache has scales"
            largest = torch.finfo(cache.keys.dtype).max
            peak = observed[first:end].float().abs().max()
            scale.copy_((peak * (MARGIN / largest)).clamp(min=torch.finfo(torch.float32).tiny))


def _one_sequence(
    ids: npt.NDArray[np.int32], blocks: npt.NDArray[np.int32], block_size: int, tile: int, device: torch.device
) -> CudaStepBatch:
    """Return a prefill of ids [T] into the blocks [groups, W] of each group, from their first slot on."""
    length = np.array([len(ids)], np.int32)
    every = torch.arange(len(ids), dtype=torch.int32, device=device)

    def to_device(array: npt.NDArray[np.int32]) -> Tensor:
        return torch.from_numpy(array).to(device)

    return CudaStepBatch(
        token_ids=to_device(ids),
        positions=every,
        query_start=to_device(np.append(np.zeros(1, np.int32), length)),
        kv_lens=to_device(length),
        groups=tuple(GroupBatch(to_device(row[None]), every + int(row[0]) * block_size) for row in blocks),
        num_decodes=0,
        tiles=to_device(make_tiles(length, 0, tile)),
        tile=tile,
        chunks=to_device(make_tiles(length, 0, CHUNK)),
    )
