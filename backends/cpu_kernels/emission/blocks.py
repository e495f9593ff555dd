"""Blocks of products that stay in registers: rows of scalars times vectors, summed over steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from pagoda.backends.cpu_kernels.emission.emit import F32, I16, Emitter


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """How numbers are multiplied and summed: one or two of them in a step."""

    width: int
    """Numbers of a row that a step takes."""

    kind: Any
    """LLVM's type of the numbers of rows."""

    splat: Callable[[Emitter, Any, Any], Any]
    """(emitter, array, index) -> vector of copies of a row's numbers from an element on, for one step."""

    load: Callable[[Emitter, Any, Any], Any]
    """(emitter, array, index) -> vector of what they are multiplied with."""

    load_row: Callable[[Emitter, Any, Any], Any]
    """(emitter, array, index) -> a row's numbers for 16 steps, a lane each, from an array as the cache has it."""

    add: Callable[[Emitter, Any, Any, Any], None]
    """(emitter, into, a, b): add products to a vector variable of float32."""

    exponential: Callable[[Emitter, Any], Any]
    """(emitter, x) -> base ** x, of softmaxes"""

    log_e: float
    """Logarithm of e to that base."""


FLOATS: Final = Arithmetic(
    width=1,
    kind=F32,
    splat=Emitter.splat_one,
    load=Emitter.load,
    load_row=Emitter.load,
    add=Emitter.add_product,
    exponential=Emitter.exp,
    log_e=1.0,
)
"""float32 numbers, one in a step."""

PAIRS: Final = Arithmetic(
    width=2,
    kind=I16,
    splat=Emitter.splat_pair,
    load=Emitter.load_pairs,
    load_row=Emitter.load_words,
    add=Emitter.add_products,
    exponential=Emitter.exp2,
    log_e=math.log2(math.e),
)
"""Pairs of bfloat16 numbers, by AVX512-BF16."""


def add_block(
    e: Emitter,
    arithmetic: Arithmetic,
    sums: Sequence[Sequence[Any]],
    steps: Any,
    rows: Any,
    starts: Sequence[Any],
    vectors: Callable[[Any], Sequence[Any]],
) -> None:
    """Add the products of all steps to `sums`, variables [row][vector].

    A row's numbers are in the array `rows`, from its element of `starts` on. `vectors` returns those of a step.
    """
    with e.loop(0, steps) as step:
        factors = vectors(step)
        for start, of_row in zip(starts, sums):
            number = arithmetic.splat(e, rows, e.add(start, e.mul(step, arithmetic.width)))
            for into, factor in zip(of_row, factors):
                arithmetic.add(e, into, number, factor)
