"""Lower bounds on the bytes and FLOP of a program, from model spec and shape alone, for roofline comparisons.

Per device. Every weight a step uses is read once, K and V of the context are read once, new K and V and the logits are
written once. Any further traffic is overhead of the compiled program.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Final, TypeAlias

from pagoda.backends.jax_tpu.execution import program_keys
from pagoda.backends.jax_tpu.execution.program_keys import (
    Forward,
    ForwardEmbeds,
    LogitsProgram,
    RecordDrafts,
    Sample,
    ScorePrompt,
    SetHistoryRow,
)
from pagoda.backends.jax_tpu.execution.step_input import POOL_TILE, PoolShape
from pagoda.backends.jax_tpu.model.layout import HeadLayout, padded, segments
from pagoda.backends.jax_tpu.model.model import Model
from pagoda.backends.jax_tpu.weights.placement import Path
from pagoda.common.engine.shapes import StepShape
from pagoda.common.models.spec import Moe
from pagoda.kernels_pallas.chips import ChipInfo

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
        """Return the minimum time of the attention kernel, which runs on one core."""
        return max(self.kernel_bytes / (chip.hbm_bandwidth * chip.cores), self.kernel_flops / chip.peak_flops)


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
        case Forward(shape) | ForwardEmbeds(shape):
            return _forward(model, shape, load)
        case ScorePrompt(_):
            head = _head_size(model)
            return RooflineCost(head * model.dtype.itemsize, 2 * head)
        case Sample(seqs, _) | LogitsProgram(_, seqs):
            return RooflineCost(seqs * vocab * 4, 0)
        case PoolShape():
            return _pool(model, key, load)
        case RecordDrafts(seqs):
            return RooflineCost(2 * seqs * 4, 0)
        case SetHistoryRow():
            return RooflineCost(2 * (model.max_len + 1) * 4, 0)


def _forward(model: Model, shape: StepShape, load: BatchLoad) -> RooflineCost:
    moved, flops = _layers(model, shape.tokens)
    head = _head_size(model)
    rows = shape.seqs * shape.width
    moved += head * model.dtype.itemsize + rows * padded(model.spec.vocab, model.tensor) * 4
    flops += 2 * rows * head
    kernel_bytes, kernel_flops = _attention(model, shape, load)
    return RooflineCost(moved, flops, kernel_bytes, kernel_flops)


def _pool(model: Model, shape: PoolShape, load: BatchLoad) -> RooflineCost:
    """Return the cost of a pooling program. Bidirectional attention is plain XLA, whose operands may stay on chip."""
    moved, flops = _layers(model, shape.tokens)
    if all(mixer.causal for mixer in model.spec.mixers):
        return RooflineCost(moved, flops, *_attention(model, shape, load))
    for layer in model.spec.layers:
        pairs = load.pairs if layer.attention.causal else 2 * load.pairs
        heads = HeadLayout.of(layer.attention, model.tensor)
        flops += 4 * pairs * heads.slots * heads.group * layer.attention.head_dim // model.tensor
    return RooflineCost(moved, flops)


def _layers(model: Model, tokens: int) -> tuple[int, int]:
    """Return bytes and FLOP of the embedding of `tokens` tokens and of all layers without attention."""
    moved, flops = tokens * model.spec.width * model.dtype.itemsize, 0
    for leaf, path in zip(model.leaves, model.paths):
        if path[0] != "segments":
            continue
        size = _local_size(leaf)
        read, computed = _fractions(model, path, tokens)
        moved += int(size * leaf.dtype.itemsize * read)
        flops += int(2 * tokens * size * computed)
    return moved, flops


def _attention(model: Model, shape: StepShape | PoolShape, load: BatchLoad) -> tuple[int, int]:
    """Return bytes and FLOP of all layers' attention, sliding windows considered."""
    moved = flops = 0
    for layer in model.spec.layers:
        mixer = layer.attention
        heads = HeadLayout.of(mixer, model.tensor)
        kv = model.kernel.kv_layout(heads.slots // model.tensor, mixer.head_dim)
        token_bytes = kv.bytes_per_page // kv.page_size
        queries = heads.slots * heads.group * mixer.head_dim // model.tensor
        window = mixer.window
        read = load.kv_tokens if window is None else min(load.kv_tokens, shape.seqs * window + shape.tokens)
        pairs = load.pairs if window is None else min(load.pairs, shape.tokens * window)
        moved += (read + shape.tokens) * token_bytes + 2 * shape.tokens * queries * model.dtype.itemsize
        flops += 4 * pairs * queries
    return moved, flops


def _fractions(model: Model, path: Path, tokens: int) -> tuple[float, float]:
    """Return the fractions of a parameter that a step reads and that one token computes with: below 1 for experts."""
    segment = segments(model.spec.layers)[int(path[1])]
    ffn = segment.block[int(path[3])].ffn
    if not isinstance(ffn, Moe) or path[4] != "ffn" or path[5] == "router":
        return 1.0, 1.0
    chosen = ffn.router.top_k / ffn.experts
    return min(1.0, tokens * chosen), chosen


def _head_size(model: Model) -> int:
    return padded(model.spec.vocab, model.tensor) * (model.spec.embedding.width or model.spec.width) // model.tensor


def _local_size(leaf: object) -> int:
    return prod(leaf.sharding.shard_shape(leaf.shape))  # type: ignore[attr-defined]
