"""One step of an online softmax, over some more keys of one query."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pagoda.backends.cpu_kernels.emission.emit import I32, LANES, Emitter, constants


@dataclass(frozen=True, slots=True)
class SeenKeys:
    """Which of the keys 0, 1, ... a query sees: those from `low` to `newest` that are below `span`."""

    low: Any
    newest: Any
    span: int


@dataclass(frozen=True, slots=True)
class SoftmaxStep:
    """Weights of some keys, and what becomes of the sums over the keys before."""

    weights: Sequence[Any]
    top: Any
    """Largest score so far."""

    total: Any
    """Vector whose sum is that of all weights so far."""

    rescale: Any
    """Vector of the factor of what was summed with the weights before."""


def masked_scores(e: Emitter, scores: Sequence[Any], factor: float, seen: SeenKeys) -> list[Any]:
    """Return scores times a factor, and minus infinity for keys that are not seen."""
    builder = e.builder
    masked = []
    oldest, newest = (e.splat(builder.trunc(position, I32)) for position in (seen.low, seen.newest))
    for key, score in zip(range(0, len(scores) * LANES, LANES), scores):
        numbers = builder.add(constants(I32, range(LANES)), e.splat(key))
        visible = builder.icmp_signed("<=", numbers, newest)
        visible = builder.and_(visible, builder.icmp_signed(">=", numbers, oldest))
        if key + LANES > seen.span:
            visible = builder.and_(visible, builder.icmp_signed("<", numbers, e.splat(seen.span)))
        scaled = builder.fmul(score, e.splat(factor))
        masked.append(builder.select(visible, scaled, e.splat(float("-inf"))))
    return masked


def softmax_step(
    e: Emitter, scores: Sequence[Any], power: Callable[[Emitter, Any], Any], before: Any, total: Any | None
) -> SoftmaxStep:
    """Return the weights of keys with these scores.

    `power`: emits an exponential; `before`: the largest score of the keys before;
    `total`: as in SoftmaxStep, of the keys before; None: only the weights of this step are summed.
    """
    builder = e.builder
    highest = scores[0]
    for other in scores[1:]:
        highest = e.maximum(highest, other)
    top = e.maximum(before, e.largest(highest))
    rescale = power(e, e.splat(builder.fsub(before, top)))
    weights = [power(e, builder.fsub(score, e.splat(top))) for score in scores]
    summed = e.splat(0.0) if total is None else builder.fmul(total, rescale)
    for weight in weights:
        summed = builder.fadd(summed, weight)
    return SoftmaxStep(weights=weights, top=top, total=summed, rescale=rescale)
