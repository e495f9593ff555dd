"""What one step reads, as tensors on the device."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from pagoda.backends.reference.batch import Embedded


@dataclass(frozen=True, slots=True)
class GroupBatch:
    """What layers of one KV group need. `tables`: block ids of each sequence; `slots`: where each token's K, V go.

    A slot is block * page size + offset; a token of padding has slot 0, in the block that nobody reads.
    """

    tables: Tensor  # int32 [S, W]
    slots: Tensor  # int32 [T]


@dataclass(frozen=True, slots=True)
class Batch:
    """One step of S sequences with T tokens in all, those of the first `num_decodes` sequences `query_len` each.

    A sequence of padding has kv_len 0. Token j of a sequence stands at position kv_len - its query tokens + j.
    Sequences from `num_decodes` on are cut into `tiles` of `tile` tokens (see prefill_attention.make_tiles); None where
    there are none.
    """

    token_ids: Tensor  # int32 or int64 [T], known: no PREVIOUS among them
    positions: Tensor  # int32 [T]
    query_start: Tensor  # int32 [S+1]
    kv_lens: Tensor  # int32 [S], the step's own tokens included
    groups: tuple[GroupBatch, ...]  # one per group of the KV layout
    num_decodes: int
    tiles: Tensor | None  # int32 [n, 2]
    splits: int  # in how many parts decode attention reads a sequence
    query_len: int = 1
    tile: int | None = None  # None: what suits each layer best, the same for all
    embedded: Embedded | None = None  # embeddings of a prompt; None: every token is looked up
