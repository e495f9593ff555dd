"""Indexers: projections to the keys and queries that select tokens, or blocks of them, to attend to.

Axis letters: T tokens, C keys, N heads of queries, H channels of a head, K KV heads, D width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from pagoda.backends.torch_decoder.functions import select, select_blocks
from pagoda.backends.torch_decoder.ops import Linear
from pagoda.backends.torch_decoder.packed import PackedPrompts
from pagoda.common.models.mixers import BlockIndexer, Indexer

_QUERIES: Final = 16
"""Queries whose products with all keys of an indexer, head by head, are in memory at a time."""

Rotate = Callable[[Tensor], Tensor]
"""[T, n, H] -> [T, n, H], rotated at the positions of the tokens."""


@dataclass(frozen=True, slots=True)
class IndexProjection:
    """One layer's projections to the keys and queries of an indexer."""

    q: Linear  # -> [T, N*H]
    k: Linear  # [T, D] -> [T, H]
    q_norm: Linear | None  # of rows [n, H]
    k_norm: Linear  # likewise
    heads: int

    def keys(self, x: Tensor, rotate: Rotate) -> Tensor:
        """X [T, D] -> keys [T, H]."""
        return rotate(self.k_norm(self.k(x))[:, None])[:, 0]

    def queries(self, x: Tensor, rotate: Rotate) -> Tensor:
        """Return queries [T, N, H] of what they are projected from, [T, D] or the low-rank queries [T, R]."""
        q = self.q(x)
        if self.q_norm is not None:
            q = self.q_norm(q.view(len(x) * self.heads, -1))
        return rotate(q.view(len(x), self.heads, -1))


@dataclass(frozen=True, slots=True)
class TokenSelector:
    """The indexer of latent attention."""

    spec: Indexer
    project: IndexProjection
    weights: Linear  # [T, D] -> [T, N]

    def queries(self, x: Tensor, low_rank: Tensor, rotate: Rotate) -> IndexQueries:
        """Return the queries of x [T, D], projected from its low-rank queries [T, R]."""
        heads = self.project.queries(low_rank, rotate)
        return IndexQueries(self.spec, heads.float(), self.weights(x).float())

    def packed_masks(self, x: Tensor, low_rank: Tensor, rotate: Rotate, batch: PackedPrompts) -> dict[int, Tensor]:
        """Return by length which tokens the tokens of each prompt attend to, bool [n, 1, length, length].

        It is the batch's `selection`, for layers that share it.
        """
        keys = self.project.keys(x, rotate)
        queries = self.queries(x, low_rank, rotate)
        masks = batch.selection
        masks.clear()  # Of an earlier indexer, which may select fewer tokens.
        for group in batch.groups:
            if group.length > self.spec.top_k:
                seen = torch.ones(group.length, group.length, dtype=torch.bool, device=x.device).tril()
                prompts = [queries.select(rows, keys[rows], seen) for rows in group.prompts]
                masks[group.length] = torch.stack(prompts)[:, None]
        return masks


@dataclass(frozen=True, slots=True)
class IndexQueries:
    """Queries of an indexer, which select the tokens to attend to."""

    spec: Indexer
    heads: Tensor  # float32 [T, N, H]
    weights: Tensor  # float32 [T, N]

    def select(self, rows: slice, keys: Tensor, seen: Tensor | None) -> Tensor:
        """Return which of the keys [C, H] the queries of `rows` attend to, bool [T, C].

        `seen`: bool [T, C]; None: every query sees all.
        """
        columns = keys.float().T
        heads = self.heads[rows]
        weights = self.weights[rows]
        selected = []
        for tile in (slice(start, start + _QUERIES) for start in range(0, len(heads), _QUERIES)):
            scores = torch.einsum("tn,tnc->tc", weights[tile], (heads[tile] @ columns).relu_())
            selected.append(select(scores, None if seen is None else seen[tile], self.spec.top_k))
        return torch.cat(selected)


@dataclass(frozen=True, slots=True)
class BlockSelector:
    """The indexer of attention to blocks, with a head of queries for each KV head."""

    spec: BlockIndexer
    project: IndexProjection

    def seen(self, queries: Tensor, keys: Tensor, context: int) -> Tensor:
        """Return which of the keys [C, H] the queries [T, K, H] from position `context` on attend to, [K, T, C]."""
        scores = torch.einsum("tkh,ch->ktc", queries.float(), keys.float())
        return select_blocks(scores, self.spec, context)

    def packed_masks(self, x: Tensor, rotate: Rotate, batch: PackedPrompts, repeats: int) -> dict[int, Tensor]:
        """Return by length which tokens the tokens of each prompt attend to, bool [n, N, length, length].

        `repeats`: query heads per KV head.
        """
        queries = self.project.queries(x, rotate)
        keys = self.project.keys(x, rotate)
        masks = {}
        for group in batch.groups:
            prompts = [self.seen(queries[rows], keys[rows], 0) for rows in group.prompts]
            masks[group.length] = torch.stack(prompts).repeat_interleave(repeats, 1)
        return masks
