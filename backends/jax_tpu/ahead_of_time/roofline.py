"""Lower bounds on the bytes and FLOP of a program, from model spec and shape alone, for roofline comparisons.

Per device. Every weight a step uses is read once, K and V of the context are read once, new K and V and the logits are
written once. Any further traffic is overhead of the compiled program.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Final, TypeAlias

import jax
import jax.numpy as jnp

from pagoda.backends.jax_tpu.execution import program_keys
from pagoda.backends.jax_tpu.execution.program_keys import (
    CopyStates,
    CountTokens,
    Draft,
    Forward,
    ForwardEmbeds,
    LogitsProgram,
    RecordDrafts,
    Sample,
    ScorePrompt,
    SetCounts,
    SetHistoryRow,
    WriteAdapter,
)
from pagoda.backends.jax_tpu.execution.step_input import POOL_TILE, PoolShape
from pagoda.backends.jax_tpu.model.layout import HeadLayout, StateStack, padded, segments, stacks_of
from pagoda.backends.jax_tpu.model.model import Model
from pagoda.backends.jax_tpu.weights.placement import Path
from pagoda.common.engine.steps.shapes import StepShape
from pagoda.common.models.mixers import (
    Attention,
    GatedDelta,
    KimiDelta,
    LatentAttention,
    LightningAttention,
    Mamba,
    Mamba2,
    Mixer,
    ShortConvolution,
)
from pagoda.common.models.spec import Moe
from pagoda.common.models.supported import unsupported_mixer
from pagoda.kernels_pallas.chips import ChipInfo
from pagoda.kernels_pallas.grouped_matmul.quantized import PER_WORD

Key: TypeAlias = program_keys.Key | PoolShape

PROMPT: Final = POOL_TILE
"""Prompt length assumed for a full pooling batch, in tokens: each tile of queries attends to one tile of keys."""


@dataclass(frozen=True, slots=True)
class BatchLoad:
    """The attention work of a batch."""

    kv_tokens: int  # context tokens whose K and V are read
    pairs: int  # unmasked (query, key) pairs


@dataclass(frozen=True, slots=True)
class RooflineCost:
    """Minimum HBM bytes and FLOP of a program on one device."""

    bytes: int  # without the attention kernel
    flops: int  # without the attention kernel
    kernel_bytes: int = 0
    kernel_flops: int = 0

    def seconds(self, chip: ChipInfo) -> float:
        """Return the minimum time on one device, in seconds."""
        return max(self.memory_seconds(chip), self.compute_seconds(chip))

    def memory_seconds(self, chip: ChipInfo) -> float:
        """Return the time to move the bytes at full HBM bandwidth."""
        return (self.bytes + self.kernel_bytes) / (chip.hbm_bandwidth * chip.cores)

    def compute_seconds(self, chip: ChipInfo) -> float:
        """Return the time to compute the FLOP at peak rate."""
        return (self.flops + self.kernel_flops) / (chip.peak_flops * chip.cores)

    def kernel_seconds(self, chip: ChipInfo) -> float:
        """Return the minimum time of the mixers' kernels, which run on one core, with its share of the bandwidth."""
        return max(self.kernel_bytes / chip.hbm_bandwidth, self.kernel_flops / chip.peak_flops)


def full_batch(model: Model, key: Key, num_blocks: int) -> BatchLoad:
    """Return a batch that fills the program's shape; empty for programs other than the forward pass."""
    match key:
        case Forward(shape) | ForwardEmbeds(shape):
            return full_step(shape, model.kernel.page_size, num_blocks)
        case PoolShape(tokens):
            return _prompts(tokens, PROMPT)
        case _:
            return BatchLoad(0, 0)


def full_step(shape: StepShape, page_size: int, num_blocks: int) -> BatchLoad:
    """Return a batch that fills the shape: for decode, contexts as long as tables and cache allow; else new prompts."""
    longest = shape.pages * page_size
    if shape.decode_only:
        tokens = min(shape.seqs * longest, num_blocks * page_size)
        return BatchLoad(tokens, tokens)
    return _prompts(shape.tokens, longest)


def _prompts(tokens: int, length: int) -> BatchLoad:
    """Return the load of `tokens` new tokens in prompts of `length`, with causal attention."""
    count, remainder = divmod(tokens, length)
    return BatchLoad(tokens, count * _causal_pairs(length) + _causal_pairs(remainder))


def _causal_pairs(tokens: int) -> int:
    return tokens * (tokens + 1) // 2


def roofline_cost(model: Model, key: Key, load: BatchLoad) -> RooflineCost:
    """Return the minimum cost of one program. `load` matters to forward passes only."""
    vocab = padded(model.spec.vocab, model.tensor)
    match key:
        case Draft():
            raise AssertionError("drafter models are not compiled ahead of time")
        case Forward(shape) | ForwardEmbeds(shape):
            return _forward(model, shape, load)
        case ScorePrompt():
            head = _head_size(model)
            return RooflineCost(head * model.dtype.itemsize, 2 * head)
        case LogitsProgram("adjust" | "ban_words"):
            return RooflineCost(0, 0)  # a few entries
        case LogitsProgram(name, seqs):
            return RooflineCost((1 if name == "logprobs" else 2) * seqs * vocab * 4, 0)
        case Sample(seqs, _):
            return RooflineCost(seqs * vocab * 4, 0)
        case PoolShape():
            return _pool(model, key, load)
        case WriteAdapter():
            return RooflineCost(2 * model.adapter_bytes // max(model.lora.slots, 1) if model.lora else 0, 0)
        case RecordDrafts(seqs):
            return RooflineCost(2 * seqs * 4, 0)
        case CopyStates(pool, count):
            return RooflineCost(2 * count * model.block_bytes[pool], 0)
        case SetHistoryRow():
            return RooflineCost(2 * (model.max_len + 1) * 4, 0)
        case SetCounts():
            return RooflineCost(2 * 2 * vocab, 0)
        case CountTokens():
            return RooflineCost(0, 0)


def _forward(model: Model, shape: StepShape, load: BatchLoad) -> RooflineCost:
    moved, flops = _layers(model, shape.tokens)
    head = _head_size(model)
    rows = shape.seqs * shape.width
    moved += head * model.dtype.itemsize + rows * padded(model.spec.vocab, model.tensor) * 4
    flops += 2 * rows * head
    kernel_bytes, kernel_flops = _mixers(model, shape, load)
    return RooflineCost(moved, flops, kernel_bytes, kernel_flops)


def _pool(model: Model, shape: PoolShape, load: BatchLoad) -> RooflineCost:
    """Return the cost of a pooling program. Bidirectional attention is plain XLA, whose operands may stay on chip."""
    moved, flops = _layers(model, shape.tokens)
    if all(mixer.causal for mixer in model.spec.mixers):
        return RooflineCost(moved, flops, *_mixers(model, shape, load))
    for mixer in model.spec.mixers:
        if not isinstance(mixer, Attention):  # causal: the others are kernels
            cost = _mixer(model, mixer, shape, load)
            moved = moved + cost[0]
            flops = flops + cost[1]
            continue
        pairs = load.pairs if mixer.causal else 2 * load.pairs
        heads = HeadLayout.of(mixer, model.tensor)
        channels = mixer.head_dim + mixer.value_width
        flops += 2 * pairs * heads.slots * heads.group * channels // model.tensor
    return RooflineCost(moved, flops)


def _layers(model: Model, tokens: int) -> tuple[int, int]:
    """Return bytes and FLOP of the embedding of `tokens` tokens and of all layers without attention."""
    moved = tokens * model.spec.width * model.dtype.itemsize
    flops = 0
    for leaf, path in zip(model.leaves, model.paths):
        size = _local_size(leaf)
        if path[0] == "blocks":
            uses = _uses(model, int(path[1]))
            moved = moved + uses * size * leaf.dtype.itemsize
            flops = flops + uses * 2 * tokens * size
        if path[0] != "segments":
            continue
        read, computed = _fractions(model, path, tokens)
        moved += int(size * leaf.dtype.itemsize * read)
        flops += int(2 * tokens * size * computed * _numbers(leaf, path))
    return moved, flops


def _numbers(leaf: jax.ShapeDtypeStruct, path: Path) -> int:
    """Return the weights that an element of a parameter holds: several of 4 bits, none in a scale."""
    if path[-1] in ("scales", "shifts"):
        return 0
    return PER_WORD if path[-1] == "numbers" and leaf.dtype == jnp.uint32 else 1


def _mixers(model: Model, shape: StepShape | PoolShape, load: BatchLoad) -> tuple[int, int]:
    """Return bytes and FLOP of the kernels of all mixers."""
    costs = [_mixer(model, mixer, shape, load) for mixer in model.spec.mixers]
    return sum(moved for moved, _ in costs), sum(flops for _, flops in costs)


def _mixer(model: Model, mixer: Mixer, shape: StepShape | PoolShape, load: BatchLoad) -> tuple[int, int]:
    """Return bytes and FLOP of a mixer's kernel."""
    match mixer:
        case Attention():
            return _attention(model, mixer, shape, load)
        case LatentAttention():
            return _latent_attention(model, mixer, shape, load)
        case GatedDelta():
            return _gated_delta(model, mixer, shape)
        case KimiDelta() | LightningAttention() | Mamba() | Mamba2() | ShortConvolution():
            return _linear_recurrence(model, mixer, shape)
        case _:
            raise unsupported_mixer(mixer)


def _attention(model: Model, mixer: Attention, shape: StepShape | PoolShape, load: BatchLoad) -> tuple[int, int]:
    """Return bytes and FLOP of softmax attention, sliding windows and chunks considered."""
    heads = HeadLayout.of(mixer, model.tensor)
    kv = model.kernel.kv_layout(heads.slots // model.tensor, mixer.head_dim, mixer.value_width)
    token_bytes = kv.bytes_per_page // kv.page_size
    channels = heads.slots * heads.group * (mixer.head_dim + mixer.value_width) // model.tensor
    window = mixer.window or mixer.seen_chunks
    read = load.kv_tokens if window is None else min(load.kv_tokens, shape.seqs * window + shape.tokens)
    pairs = load.pairs if window is None else min(load.pairs, shape.tokens * window)
    written = shape.tokens if mixer.shares_cache_of is None else 0
    moved = (read + written) * token_bytes + shape.tokens * channels * model.dtype.itemsize
    return moved, 2 * pairs * channels


def _latent_attention(
    model: Model, mixer: LatentAttention, shape: StepShape | PoolShape, load: BatchLoad
) -> tuple[int, int]:
    """Return bytes and FLOP of absorbed latent attention: a latent is read once for all heads, padding included."""
    heads = HeadLayout.of(mixer, model.tensor).slots // model.tensor
    latents = model.kernel.latent_layout(mixer.latent_dim, mixer.rope.dim)
    token_bytes = latents.bytes_per_page // latents.page_size
    per_pair = heads * (latents.channels + latents.rank)
    moved = (load.kv_tokens + shape.tokens) * token_bytes + shape.tokens * per_pair * model.dtype.itemsize
    return moved, 2 * load.pairs * per_pair


def _gated_delta(model: Model, mixer: GatedDelta, shape: StepShape | PoolShape) -> tuple[int, int]:
    """Return bytes and FLOP of the rule in float32: states read and written once; per token and head k S, k u and q S.

    Chunks compute more; their FLOP beyond the rule's own are overhead.
    """
    layout = HeadLayout.of(mixer, model.tensor)
    slots = layout.slots // model.tensor
    heads = layout.slots * layout.group // model.tensor
    state = heads * mixer.key_dim * mixer.value_dim
    token = 2 * slots * mixer.key_dim + 2 * heads * mixer.value_dim
    return 4 * (2 * shape.seqs * state + shape.tokens * token), 6 * shape.tokens * state


def _linear_recurrence(model: Model, mixer: Mixer, shape: StepShape | PoolShape) -> tuple[int, int]:
    """Return bytes and FLOP of a recurrence in float32: states read and written once; per token k v and q S, and k S.

    The convolution's tails and products are not counted.
    """
    moved = flops = 0
    for stack in stacks_of(mixer, model.tensor):
        if isinstance(stack, StateStack):
            slots = stack.heads // model.tensor
            state = slots * stack.key_dim * stack.value_dim
            token = 2 * slots * (stack.key_dim + stack.value_dim)
            moved += 4 * (2 * shape.seqs * state + shape.tokens * token)
            flops += (6 if isinstance(mixer, KimiDelta) else 4) * shape.tokens * state
    return moved, flops


_OF_EXPERTS: Final = ("inner", "inner_bias", "down", "down_bias")
"""Parameters of a mixture that each expert has."""


def _uses(model: Model, number: int) -> int:
    """Return how many layers have the weights of an input block."""
    owner = model.spec.block_owners[number]
    return sum(layer.block is not None and layer.block.weights_of == owner for layer in model.spec.layers)


def _fractions(model: Model, path: Path, tokens: int) -> tuple[float, float]:
    """Return the fractions of a parameter that a step reads and that one token computes with: below 1 for experts."""
    segment = segments(model.spec.layers)[int(path[1])]
    layer = segment.block[int(path[3])]
    ffn = layer.ffn
    inner = path[4:]
    if layer.side_moe is not None and inner[:2] == ("side", "moe"):
        ffn = layer.side_moe.moe
        inner = inner[1:]
    elif inner[0] != "ffn":
        return 1.0, 1.0
    if not isinstance(ffn, Moe) or inner[1] not in _OF_EXPERTS:
        return 1.0, 1.0
    chosen = ffn.router.top_k / ffn.experts
    return min(1.0, tokens * chosen), chosen


def _head_size(model: Model) -> int:
    return padded(model.spec.vocab, model.tensor) * (model.spec.embedding.width or model.spec.width) // model.tensor


def _local_size(leaf: object) -> int:
    return prod(leaf.sharding.shard_shape(leaf.shape))  # type: ignore[attr-defined]
