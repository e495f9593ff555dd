"""The Pallas kernel: eight rows of logits stay in VMEM while their thresholds are searched.

A threshold is searched between two logits: `low` leaves enough (tokens for top-k, mass for top-p), what is above `high`
does not. A pass measures what a guess between them leaves, and which logits lie next to the guess, so that `low` and
`high` are always logits of the row and ties cost nothing. Guesses follow an exponential tail, every third is the middle
of the two as ordered integers, which bounds the number of passes. Top-k starts from the k-th largest of the maxima of
1024 groups, of which at least k logits are not smaller: usually two or three passes remain.

Counts are summed as float32 (the vector unit has no integer reductions), exact below 2^24. HBM is read once.
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
"""Columns of one step of a pass, and groups whose maxima start the search for the k-th."""
UNROLL = 4
"""Steps per turn of the loop: a turn copies what it gathers, 24 registers."""
TURNS = 3 * 33
"""More than a search can take: its every third turn halves what was 2^32 values."""
NOTHING = 87.0
"""exp(-87) is about the smallest weight that float32 has: what weighs less adds nothing to a mass."""

TOP_K, TOP_P, MIN_P = 1, 2, 4
"""Bits of what a block of rows asks for."""


class ThresholdBracket(NamedTuple):
    """Where a threshold lies, float32 [8, 128] each, a row's value in all lanes: at `low` or above, at `high` or below.

    mass: what `low` leaves, enough; over: what lies above `high`, too little.
    """

    low: jax.Array
    mass: jax.Array
    high: jax.Array
    over: jax.Array


class Measured(NamedTuple):
    """What a threshold leaves, the smallest logit that it keeps and the largest that it does not; [8, 128] each."""

    mass: jax.Array
    above: jax.Array
    below: jax.Array


Step = Callable[[Any, jax.Array, Any], Any]
"""(columns of a chunk, its logits [8, CHUNK], what was gathered so far) -> what is gathered now."""
Fold = Callable[[Step, Any], Any]
"""Runs a step over all chunks from a first value on."""


@dataclass(frozen=True)
class ThresholdKernelBody:
    """The kernel over its references; `run` is one block of rows. The rules and the result are float32 [8, 1]."""

    vocab: int
    wants: Any  # [blocks] SMEM
    temperature: Any
    top_k: Any
    top_p: Any
    min_p: Any
    logits: Any  # [8, V]
    out: Any
    weights: Any  # [8, V rounded up to CHUNK]
    tail: Any  # [8, CHUNK]: the last columns, -inf behind them

    def run(self) -> None:
        """One block of rows."""
        wants = self.wants[pl.program_id(0)]
        self.out[...] = jnp.full_like(self.out, -jnp.inf)

        @pl.when(wants > 0)
        def _() -> None:
            self.copy_tail()
            peaks = self.fold(lambda _, x, peaks: jnp.maximum(peaks, x), full(-jnp.inf, CHUNK))
            best = spread(jnp.max(peaks, axis=1, keepdims=True))
            kth = jax.lax.cond(wants & TOP_K > 0, lambda: self.kth(peaks, best), lambda: full(-jnp.inf))
            floor = jax.lax.cond(wants & TOP_P > 0, lambda: self.reach(kth, best), lambda: kth)
            share = jnp.minimum(spread(self.min_p[...]), 1.0)
            least = jnp.where(share > 0, best + spread(self.temperature[...]) * jnp.log(share), -jnp.inf)
            self.out[...] = jnp.maximum(floor, least)[:, :1]

    def kth(self, peaks: jax.Array, best: jax.Array) -> jax.Array:
        """The k-th largest logit of each row [8, 128]; -inf where it keeps all. `peaks`: maxima of CHUNK groups."""
        wanted = spread(self.top_k[...])
        few = (wanted > 0) & (wanted <= CHUNK)
        among_peaks = search(
            lambda t: measure(lambda step, start: step(None, peaks, start), lambda _: full(1.0, CHUNK), t),
            ThresholdBracket(full(-jnp.inf), full(CHUNK), jnp.where(few, best, -jnp.inf), full(0.0)),
            jnp.where(few, wanted, 0.0),
            lambda low: full(1.0),
        )
        low = jnp.where(few, among_peaks, -jnp.inf)
        count = lambda t: measure(self.fold, lambda _: full(1.0, CHUNK), t)  # noqa: E731
        left = jnp.minimum(count(low).mass, self.vocab)  # what pads the tail is no token
        limited = wanted > 0
        found = search(
            count,
            ThresholdBracket(low, left, jnp.where(limited, best, low), full(0.0)),
            jnp.where(limited, jnp.minimum(wanted, self.vocab), 0.0),
            lambda low: full(1.0),
        )
        return jnp.where(limited, found, -jnp.inf)

    def reach(self, kth: jax.Array, best: jax.Array) -> jax.Array:
        """The largest threshold [8, 128] from `kth` on that leaves top-p of the mass, at most the best logit."""
        hot, share = spread(self.temperature[...]), spread(self.top_p[...])
        cold = 1.0 / hot

        def weigh(at: Any, x: jax.Array, total: jax.Array) -> jax.Array:
            weight = jnp.where(x >= wide(kth), jnp.exp((x - wide(best)) * wide(cold)), 0.0)
            self.weights[:, at] = weight
            return total + weight

        mass = spread(jnp.sum(self.fold(weigh, full(0.0, CHUNK)), axis=1, keepdims=True))
        limited = share < 1
        target = jnp.where(limited, share * mass, 0.0)
        low = jnp.maximum(kth, best - NOTHING * hot)
        low = jnp.where(target <= 1, best, low)  # the best token's own weight is 1
        found = search(
            lambda t: measure(self.fold, lambda at: self.weights[:, at], t),
            ThresholdBracket(low, mass, jnp.where(limited, best, low), full(0.0)),
            target,
            lambda low: jnp.exp((low - best) * cold),
        )
        return jnp.where(limited, found, kth)

    def fold(self, step: Step, start: Any) -> Any:
        """A pass over the row, chunk by chunk."""
        whole = self.vocab // CHUNK

        def chunk(i: Any, so_far: Any) -> Any:
            at = pl.ds(pl.multiple_of(i * CHUNK, CHUNK), CHUNK)
            return step(at, self.logits[:, at], so_far)

        def several(i: Any, so_far: Any) -> Any:
            for part in range(UNROLL):
                so_far = chunk(i * UNROLL + part, so_far)
            return so_far

        so_far = jax.lax.fori_loop(0, whole // UNROLL, several, start) if whole >= UNROLL else start
        for i in range(whole - whole % UNROLL, whole):
            so_far = chunk(i, so_far)
        if self.vocab % CHUNK:
            so_far = step(pl.ds(whole * CHUNK, CHUNK), self.tail[...], so_far)
        return so_far

    def copy_tail(self) -> None:
        """Fills `tail`."""
        if rest := self.vocab % CHUNK:
            self.tail[...] = full(-jnp.inf, CHUNK)
            self.tail[:, :rest] = self.logits[:, self.vocab - rest :]


def search(
    measure: Callable[[jax.Array], Measured], start: ThresholdBracket, target: jax.Array, unit: Any
) -> jax.Array:
    """The largest threshold float32 [8, 128] that leaves `target`, or one between it and the next smaller logit.

    unit: threshold -> the least that the smallest logit kept by it weighs. A bracket with low = high is settled.
    """

    def pending(state: tuple[jax.Array, ThresholdBracket]) -> jax.Array:
        turn, bracket = state
        open_ = (bracket.low < bracket.high) & (bracket.mass - unit(bracket.low) >= target)
        return (turn < TURNS) & (jnp.max(jnp.where(open_, 1.0, 0.0)) > 0)

    def narrow(state: tuple[jax.Array, ThresholdBracket]) -> tuple[jax.Array, ThresholdBracket]:
        turn, (low, mass, high, over) = state
        t = guess(ThresholdBracket(low, mass, high, over), target, turn)
        found = measure(t)
        enough = found.mass >= target
        return turn + 1, ThresholdBracket(
            low=jnp.where(enough, found.above, low),
            mass=jnp.where(enough, found.mass, mass),
            high=jnp.where(enough, high, found.below),
            over=jnp.where(enough, over, found.mass),
        )

    return jax.lax.while_loop(pending, narrow, (jnp.int32(0), start))[1].low


def guess(bracket: ThresholdBracket, target: jax.Array, turn: jax.Array) -> jax.Array:
    """A threshold in (low, high]: where an exponential tail has `target` left, or, every third turn, the middle."""
    low, mass, high, over = bracket
    top = jnp.maximum(over, 1.0)
    straight = low + (high - low) * (jnp.log(mass / target) / jnp.log(mass / top))
    known = (low > -jnp.inf) & (mass > top) & (jax.lax.rem(turn, 3) != 2)
    a, b = ordered(low), ordered(high)
    middle = ordered((a & b) + ((a ^ b) >> 1), back=True)  # their mean, without overflow
    t = jnp.minimum(jnp.where(known, straight, middle), high)
    return jnp.where(t > low, t, high)


def measure(fold: Fold, weigh: Callable[[Any], jax.Array], t: jax.Array) -> Measured:
    """One pass: what the threshold t [8, 128] leaves of the weights, and the logits next to it."""
    floor = wide(t)

    def step(at: Any, x: jax.Array, so_far: Measured) -> Measured:
        inside = x >= floor
        return Measured(
            so_far.mass + jnp.where(inside, weigh(at), 0.0),
            jnp.minimum(so_far.above, jnp.where(inside, x, jnp.inf)),
            jnp.maximum(so_far.below, jnp.where(inside, -jnp.inf, x)),
        )

    found = fold(step, Measured(full(0.0, CHUNK), full(jnp.inf, CHUNK), full(-jnp.inf, CHUNK)))
    return Measured(
        spread(jnp.sum(found.mass, axis=1, keepdims=True)),
        spread(jnp.min(found.above, axis=1, keepdims=True)),
        spread(jnp.max(found.below, axis=1, keepdims=True)),
    )


def ordered(x: jax.Array, *, back: bool = False) -> jax.Array:
    """int32 in the order of the float32 values; `back`: the float32 of such an integer."""
    bits = x if back else jax.lax.bitcast_convert_type(x, jnp.int32)
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return jax.lax.bitcast_convert_type(bits, jnp.float32) if back else bits


def full(value: float, columns: int = LANES) -> jax.Array:
    """float32 [8, columns] of one value."""
    return jnp.full((ROWS, columns), value, jnp.float32)


def spread(x: jax.Array) -> jax.Array:
    """[8, 1] -> [8, 128]."""
    return jnp.broadcast_to(x, (ROWS, LANES))


def wide(x: jax.Array) -> jax.Array:
    """[8, 128] -> [8, CHUNK]."""
    return jnp.concatenate([x] * (CHUNK // LANES), axis=1)


def kernel(
    logits: jax.Array,
    temperature: jax.Array,
    top_k: jax.Array,
    top_p: jax.Array,
    min_p: jax.Array,
    *,
    interpret: Any,
    chip: ChipInfo,
) -> jax.Array:
    """As `api.top_k_top_p`: logits [R, V], temperature, top_k, top_p, min_p [R] -> float32 [R]."""
    count, vocab = logits.shape
    room = 4 * ROWS * (3 * pl.cdiv(vocab, CHUNK) + 8) * CHUNK
    if room > chip.vmem_bytes:
        raise ValueError(
            f"{ROWS} rows of {vocab} logits take {room} bytes; a {chip.name} has {chip.vmem_bytes} of VMEM"
        )
    blocks = pl.cdiv(count, ROWS)
    rules = [_column(x, blank, blocks) for x, blank in ((temperature, 1), (top_k, 0), (top_p, 1), (min_p, 0))]
    wants = TOP_K * _any(rules[1] > 0) + TOP_P * _any(rules[2] < 1) + MIN_P * _any(rules[3] > 0)
    # A block that wants nothing names the logits that are there already: Pallas copies nothing for it.
    source = jax.lax.cummax(jnp.where(wants > 0, jnp.arange(blocks, dtype=jnp.int32), 0))
    rule = pl.BlockSpec((ROWS, 1), lambda i, *_: (i, 0))
    columns = pl.cdiv(vocab, CHUNK) * CHUNK
    out = pl.pallas_call(
        lambda wants, _, *refs: ThresholdKernelBody(vocab, wants, *refs).run(),
        out_shape=jax.ShapeDtypeStruct((blocks * ROWS, 1), jnp.float32),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(blocks,),
            in_specs=[*[rule] * 4, pl.BlockSpec((ROWS, vocab), lambda i, _, source: (source[i], 0))],
            out_specs=rule,
            scratch_shapes=[pltpu.VMEM((ROWS, columns), jnp.float32), pltpu.VMEM((ROWS, CHUNK), jnp.float32)],
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",), disable_bounds_checks=True, vmem_limit_bytes=room
        ),
        cost_estimate=pl.CostEstimate(
            flops=64 * logits.size, bytes_accessed=logits.size * 4, transcendentals=logits.size
        ),
        interpret=interpret,
        name="top_k_top_p",
    )(wants, source, *rules, logits)
    return out[:count, 0]


def _column(x: jax.Array, blank: float, blocks: int) -> jax.Array:
    """A rule [R] as float32 [blocks * ROWS, 1]; rows that fill the last block have no limit."""
    x = x.astype(jnp.float32)
    return jnp.pad(x, (0, blocks * ROWS - x.shape[0]), constant_values=blank)[:, None]


def _any(rows: jax.Array) -> jax.Array:
    """bool [blocks * ROWS, 1] -> int32 [blocks]."""
    return rows.reshape(-1, ROWS).any(1).astype(jnp.int32)
