"""What a mixer computes and reads beside its parameters: the part of a layer's cost that depends on its kind."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MixerWork:
    """FLOP of one layer's mixer without its linear layers, and the cached elements that it reads.

    A pair is a query and a token that it attends to. A multiplication and an addition are two FLOP. Recurrent state,
    which a step reads and writes once per sequence, is that of the mixer's `StateCache`.
    """

    pair_flops: int = 0  # FLOP per pair of query and token, of sequences with one token.
    prefill_pair_flops: int = 0  # FLOP per pair, of sequences with several tokens, where another formula is cheaper.
    read_elements: int = 0  # Elements that are read of the cache, per attended token and sequence.
    kv_heads: int = 1  # Heads that share the read elements: on more ranks than these some hold copies.
    span: int | None = None  # Maximum number of tokens that a query attends to; None: all before it.
    scan_flops: int = 0  # FLOP per query and token before it, attended or not: scores that select tokens.
    scan_elements: int = 0  # Elements of the cache that are scored, per token of the context.
    token_flops: int = 0  # FLOP of a recurrence in float32, per token.
