"""The interfaces of attention backends: over K and V in prefills and decodes, over latents (MLA) in decodes.

Prefills over latents always use our own kernels, decodes over K and V where a backend has none. Which backend was
measured to be fastest is in measured.json, by chip, heads and kind of step; tools/attention_table.py writes it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final, Protocol, runtime_checkable

import torch
from torch import Tensor

from pagoda.backends.torch_cuda.device import Device
from pagoda.backends.torch_cuda.execution.step_input import CudaStepBatch
from pagoda.backends.torch_cuda.kernels.attention.shared import HeadTerms, ScoreRules
from pagoda.backends.torch_cuda.memory.cache import CudaArrayCache, CudaLayerCache
from pagoda.common.engine.steps.contract import Int32
from pagoda.common.errors import ConfigError
from pagoda.common.models.mixers import Attention, LatentAttention

LATENT_DIMS: Final = (512, 64)
"""Channels of a latent and of its rotary key that the kernels of others are written for."""


TABLE: Final = Path(__file__).with_name("measured.json")
KINDS: Final = ("decode", "prefill")

Table = Mapping[str, Mapping[str, Mapping[str, str]]]
"""Chip such as sm_90 -> heads, see `heads_key` -> kind of step -> name of the fastest backend."""


class PrefillAttention(Protocol):
    """Attention of a step's sequences from `num_decodes` on."""

    def __call__(
        self,
        queries: Tensor,
        batch: CudaStepBatch,
        cache: CudaLayerCache,
        spec: Attention,
        terms: HeadTerms,
        out: Tensor,
    ) -> None:
        """Write the attention of queries [T, N, H] to rows of out [T, N, V]; their K and V are in the cache already.

        `terms`: the sinks and slopes that `spec` says there are. Rows of decode sequences are unchanged; rows of
        padding tokens are undefined.
        """
        ...


class DecodeAttention(Protocol):
    """Attention of a step's first `num_decodes` sequences. Called once per layer; captured in CUDA graphs."""

    def __call__(self, queries: Tensor, batch: CudaStepBatch, cache: CudaLayerCache, spec: Attention) -> Tensor:
        """Return [T, N, V] of the decodes' queries [T, N, H], whose K and V are in the cache. Padding is undefined."""
        ...


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """A step's decodes, as the host knows them before the step runs."""

    kv_lens: Int32  # of the sequences that are not padding, the step's own tokens included
    tables: tuple[Int32, ...]  # [S, W] of each KV group
    size: int  # sequences, padding included
    fixed: bool  # one of the sizes of decode programs, which may be captured


@runtime_checkable
class PlannedDecode(Protocol):
    """A DecodeAttention that plans on the host."""

    def plan(self, step: DecodeStep) -> None:
        """Plan the decodes of a step that is queued next: run, captured or replayed. Call on the stream of steps."""
        ...


class LatentDecode(Protocol):
    """Latent attention of a step's first `num_decodes` sequences. Called once per layer; captured in CUDA graphs."""

    def __call__(
        self, absorbed: Tensor, q: Tensor, batch: CudaStepBatch, cache: CudaArrayCache, spec: LatentAttention
    ) -> Tensor:
        """Return the attended latents [T, N, R] of the decodes' tokens, whose latents are in the cache already.

        absorbed [T, N, R]: queries without RoPE in the latent space; q [T, N, H]: the last channels have RoPE. Rows of
        padding are undefined.
        """
        ...


@dataclass(frozen=True, slots=True)
class AttentionKernels:
    """The attention backends of a rank."""

    prefill: PrefillAttention
    latent_decode: LatentDecode
    decode: DecodeAttention | None = None  # None: our own

    @property
    def planned(self) -> PlannedDecode | None:
        """Return `decode` if it plans on the host."""
        return self.decode if isinstance(self.decode, PlannedDecode) else None


@dataclass(frozen=True, slots=True)
class AttentionRequirements:
    """What an attention backend must support."""

    mixers: tuple[Attention, ...]
    latents: tuple[LatentAttention, ...]
    dtype: torch.dtype
    kv_dtype: torch.dtype
    page: int  # tokens
    device: Device
    drafts: bool = False  # decodes have several tokens, and the device corrects their lengths


@dataclass(frozen=True, slots=True)
class PrefillPart:
    """The sequences of a batch that are not decodes, with indices relative to the first of them."""

    queries: Tensor  # [t, N, H]
    query_start: Tensor  # int32 [s+1], from 0
    kv_lens: Tensor  # int32 [s]
    tables: Tensor  # int32 [s, W]
    rows: slice  # of `out`

    @classmethod
    def of(cls, queries: Tensor, batch: CudaStepBatch, cache: CudaLayerCache) -> PrefillPart:
        """Select them, without synchronizing with the host."""
        first = batch.num_decodes
        begin = batch.num_decodes * batch.query_len
        return cls(
            queries[begin:],
            batch.query_start[first:] - begin,
            batch.kv_lens[first:],
            batch.groups[cache.group].tables[first:],
            slice(begin, None),
        )


def score_rules(spec: Attention, terms: HeadTerms, cache: CudaLayerCache) -> ScoreRules:
    """Return how a layer's own kernels compute scores over a cache."""
    return ScoreRules(
        spec.scale,
        spec.window,
        spec.softcap,
        terms.sinks,
        terms.slopes,
        cache.k_scale,
        cache.v_scale,
        spec.chunk,
        spec.lookback,
        spec.alibi_root,
    )


@dataclass(frozen=True, slots=True)
class LatentDecodePart:
    """The decodes of a batch as most libraries take them."""

    queries: Tensor  # [S, Q, N, R+D]: in the latent space, then with RoPE
    kv_lens: Tensor  # int32 [S], at least 1: padding reads the cache's first page
    tables: Tensor  # int32 [S, W]

    @classmethod
    def of(cls, absorbed: Tensor, q: Tensor, batch: CudaStepBatch, cache: CudaArrayCache) -> LatentDecodePart:
        """Select them, without synchronizing with the host."""
        seqs = batch.num_decodes
        rotary = cache.array.shape[2] - absorbed.shape[2]
        return cls(
            torch.cat((absorbed, q[..., -rotary:]), -1).unflatten(0, (seqs, batch.query_len)),
            batch.kv_lens[:seqs].clamp_min(1),
            batch.groups[cache.group].tables[:seqs],
        )


def by_token(cache: Tensor) -> Tensor:
    """Return the view [P, B, K, H] of keys or values [P, K, B, H], the layout of most libraries."""
    return cache.transpose(1, 2)


def unsupported_error(name: str, why: str) -> ConfigError:
    """Return the error for a backend that cannot be used: one line with the remedy."""
    return ConfigError("--attention-backend", f"{name} {why}; use auto, or drop the flag")


def check_flash_limits(name: str, needs: AttentionRequirements, max_head_dim: int) -> None:
    """Raise ConfigError for what they lack: CPU, float32, 8-bit caches, wider heads, windows, chunks, sinks, ALiBi.

    And values that are not as wide as keys.

    Windows: it multiplies values in blocks that left the window by zero, but freed blocks may contain NaN.
    """
    if needs.device.torch.type == "cpu":
        raise unsupported_error(name, "needs a GPU")
    dtype, kv_dtype = (str(each).removeprefix("torch.") for each in (needs.dtype, needs.kv_dtype))
    if needs.dtype not in (torch.bfloat16, torch.float16):
        raise unsupported_error(name, f"computes in bfloat16 and float16, not in {dtype}")
    if needs.kv_dtype != needs.dtype:
        raise unsupported_error(name, f"does not support a {kv_dtype} cache (--kv-cache-dtype)")
    if any(mixer.window is not None for mixer in needs.mixers):
        raise unsupported_error(name, "cannot share a KV cache with the sliding windows of this model")
    if any(mixer.chunk is not None for mixer in needs.mixers):
        raise unsupported_error(name, "does not attend in chunks, as this model does")
    if any(mixer.sinks for mixer in needs.mixers):
        raise unsupported_error(name, "does not take the attention sinks of this model")
    if any(mixer.alibi_slopes is not None for mixer in needs.mixers):
        raise unsupported_error(name, "does not take the ALiBi slopes of this model")
    if any(mixer.value_width != mixer.head_dim for mixer in needs.mixers):
        raise unsupported_error(name, "does not take the value heads of this model, which are not as wide as its keys")
    head_dim = max(mixer.head_dim for mixer in needs.mixers)
    if head_dim > max_head_dim:
        raise unsupported_error(name, f"supports heads of up to {max_head_dim} channels, this model's have {head_dim}")


def check_latent_limits(name: str, needs: AttentionRequirements, pages: tuple[int, ...]) -> None:
    """Raise ConfigError for what a kernel over such pages (tokens) lacks: CPU, float32, other widths, indexers."""
    if needs.device.torch.type == "cpu":
        raise unsupported_error(name, "needs a GPU")
    if needs.dtype not in (torch.bfloat16, torch.float16):
        raise unsupported_error(
            name, f"computes in bfloat16 and float16, not in {str(needs.dtype).removeprefix('torch.')}"
        )
    for spec in needs.latents:
        if (spec.latent_dim, spec.rope.dim) != LATENT_DIMS:
            raise unsupported_error(
                name, f"supports latents of 512 + 64 channels, this model's have {spec.latent_dim} + {spec.rope.dim}"
            )
        if spec.selected_tokens is not None:
            raise unsupported_error(name, "does not attend to the tokens that this model's indexer selects")
    if needs.page not in pages:
        wanted = " or ".join(map(str, pages))
        raise ConfigError(
            "--block-size", f"{name} reads pages of {wanted} tokens, not {needs.page}; use --block-size {pages[-1]}"
        )


def heads_key(head_dim: int, group: int, dtype: torch.dtype) -> str:
    """Return e.g. h128_g4_bfloat16: channels of a head, query heads per KV head, type of queries and cache."""
    return f"h{head_dim}_g{group}_{str(dtype).removeprefix('torch.')}"


@cache
def load_table() -> Table:
    """Return the file's contents, read once."""
    table: Table = json.loads(TABLE.read_text())
    return table


def fastest(needs: AttentionRequirements, table: Table) -> dict[str, str]:
    """Return the fastest backend by kind of step, where it is the same for all of a model's heads.

    Empty for what is not measured: latent attention, caches of another type than queries.
    """
    if needs.latents or needs.kv_dtype != needs.dtype:
        return {}
    of_chip = table.get(needs.device.chip.name, {})
    heads = {heads_key(mixer.head_dim, mixer.heads // mixer.kv_heads, needs.dtype) for mixer in needs.mixers}
    chosen: dict[str, str] = {}
    for kind in KINDS:
        names = {of_chip.get(key, {}).get(kind) for key in heads}
        if len(names) == 1 and (name := names.pop()) is not None:
            chosen[kind] = name
    return chosen
