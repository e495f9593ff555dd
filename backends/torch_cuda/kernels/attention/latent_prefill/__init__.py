"""Latent attention (MLA) of many new tokens per sequence: cached latents are expanded to keys and values of all heads.

Expanded keys and values are temporary. So that they fit a bounded space, the tokens of a step's sequences are taken in
rounds of at most `capacity` tokens; a sequence that needs several rounds keeps its online softmax in between.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from pagoda.backends.torch_cuda.kernels.attention.latent_prefill import kernel
from pagoda.backends.torch_cuda.kernels.attention.latent_prefill.kernel import BLOCK, query_tile
from pagoda.backends.torch_cuda.kernels.attention.prefill_attention import gather, visible
from pagoda.backends.torch_cuda.kernels.frame.launch import Chip

__all__ = ["BLOCK", "ExpansionRound", "latent_prefill", "plan_rounds", "query_tile", "round_capacity"]

Int32 = npt.NDArray[np.int32]

WORKSPACE: int = 256 << 20
"""Bytes of expanded keys and values of a round, unless a step's tokens need less."""


@dataclass(frozen=True, slots=True)
class ExpansionRound:
    """Cached tokens that are expanded together, in blocks of BLOCK tokens of a sequence each; block b has rows from
    b * BLOCK on.
    """

    blocks: Tensor  # int32 [n, 2]: sequence, position of the first token
    spans: Tensor  # int32 [S, 3]: first position, end position and first row of each sequence; equal positions: none


def round_capacity(row_bytes: int, step_tokens: int) -> int:
    """Return the tokens of a round: as fit WORKSPACE, but no more than the largest step has, and at least a block.

    `row_bytes`: of the keys and values of a token.
    """
    tokens = min(WORKSPACE // row_bytes, step_tokens)
    return max(tokens // BLOCK, 1) * BLOCK


def plan_rounds(kv_lens: Int32, first_sequence: int, capacity: int) -> list[tuple[Int32, Int32]]:
    """Return (blocks, spans) of each round for the sequences from `first_sequence` on; see ExpansionRound.

    kv_lens int32 [S]: upper bounds, new tokens included. capacity: tokens per round, a multiple of BLOCK.
    """
    most = capacity // BLOCK
    rounds = []
    blocks: list[Int32] = []
    spans = np.zeros((len(kv_lens), 3), np.int32)
    used = 0
    for sequence in range(first_sequence, len(kv_lens)):
        begin = 0
        end = int(kv_lens[sequence])
        while begin < end:
            count = min(-(-(end - begin) // BLOCK), most - used)
            stop = min(begin + count * BLOCK, end)
            firsts = np.arange(begin, stop, BLOCK, dtype=np.int32)
            blocks.append(np.stack([np.full_like(firsts, sequence), firsts], 1))
            spans[sequence] = begin, stop, used * BLOCK
            begin = stop
            used = used + count
            if used == most:
                rounds.append((np.concatenate(blocks), spans))
                blocks = []
                spans = np.zeros_like(spans)
                used = 0
    if used:
        rounds.append((np.concatenate(blocks), spans))
    return rounds


def latent_prefill(
    q: Tensor,
    cache: Tensor,
    kv_b: Tensor,
    tables: Tensor,
    query_start: Tensor,
    kv_lens: Tensor,
    tiles: Tensor,
    rounds: tuple[ExpansionRound, ...],
    *,
    nope_dim: int,
    scale: float,
    out: Tensor,
    tile: int,
    use_kernel: bool,
    chip: Chip,
) -> Tensor:
    """Return `out` [T, N, V] with the attention of the sequences that have tiles; other rows are unchanged.

    q [T, N, H], contiguous: nope_dim channels, then D rotated ones. cache [P, B, R+D]: latents, each followed by its
    rotary key, those of q's tokens included. kv_b [N * (nope_dim + V), R]: a latent's keys and values of each head.
    Token j of sequence s is q[query_start[s] + j], at position kv_lens[s] - (its query tokens) + j. tables int32
    [S, W], query_start int32 [S+1], kv_lens int32 [S]. tiles int32 [n, 2]: from `make_tiles` for `tile` tokens. rounds:
    of `plan_rounds` for these sequences. Raise ValueError for other shapes or types.
    """
    heads = q.shape[1]
    rank = kv_b.shape[1]
    rotary = q.shape[2] - nope_dim
    values = kv_b.shape[0] // heads - nope_dim
    if not (q.is_contiguous() and cache.is_contiguous() and kv_b.is_contiguous()) or cache.dtype != q.dtype:
        raise ValueError("q, cache and kv_b must be contiguous, and of one type")
    if cache.shape[2] != rank + rotary or kv_b.shape[0] % heads or cache.shape[1] & (cache.shape[1] - 1):
        raise ValueError(f"the cache is {tuple(cache.shape)}, kv_b {tuple(kv_b.shape)} for q {tuple(q.shape)}")
    if out.shape != (len(q), heads, values) or not out.is_contiguous():
        raise ValueError(f"out is {tuple(out.shape)}, not contiguous {(len(q), heads, values)}")
    if use_kernel:
        kernel.launch(q, cache, kv_b, tables, query_start, kv_lens, tiles, rounds, nope_dim, scale, out, tile, chip)
        return out
    starts = query_start.tolist()
    lens = kv_lens.tolist()
    for s in sorted(set(tiles[:, 0].tolist())):
        tokens = slice(starts[s], starts[s + 1])
        end = lens[s]
        context = end - (tokens.stop - tokens.start)
        rows = gather(cache[:, None], tables[s], 0, end)[0]  # [C, R+D]
        expanded = F.linear(rows[:, :rank], kv_b).view(end, heads, -1)
        shared = rows[:, None, rank:].expand(-1, heads, -1)
        k = torch.cat((expanded[..., :nope_dim], shared), -1)
        v = expanded[..., nope_dim:]
        seen = visible(context, end, 0, None, q.device)
        queries, keys, parts = (part.transpose(0, 1)[None] for part in (q[tokens], k, v))
        mixed = F.scaled_dot_product_attention(
            queries, keys, parts, attn_mask=seen, is_causal=seen is None, scale=scale
        )
        out[tokens] = mixed[0].transpose(0, 1)
    return out
