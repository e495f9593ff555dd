"""What a mixer computes and reads beside its parameters: the part of a layer's cost that depends on its kind."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MixerWork:
    """FLOP of one layer's mixer without its linear layers, and the cached elements that it reads.

    A pair is a query and a token that it attends to. A multiplication and an addition are two FLOP. Recurrent state,
    which a step reads and writes once per sequence, is that of the mixer's `StateCache`.
    """

    pair_flops: int = 0  # per pair, of sequences with one token
    prefill_pair_flops: int = 0  # per pair, of sequences with several tokens, where another formula is cheaper
    read_elements: int = 0  # of the cache, per attended token and sequence
    kv_heads: int = 1  # that the read elements are divided among: more ranks than these hold copies
    span: int | None = None  # tokens that a query attends to at most; None: all before it
    scan_flops: int = 0  # per query and token before it, attended or not: scores by which tokens are selected
    scan_elements: int = 0  # of the cache, per token of the context: what is scored
    token_flops: int = 0  # per token, in float32: a recurrence
