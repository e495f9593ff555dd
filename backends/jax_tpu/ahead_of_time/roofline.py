"""What a step must at least move and compute, from spec and shape alone: the roofline a program is held against.

Per device. Every weight that a step uses is read once, K and V of the context once, new K and V and the logits are
written once. What the program reads and writes besides is the compiler's doing, not the model's need.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Final, TypeAlias

from pagoda.backends.jax_tpu.execution import program_keys
from pagoda.backends.jax_tpu.execution.packed_input import TILE, PackedShape
from pagoda.backends.jax_tpu.execution.program_keys import Choose, Forward, ForwardRows, OnLogits, Remember, Score
from pagoda.backends.jax_tpu.model.layout import HeadLayout, padded, segments
from pagoda.backends.jax_tpu.model.model import Model
from pagoda.backends.jax_tpu.weights.placement import Path
from pagoda.common.engine.shapes import StepShape
from pagoda.common.models.spec import Moe
from pagoda.kernels_pallas.chips import ChipInfo

Key: TypeAlias = program_keys.Key | PackedShape

PROMPT: Final = TILE
"""Tokens of the prompts that a full batch of a model that pools consists of: a tile of queries sees one of keys."""


@dataclass(frozen=True, slots=True)
class Load:
    """A step's batch: `kv_tokens` in the contexts that are read, `pairs` of a query and a key that it may see."""

    kv_tokens: int
    pairs: int


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes of HBM and FLOP, of the attention kernel and of everything else."""

    bytes: int
    flops: int
    kernel_bytes: int = 0
    kernel_flops: int = 0

    def seconds(self, chip: ChipInfo) -> float:
        """The least time on one device."""
        return max(self.memory_seconds(chip), self.compute_seconds(chip))

    def memory_seconds(self, chip: ChipInfo) -> float:
        """The time that the bytes take."""
        return (self.bytes + self.kernel_bytes) / (chip.hbm_bandwidth * chip.cores)

    def compute_seconds(self, chip: ChipInfo) -> float:
        """The time that the FLOP take."""
        return (self.flops + self.kernel_flops) / (chip.peak_flops * chip.cores)

    def kernel_seconds(self, chip: ChipInfo) -> float:
        """The least time of the attention kernel, which runs on one core."""
        return max(self.kernel_bytes / (chip.hbm_bandwidth * chip.cores), self.kernel_flops / chip.peak_flops)


def load_of(model: Model, key: Key, num_blocks: int) -> Load:
    """A batch that fills the program; of no matter to those that are no forward pass."""
    match key:
        case Forward(shape) | ForwardRows(shape):
            return full_load(shape, model.kernel.page_size, num_blocks)
        case PackedShape(tokens):
            return _prompts(tokens, PROMPT)
        case _:
            return Load(0, 0)


def full_load(shape: StepShape, page_size: int, num_blocks: int) -> Load:
    """A batch that fills the shape: contexts as long as tables and cache allow, or new prompts without any."""
    longest = shape.pages * page_size
    if shape.decode_only:
        tokens = min(shape.seqs * longest, num_blocks * page_size)
        return Load(tokens, tokens)
    return _prompts(shape.tokens, longest)


def _prompts(tokens: int, length: int) -> Load:
    """So many tokens in prompts of that length, each of which sees those before it."""
    whole, rest = divmod(tokens, length)
    return Load(tokens, whole * _triangle(length) + _triangle(rest))


def _triangle(tokens: int) -> int:
    return tokens * (tokens + 1) // 2


def need(model: Model, key: Key, load: Load) -> Need:
    """What one program needs. `load` matters to a forward pass only."""
    vocab = padded(model.spec.vocab, model.tensor)
    match key:
        case Forward(shape) | ForwardRows(shape):
            return _forward(model, shape, load)
        case Score(_):
            head = _head_size(model)
            return Need(head * model.dtype.itemsize, 2 * head)
        case Choose(seqs, _) | OnLogits(_, seqs):
            return Need(seqs * vocab * 4, 0)
        case PackedShape():
            return _pool(model, key, load)
        case Remember():
            return Need(2 * (model.max_len + 1) * 4, 0)


def _forward(model: Model, shape: StepShape, load: Load) -> Need:
    moved, flops = _layers(model, shape.tokens)
    head = _head_size(model)
    moved += head * model.dtype.itemsize + shape.seqs * padded(model.spec.vocab, model.tensor) * 4
    flops += 2 * shape.seqs * head
    kernel_bytes, kernel_flops = _attention(model, shape, load)
    return Need(moved, flops, kernel_bytes, kernel_flops)


def _pool(model: Model, shape: PackedShape, load: Load) -> Need:
    """Attention both ways is XLA's own: what it reads and makes need not leave the chip."""
    moved, flops = _layers(model, shape.tokens)
    if all(layer.mixer.causal for layer in model.spec.layers):
        return Need(moved, flops, *_attention(model, shape, load))
    for layer in model.spec.layers:
        pairs = load.pairs if layer.mixer.causal else 2 * load.pairs
        heads = HeadLayout.of(layer.mixer, model.tensor)
        flops += 4 * pairs * heads.slots * heads.group * layer.mixer.head_dim // model.tensor
    return Need(moved, flops)


def _layers(model: Model, tokens: int) -> tuple[int, int]:
    """Bytes and FLOP of the embeddings of so many tokens, and of all layers but their attention."""
    moved, flops = tokens * model.spec.width * model.dtype.itemsize, 0
    for leaf, path in zip(model.leaves, model.paths):
        if path[0] != "segments":
            continue
        size = _local_size(leaf)
        used, computed = _share(model, path, tokens)
        moved += int(size * leaf.dtype.itemsize * used)
        flops += int(2 * tokens * size * computed)
    return moved, flops


def _attention(model: Model, shape: StepShape | PackedShape, load: Load) -> tuple[int, int]:
    """Bytes and FLOP of all layers' attention; a window shortens what is read."""
    moved = flops = 0
    for layer in model.spec.layers:
        mixer = layer.mixer
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


def _share(model: Model, path: Path, tokens: int) -> tuple[float, float]:
    """Which part of a parameter a step reads, and with which part of it a token computes: experts, else all."""
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
