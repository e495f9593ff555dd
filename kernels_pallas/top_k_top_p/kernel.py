"""The Pallas kernel: blocks of eight rows of logits stay in VMEM while their thresholds are searched.

The search keeps a bracket of two logits: keeping everything from `low` on is enough (tokens for top-k, mass for top-p),
keeping only what is above `high` is not. A pass over the row measures the mass kept by a guess and the logits adjacent
to it, so `low` and `high` are always logits of the row, and ties need no extra passes. Guesses assume an exponential
tail; every third one bisects the bracket as ordered integers, which bounds the number of passes. Top-k starts from the
k-th largest of the maxima of 1024 groups, a lower bound of the k-th logit: usually two or three passes remain.

Counts are summed as float32, exact below 2^24, because the vector unit has no integer reductions. HBM is read once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pagoda.kernels_pallas.chips import ChipInfo

ROWS = 8
LANES = 128
CHUNK = 1024
"""Columns of one step of a pass; also the number of groups whose maxima start the top-k search."""
UNROLL = 4
"""Steps per loop iteration: each iteration copies its carry, 24 registers."""
MAX_PASSES = 3 * 33
"""Upper bound on the passes of a search: every third halves a range of at most 2^32 values."""
UNDERFLOW = 87.0
"""exp(-87) is about the smallest float32: smaller weights add nothing to a mass."""

TOP_K = 1
TOP_P = 2
MIN_P = 4
"""Flags: which limits any row of a block uses."""


class ThresholdBracket(NamedTuple):
    """The bracket of a threshold search; float32 [8, 128] each, a row's value in all lanes."""

    low: jax.Array  # the threshold is at least this
    mass: jax.Array  # kept by `low`: enough
    high: jax.Array  # the threshold is at most this
    over: jax.Array  # mass above `high`: too little


class Measured(NamedTuple):
    """The result of one pass; [8, 128] each."""

    mass: jax.Array  # kept by the threshold
    above: jax.Array  # smallest logit kept
    below: jax.Array  # largest logit not kept


Step = Callable[[Any, jax.Array, Any], Any]
"""(columns of a chunk, its logits [8, CHUNK], carry) -> carry."""
Fold = Callable[[Step, Any], Any]
"""(step, initial carry) -> final carry, over all chunks."""


@dataclass(frozen=True)
class ThresholdKernelBody:
    """The kernel body over its refs; `run` is one block of rows. Parameters and result are float32 [8, 1]."""

    vocab: int
    limits: Any  # [blocks] SMEM: flags TOP_K, TOP_P, MIN_P
    temperature: Any
    top_k: Any
    top_p: Any
    min_p: Any
    logits: Any  # [8, V]
    out: Any
    weights: Any  # [8, V rounded up to CHUNK]
    tail: Any  # [8, CHUNK]: the last columns, padded with -inf

    def run(self) -> None:
        """Compute the thresholds of one block of rows."""
        limits = self.limits[pl.program_id(0)]
        self.out[...] = jnp.full_like(self.out, -jnp.inf)

        @pl.when(limits > 0)
        def _() -> None:
            self.copy_tail()
            peaks = self.fold(lambda _, x, peaks: jnp.maximum(peaks, x), full(-jnp.inf, CHUNK))
            best = spread(jnp.max(peaks, axis=1, keepdims=True))
            ratio = jnp.minimum(spread(self.min_p[...]), 1.0)
            min_p = jnp.where(ratio > 0, best + spread(self.temperature[...]) * jnp.log(ratio), -jnp.inf)
            kth = jax.lax.cond(limits & TOP_K > 0, lambda: self.kth(peaks, best), lambda: full(-jnp.inf))
            floor = jnp.maximum(kth, min_p)
            top_p = jax.lax.cond(limits & TOP_P > 0, lambda: self.top_p_threshold(floor, best), lambda: floor)
            self.out[...] = top_p[:, :1]

    def kth(self, peaks: jax.Array, best: jax.Array) -> jax.Array:
        """Return the k-th largest logit of each row [8, 128]; -inf without a limit. `peaks`: maxima of CHUNK groups."""
        k = spread(self.top_k[...])
        use_peaks = (k > 0) & (k <= CHUNK)
        kth_peak = search(
            lambda t: measure(lambda step, start: step(None, peaks, start), lambda _: full(1.0, CHUNK), t),
            ThresholdBracket(full(-jnp.inf), full(CHUNK), jnp.where(use_peaks, best, -jnp.inf), full(0.0)),
            jnp.where(use_peaks, k, 0.0),
            lambda low: full(1.0),
        )
        low = jnp.where(use_peaks, kth_peak, -jnp.inf)
        count = lambda t: measure(self.fold, lambda _: full(1.0, CHUNK), t)  # noqa: E731
        kept = jnp.minimum(count(low).mass, self.vocab)  # without the padding of the tail
        limited = k > 0
        threshold = search(
            count,
            ThresholdBracket(low, kept, jnp.where(limited, best, low), full(0.0)),
            jnp.where(limited, jnp.minimum(k, self.vocab), 0.0),
            lambda low: full(1.0),
        )
        return jnp.where(limited, threshold, -jnp.inf)

    def top_p_threshold(self, floor: jax.Array, best: jax.Array) -> jax.Array:
        """Return the largest threshold [8, 128] in [floor, best] that keeps top-p of the mass from `floor` on."""
        temperature = spread(self.temperature[...])
        share = spread(self.top_p[...])
        inverse = 1.0 / temperature

        def weigh(columns: Any, x: jax.Array, total: jax.Array) -> jax.Array:
            weight = jnp.where(x >= wide(floor), jnp.exp((x - wide(best)) * wide(inverse)), 0.0)
            self.weights[:, columns] = weight
            return total + weight

        mass = spread(jnp.sum(self.fold(weigh, full(0.0, CHUNK)), axis=1, keepdims=True))
        limited = share < 1
        target = jnp.where(limited, share * mass, 0.0)
        low = jnp.maximum(floor, best - UNDERFLOW * temperature)
        low = jnp.where(target <= 1, best, low)  # the weight of the best token is 1
        threshold = search(
            lambda t: measure(self.fold, lambda columns: self.weights[:, columns], t),
            ThresholdBracket(low, mass, jnp.where(limited, best, low), full(0.0)),
            target,
            lambda low: jnp.exp((low - best) * inverse),
        )
        return jnp.where(limited, threshold, floor)

    def fold(self, step: Step, start: Any) -> Any:
        """Run a step over all chunks of the row."""
        full_chunks = self.vocab // CHUNK

        def run_chunk(i: Any, carry: Any) -> Any:
            columns = pl.ds(pl.multiple_of(i * CHUNK, CHUNK), CHUNK)
            return step(columns, self.logits[:, columns], carry)

        def unrolled(i: Any, carry: Any) -> Any:
            for part in range(UNROLL):
                carry = run_chunk(i * UNROLL + part, carry)
            return carry

        carry = jax.lax.fori_loop(0, full_chunks // UNROLL, unrolled, start) if full_chunks >= UNROLL else start
        for i in range(full_chunks - full_chunks % UNROLL, full_chunks):
            carry = run_chunk(i, carry)
        if self.vocab % CHUNK:
            carry = step(pl.ds(full_chunks * CHUNK, CHUNK), self.tail[...], carry)
        return carry

    def copy_tail(self) -> None:
        """Copy the last partial chunk to `tail`."""
        if size := self.vocab % CHUNK:
            self.tail[...] = full(-jnp.inf, CHUNK)
            self.tail[:, :size] = self.logits[:, self.vocab - size :]


def search(
    measure: Callable[[jax.Array], Measured], start: ThresholdBracket, target: jax.Array, unit: Any
) -> jax.Array:
    """Return the largest threshold float32 [8, 128] that keeps `target`, or one just above the next smaller logit.

    unit: threshold -> lower bound on the weight of the smallest logit it keeps. A bracket with low = high is final.
    """

    def pending(state: tuple[jax.Array, ThresholdBracket]) -> jax.Array:
        number, bracket = state
        open_ = (bracket.low < bracket.high) & (bracket.mass - unit(bracket.low) >= target)
        return (number < MAX_PASSES) & (jnp.max(jnp.where(open_, 1.0, 0.0)) > 0)

    def narrow(state: tuple[jax.Array, ThresholdBracket]) -> tuple[jax.Array, ThresholdBracket]:
        number, (low, mass, high, over) = state
        t = guess(ThresholdBracket(low, mass, high, over), target, number)
        measured = measure(t)
        enough = measured.mass >= target
        return number + 1, ThresholdBracket(
            low=jnp.where(enough, measured.above, low),
            mass=jnp.where(enough, measured.mass, mass),
            high=jnp.where(enough, high, measured.below),
            over=jnp.where(enough, over, measured.mass),
        )

    return jax.lax.while_loop(pending, narrow, (jnp.int32(0), start))[1].low


def guess(bracket: ThresholdBracket, target: jax.Array, number: jax.Array) -> jax.Array:
    """Return a threshold in (low, high]: by an exponential tail, or, in every third pass, the midpoint."""
    low, mass, high, over = bracket
    top = jnp.maximum(over, 1.0)
    exponential = low + (high - low) * (jnp.log(mass / target) / jnp.log(mass / top))
    valid = (low > -jnp.inf) & (mass > top) & (jax.lax.rem(number, 3) != 2)
    a = ordered(low)
    b = ordered(high)
    middle = ordered((a & b) + ((a ^ b) >> 1), back=True)  # their mean, without overflow
    t = jnp.minimum(jnp.where(valid, exponential, middle), high)
    return jnp.where(t > low, t, high)


def measure(fold: Fold, weigh: Callable[[Any], jax.Array], t: jax.Array) -> Measured:
    """Run one pass: the weight kept by the threshold t [8, 128], and the logits adjacent to it."""
    threshold = wide(t)

    def step(columns: Any, x: jax.Array, carry: Measured) -> Measured:
        inside = x >= threshold
        return Measured(
            carry.mass + jnp.where(inside, weigh(columns), 0.0),
            jnp.minimum(carry.above, jnp.where(inside, x, jnp.inf)),
            jnp.maximum(carry.below, jnp.where(inside, -jnp.inf, x)),
        )

    total = fold(step, Measured(full(0.0, CHUNK), full(jnp.inf, CHUNK), full(-jnp.inf, CHUNK)))
    return Measured(
        spread(jnp.sum(total.mass, axis=1, keepdims=True)),
        spread(jnp.min(total.above, axis=1, keepdims=True)),
        spread(jnp.max(total.below, axis=1, keepdims=True)),
    )


def ordered(x: jax.Array, *, back: bool = False) -> jax.Array:
    """Map float32 to int32 in the same order; `back`: the inverse."""
    bits = x if back else jax.lax.bitcast_convert_type(x, jnp.int32)
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return jax.lax.bitcast_convert_type(bits, jnp.float32) if back else bits


def full(value: float, columns: int = LANES) -> jax.Array:
    """Return float32 [8, columns] filled with `value`."""
    return jnp.full((ROWS, columns), value, jnp.float32)


def spread(x: jax.Array) -> jax.Array:
    """Broadcast [8, 1] -> [8, 128]."""
    return jnp.broadcast_to(x, (ROWS, LANES))


def wide(x: jax.Array) -> jax.Array:
    """Repeat [8, 128] -> [8, CHUNK]."""
    return jnp.concatenate([x] * (CHUNK // LANES), axis=1)


def top_k_top_p_kernel(
    logits: jax.Array,
    temperature: jax.Array,
    top_k: jax.Array,
    top_p: jax.Array,
    min_p: jax.Array,
    *,
    interpret: Any,
    chip: ChipInfo,
) -> jax.Array:
    """Run the kernel. Arguments as `top_k_top_p`."""
    count, vocab = logits.shape
    vmem = 4 * ROWS * (3 * pl.cdiv(vocab, CHUNK) + 8) * CHUNK
    if vmem > chip.vmem_bytes:
        raise ValueError(
            f"{ROWS} rows of {vocab} logits take {vmem} bytes; a {chip.name} has {chip.vmem_bytes} of VMEM"
        )
    blocks = pl.cdiv(count, ROWS)
    params = [_column(x, fill, blocks) for x, fill in ((temperature, 1), (top_k, 0), (top_p, 1), (min_p, 0))]
    limits = TOP_K * _any(params[1] > 0) + TOP_P * _any(params[2] < 1) + MIN_P * _any(params[3] > 0)
    # A block without limits repeats the previous block index, so Pallas copies nothing for it.
    source = jax.lax.cummax(jnp.where(limits > 0, jnp.arange(blocks, dtype=jnp.int32), 0))
    column = pl.BlockSpec((ROWS, 1), lambda i, *_: (i, 0))
    columns = pl.cdiv(vocab, CHUNK) * CHUNK

    def body(
        limits: Any,
        _: Any,
        temperature: Any,
        top_k: Any,
        top_p: Any,
        min_p: Any,
        logits: Any,
        out: Any,
        weights: Any,
        tail: Any,
    ) -> None:
        ThresholdKernelBody(
            vocab=vocab,
            limits=limits,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            logits=logits,
            out=out,
            weights=weights,
            tail=tail,
        ).run()

    out = pl.pallas_call(
        body,
        out_shape=jax.ShapeDtypeStruct((blocks * ROWS, 1), jnp.float32),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(blocks,),
            in_specs=[*[column] * 4, pl.BlockSpec((ROWS, vocab), lambda i, _, source: (source[i], 0))],
            out_specs=column,
            scratch_shapes=[pltpu.VMEM((ROWS, columns), jnp.float32), pltpu.VMEM((ROWS, CHUNK), jnp.float32)],
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",), disable_bounds_checks=True, vmem_limit_bytes=vmem
        ),
        cost_estimate=pl.CostEstimate(  # FLOP: by its schedule, benchmarks/tpu/small_kernels.py
            flops=94 * logits.size, bytes_accessed=logits.size * 4, transcendentals=logits.size
        ),
        interpret=interpret,
        name="top_k_top_p",
    )(limits, source, *params, logits)
    return out[:count, 0]


def _column(x: jax.Array, fill: float, blocks: int) -> jax.Array:
    """Pad a parameter [R] with `fill` (no limit) -> float32 [blocks * ROWS, 1]."""
    x = x.astype(jnp.float32)
    return jnp.pad(x, (0, blocks * ROWS - x.shape[0]), constant_values=fill)[:, None]


def _any(rows: jax.Array) -> jax.Array:
    """Reduce bool [blocks * ROWS, 1] by `any` -> int32 [blocks]."""
    return rows.reshape(-1, ROWS).any(1).astype(jnp.int32)
