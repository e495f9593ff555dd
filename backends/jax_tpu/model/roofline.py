"""Lower bounds on the bytes and FLOP of a step, from model spec and shape alone, for roofline comparisons.

Per device. Every weight a step uses is read once, K and V of the context are read once, new K and V and the logits are
written once. Any further traffic is overhead of the compiled program.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Final

import jax
import jax.numpy as jnp

from pagoda.backends.jax_tpu.execution.step_input import POOL_TILE, PoolShape
from pagoda.backends.jax_tpu.model.layout import segments
from pagoda.backends.jax_tpu.model.mixers.ops import BatchLoad, CostedStep
from pagoda.backends.jax_tpu.model.mixers.registry import ops_of
from pagoda.backends.jax_tpu.model.model import Model
from pagoda.backends.jax_tpu.model.slots import padded
from pagoda.backends.jax_tpu.weights.arrange import Path
from pagoda.common.engine.steps.shapes import StepShape
from pagoda.common.models.spec import Moe
from pagoda.kernels_pallas.chips import ChipInfo
from pagoda.kernels_pallas.grouped_matmul.quantized import PER_WORD

PROMPT: Final = POOL_TILE
"""Prompt length assumed for a full pooling batch, in tokens: each tile of queries attends to one tile of keys."""


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


def full_step(shape: StepShape, page_size: int, num_blocks: int) -> BatchLoad:
    """Return a batch that fills the shape: for decode, contexts as long as tables and cache allow; else new prompts."""
    longest = shape.pages * page_size
    if shape.decode_only:
        tokens = min(shape.seqs * longest, num_blocks * page_size)
        return BatchLoad(tokens, tokens)
    return full_prompts(shape.tokens, longest)


def full_prompts(tokens: int, length: int) -> BatchLoad:
    """Return the load of `tokens` new tokens in prompts of `length`, with causal attention."""
    count, remainder = divmod(tokens, length)
    return BatchLoad(tokens, count * _causal_pairs(length) + _causal_pairs(remainder))


def _causal_pairs(tokens: int) -> int:
    return tokens * (tokens + 1) // 2


def step_cost(model: Model, shape: StepShape, load: BatchLoad) -> RooflineCost:
    """Return the minimum cost of a step: embedding, layers, and the head after each sampled token."""
    moved, flops = _layers(model, shape.tokens)
    head = _head_size(model)
    rows = shape.seqs * shape.width
    moved += head * model.dtype.itemsize + rows * padded(model.spec.vocab, model.tensor) * 4
    flops += 2 * rows * head
    kernel_bytes, kernel_flops = _mixers(model, shape, load)
    return RooflineCost(moved, flops, kernel_bytes, kernel_flops)


def pool_cost(model: Model, shape: PoolShape, load: BatchLoad) -> RooflineCost:
    """Return the cost of a pooling program. Bidirectional attention is plain XLA, whose operands may stay on chip."""
    moved, flops = _layers(model, shape.tokens)
    if all(mixer.causal for mixer in model.spec.mixers):
        kernel_bytes, kernel_flops = _mixers(model, shape, load)
        return RooflineCost(moved, flops, kernel_bytes, kernel_flops)
    step = _costed(model, shape, load)
    costs = [ops_of(mixer).cost_beside_xla(mixer, step) for mixer in model.spec.mixers]
    return RooflineCost(moved + sum(cost.bytes for cost in costs), flops + sum(cost.flops for cost in costs))


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
    step = _costed(model, shape, load)
    costs = [ops_of(mixer).cost(mixer, step) for mixer in model.spec.mixers]
    return sum(cost.bytes for cost in costs), sum(cost.flops for cost in costs)


def _costed(model: Model, shape: StepShape | PoolShape, load: BatchLoad) -> CostedStep:
    return CostedStep(model.tensor, model.kernel, model.dtype.itemsize, shape, load)


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
    inner = path[4:]
    for prefix, ffn in layer.ffns.items():
        parts = tuple(prefix.split("."))
        if inner[: len(parts)] == parts and isinstance(ffn, Moe) and inner[len(parts)] in _OF_EXPERTS:
            chosen = ffn.computed / ffn.experts
            return min(1.0, tokens * chosen), chosen
    return 1.0, 1.0


def head_cost(model: Model) -> RooflineCost:
    """Return the minimum cost of the head, of which a step needs the FLOP for each row."""
    head = _head_size(model)
    return RooflineCost(head * model.dtype.itemsize, 2 * head)


def _head_size(model: Model) -> int:
    return padded(model.spec.vocab, model.tensor) * (model.spec.embedding.width or model.spec.width) // model.tensor


def _local_size(leaf: object) -> int:
    return prod(leaf.sharding.shard_shape(leaf.shape))  # type: ignore[attr-defined]
