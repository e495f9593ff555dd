"""How many programs share a sequence: fixed when a graph is captured, before any length is known."""

from __future__ import annotations

from pagoda.backends.torch_cuda.kernels.chips import Chip

PROGRAMS = 3
"""Programs that a multiprocessor runs at a time with the settings for one token and heads of up to 128."""

LEAST_TOKENS = 64
"""A split of fewer tokens costs more than it hides."""

LEAST_WAVES = 2
"""So that programs of short sequences make room for those of long ones. One sequence alone is shared out evenly."""

MOST_WAVES = 8
"""With more programs than that neither a wave that is not full nor one long sequence among short ones weighs much."""

ENOUGH = 0.95
"""Of the best filling of the chip: among such the fewest splits are taken."""


def choose_splits(seqs: int, kv_heads: int, max_len: int, chip: Chip) -> int:
    """Splits for so many sequences of at most max_len tokens: the last wave of programs fills the chip too.

    Lengths differ and change, splits do not: a sequence that is shorter leaves splits empty, which end at once.
    """
    slots, pairs = PROGRAMS * chip.sms, seqs * kv_heads
    most = max(1, min(-(-max_len // LEAST_TOKENS), MOST_WAVES * slots // pairs))
    least = max(1, min(most, min(seqs, LEAST_WAVES) * slots // pairs))

    def filled(splits: int) -> float:
        programs = pairs * splits
        return programs / (-(-programs // slots) * slots)

    best = max(map(filled, range(least, most + 1)))
    return next(splits for splits in range(least, most + 1) if filled(splits) >= ENOUGH * best)
