"""Latent attention (MLA): the write of latents to the paged cache, and attention of few new tokens per sequence.

Decode attention is absorbed: queries are multiplied into the latent space, and all heads read the latents as they are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pagoda.backends.torch_cuda.kernels.attention.decode_attention import MAX_QUERY_LEN, decode_attention_reference
from pagoda.backends.torch_cuda.kernels.attention.latent_attention import kernel
from pagoda.backends.torch_cuda.kernels.attention.rope_cache import NormWeights, rotated
from pagoda.backends.torch_cuda.kernels.attention.shared import ScoreRules
from pagoda.backends.torch_cuda.kernels.attention.work_list import WorkList, fixed_work, pieces_for, pieces_of_each
from pagoda.backends.torch_cuda.kernels.frame.launch import Chip
from pagoda.backends.torch_decoder.functions import norm
from pagoda.common.models.primitives import Norm

__all__ = ["choose_latent_pieces", "even_latent_pieces", "latent_decode", "latent_selected", "write_latents"]

PROGRAMS = 1
"""Concurrent programs per multiprocessor."""


def write_latents(
    q: Tensor,
    latents: Tensor,
    positions: Tensor,
    slots: Tensor,
    cache: Tensor,
    cos_sin: Tensor,
    weights: NormWeights,
    *,
    use_kernel: bool,
) -> None:
    """Write normalised latents, each followed by its rotated rotary key, to the cache; rotate q in place.

    q [T, N, H], contiguous, whose last channels of a head are rotated; latents [T, R+D], any row stride: latent, rotary
    key. positions, slots int32 [T]; a slot is block * B + offset, slot 0 is padding's. cache [P, B, R+D], in q's type.
    cos_sin float32 [max_len, 2, D/2]: channels i and i + D/2 are rotated together. Raise ValueError for other shapes or
    types.
    """
    rotary = 2 * cos_sin.shape[2]
    rank = latents.shape[1] - rotary
    if latents.ndim != 2 or latents.stride(1) != 1 or weights.weight.shape != (rank,):
        raise ValueError(f"latents are {tuple(latents.shape)} with {tuple(weights.weight.shape)} weights of their norm")
    if not q.is_contiguous() or q.ndim != 3 or len(q) != len(latents) or q.shape[2] < rotary:
        raise ValueError(f"q is {tuple(q.shape)}, not contiguous [T, N, H]")
    if cache.ndim != 3 or cache.shape[2] != latents.shape[1] or not cache.is_contiguous() or cache.dtype != q.dtype:
        raise ValueError(f"the cache is {cache.dtype} {tuple(cache.shape)}, not {q.dtype} [P, B, {latents.shape[1]}]")
    for name, vector in (("positions", positions), ("slots", slots)):
        if vector.shape != latents.shape[:1] or vector.dtype != torch.int32:
            raise ValueError(f"{name} are {vector.dtype} {tuple(vector.shape)}, not int32 {tuple(latents.shape[:1])}")
    if use_kernel:
        kernel.write(q, latents, positions, slots, cache, cos_sin, weights)
        return
    latent, key = latents.split([rank, rotary], 1)
    normed = norm(latent, Norm(weights.eps, "rms", weights.unit_offset), weights.weight)
    row = torch.cat((normed, rotated(key[:, None], positions, cos_sin)[:, 0]), 1)
    cache[slots // cache.shape[1], slots % cache.shape[1]] = row
    q[..., -rotary:] = rotated(q[..., -rotary:], positions, cos_sin)


def latent_decode(
    absorbed: Tensor,
    q: Tensor,
    cache: Tensor,
    tables: Tensor,
    kv_lens: Tensor,
    *,
    query_len: int = 1,
    scale: float,
    work: WorkList | None = None,
    use_kernel: bool,
    chip: Chip,
) -> Tensor:
    """Return the attended latents [T, N, R], in q's type, of each token over its sequence up to itself.

    absorbed [T, N, R], any strides but the last: queries without RoPE, multiplied into the latent space. q [T, N, H],
    contiguous, its last D channels rotated. T = S * query_len: tokens of sequence s are s * query_len + j, at positions
    kv_lens[s] - query_len + j; query_len 1 to 8; rows of tokens at negative positions are finite. cache [P, B, R+D],
    B a power of two, these tokens included. tables int32 [S, W], kv_lens int32 [S]: read on the device; entries and
    slots that no token sees are not read. kv_len 0 is padding: zeros. `work`: the pieces that the sequences are cut
    into; without them a program reads a whole sequence. use_kernel False: plain torch, which does not need them. Raise
    ValueError for other shapes or types.
    """
    if not 1 <= query_len <= MAX_QUERY_LEN:
        raise ValueError(f"query_len is {query_len}, not 1 to {MAX_QUERY_LEN}")
    tokens, heads, rank = absorbed.shape
    if q.shape[:2] != (tokens, heads) or not q.is_contiguous() or absorbed.stride(2) != 1:
        raise ValueError(f"q is {tuple(q.shape)}, absorbed {tuple(absorbed.shape)} with strides {absorbed.stride()}")
    if tokens != len(kv_lens) * query_len or tables.shape[0] != len(kv_lens) or tables.stride(1) != 1:
        raise ValueError(f"{tokens} tokens, tables {tuple(tables.shape)} for {len(kv_lens)} sequences")
    if work is not None and len(work.merges) != len(kv_lens):
        raise ValueError(f"the work list has {len(work.merges)} sequences, kv_lens {len(kv_lens)}")
    if tables.dtype != torch.int32 or kv_lens.dtype != torch.int32 or not kv_lens.is_contiguous():
        raise ValueError(f"tables are {tables.dtype}, kv_lens {kv_lens.dtype}, not contiguous int32")
    page = cache.shape[1]
    rotary = cache.shape[2] - rank
    if not cache.is_contiguous() or cache.dtype != q.dtype or page & (page - 1) or not 0 < rotary <= q.shape[2]:
        raise ValueError(f"the cache is {cache.dtype} {tuple(cache.shape)} for {q.dtype} queries of rank {rank}")
    if use_kernel:
        return kernel.decode(absorbed, q, cache, tables, kv_lens, query_len, scale, chip, work=work)
    rules = ScoreRules(scale=scale, window=None, softcap=None, sinks=None, slopes=None, k_scale=None, v_scale=None)
    keys = cache[:, None]
    queries = torch.cat((absorbed, q[..., -rotary:]), -1)
    attended = decode_attention_reference(queries, keys, keys, tables, kv_lens, query_len, None, rules)
    return attended[..., :rank]


def latent_selected(
    absorbed: Tensor,
    q: Tensor,
    cache: Tensor,
    tables: Tensor,
    rows: Tensor,
    selected: Tensor,
    counts: Tensor,
    *,
    scale: float,
    work: WorkList | None = None,
    use_kernel: bool,
    chip: Chip,
) -> Tensor:
    """Return the attended latents [T, N, R] of each token over the positions selected for it.

    Token t attends to positions selected[t, : counts[t]] of sequence rows[t]; with count 0 it gets zeros. rows, counts
    int32 [T], selected int32 [T, n], contiguous; `work`: the pieces that these are cut into (`even_latent_pieces`); the
    rest as of `latent_decode`. Raise ValueError for other types.
    """
    if any(x.dtype != torch.int32 or not x.is_contiguous() for x in (rows, selected, counts)):
        raise ValueError("rows, selected and counts must be contiguous and int32")
    if use_kernel:
        return kernel.decode(
            absorbed, q, cache, tables, counts, 1, scale, chip, rows=rows, selected=selected, work=work
        )
    rank = absorbed.shape[2]
    page = cache.shape[1]
    queries = torch.cat((absorbed, q[..., rank - cache.shape[2] :]), -1).float()
    out = torch.zeros_like(absorbed, memory_format=torch.contiguous_format)
    for token, (row, count) in enumerate(zip(rows.tolist(), counts.tolist())):
        chosen = selected[token, :count].long()
        latents = cache[tables[row, chosen // page].long(), chosen % page].float()
        weights = (queries[token] @ latents.T * scale).softmax(-1)
        if count:
            out[token] = (weights @ latents[:, :rank]).to(out.dtype)
    return out


def choose_latent_pieces(seqs: int, heads: int, chip: Chip) -> int:
    """Return into how many pieces `seqs` sequences are cut together, see `work_list.pieces_for`."""
    return pieces_for(seqs, kernel.row_blocks(heads, chip), chip, PROGRAMS)


def even_latent_pieces(seqs: int, heads: int, longest: int, device: torch.device, chip: Chip) -> WorkList | None:
    """Return the work list of sequences that mostly have `longest` tokens; see `work_list.fixed_work`."""
    blocks = kernel.row_blocks(heads, chip)
    return fixed_work(seqs, longest, pieces_of_each(seqs, blocks, longest, chip, PROGRAMS), device)
