"""Attention of sequences with few new tokens each over a paged KV cache, long sequences cut into several pieces."""

from __future__ import annotations

import torch
from torch import Tensor

from pagoda.backends.torch_cuda.kernels.attention.decode_attention import kernel
from pagoda.backends.torch_cuda.kernels.attention.shared import ScoreRules
from pagoda.backends.torch_cuda.kernels.attention.work_list import WorkList, fixed_work, pieces_for, pieces_of_each
from pagoda.backends.torch_cuda.kernels.frame.launch import Chip
from pagoda.backends.torch_decoder.functions import softcap as capped

__all__ = ["PagedDecode", "choose_pieces", "decode_attention", "even_pieces"]

MAX_QUERY_LEN = 8
PROGRAMS = 3
"""Concurrent programs per multiprocessor with the settings for one token and heads of up to 128."""


class PagedDecode:
    """Attention of sequences with `query_len` new tokens each, 1 to 8, over one cache.

    keys [P, K, B, H] and values [P, K, B, V], each page contiguous, B a power of two; in the queries' type `dtype`, or
    float8_e4m3fn scaled by `rules.k_scale` and `v_scale`. `group`: query heads per KV head; head n reads KV head n //
    group. Cache, sinks, slopes and scales stay where they are. Raise ValueError for other shapes or types.
    """

    def __init__(
        self,
        keys: Tensor,
        values: Tensor,
        rules: ScoreRules,
        *,
        dtype: torch.dtype,
        group: int,
        query_len: int = 1,
        use_kernel: bool,
        chip: Chip,
        chosen: kernel.DecodeBlockSizes | None = None,
    ) -> None:
        """`chosen`: block sizes on trial."""
        _check_caches(keys, values)
        if not 1 <= query_len <= MAX_QUERY_LEN:
            raise ValueError(f"query_len is {query_len}, not 1 to {MAX_QUERY_LEN}")
        heads = group * keys.shape[1]
        if rules.sinks is not None and rules.sinks.shape != (heads,):
            raise ValueError(f"sinks have shape {tuple(rules.sinks.shape)}, not one per head")
        self.keys = keys
        self.values = values
        self.rules = rules
        self._query_len = query_len
        self._shape = heads, keys.shape[3]
        self._launch: kernel.DecodeLaunch | None = None
        if use_kernel:
            self._launch = kernel.DecodeLaunch(keys, values, rules, dtype, group, query_len, chip, chosen)

    def __call__(
        self,
        q: Tensor,
        tables: Tensor,
        kv_lens: Tensor,
        out: Tensor,
        *,
        query_counts: Tensor | None = None,
        work: WorkList | None = None,
    ) -> Tensor:
        """Write the attention of each token to its sequence up to itself to `out` [T, N, V], contiguous; return it.

        q [T, N, H], T = S * query_len: tokens of sequence s are s * query_len + j, at positions kv_lens[s] - query_len
        + j, whose K and V are in the cache already. query_counts int32 [S]: how many of a sequence's tokens, the last
        ones, are not padding (default: all); what only padding would see is not read, and its rows are finite. tables
        int32 [S, W], kv_lens int32 [S], at most W * B: read on the device; table entries and cache slots that no token
        sees are not read. kv_len 0 is padding: zeros. `work`: the pieces that the sequences are cut into, which plain
        torch does not need; without them a program reads a whole sequence. Raise ValueError for other shapes or types.
        """
        seqs = kv_lens.shape[0]
        if q.shape != (seqs * self._query_len, *self._shape) or tables.shape[0] != seqs:
            shapes = f"q is {tuple(q.shape)}, tables {tuple(tables.shape)}"
            raise ValueError(f"{shapes}, not {self._query_len} tokens as wide as keys and a row for each of {seqs}")
        if not (q.is_contiguous() and out.is_contiguous() and kv_lens.is_contiguous() and tables.stride(1) == 1):
            raise ValueError("q, out, a row of tables and kv_lens must be contiguous")
        if tables.dtype != torch.int32 or kv_lens.dtype != torch.int32:
            raise ValueError(f"tables are {tables.dtype}, kv_lens {kv_lens.dtype}, not int32")
        if work is not None and work.merges.shape[0] != seqs:
            raise ValueError(f"the work list has {len(work.merges)} sequences, kv_lens {seqs}")
        if self._launch is None:
            arrays = q, self.keys, self.values, tables, kv_lens, self._query_len, query_counts, self.rules
            return out.copy_(decode_attention_reference(*arrays))
        self._launch(q, tables, kv_lens, query_counts, work, out)
        return out


def decode_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    kv_lens: Tensor,
    *,
    query_len: int = 1,
    query_counts: Tensor | None = None,
    scale: float,
    window: int | None = None,
    chunk: int | None = None,
    lookback: int = 0,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    slopes: Tensor | None = None,
    root: bool = False,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    work: WorkList | None = None,
    use_kernel: bool,
    chip: Chip,
) -> Tensor:
    """Return the attention [T, N, V] of q [T, N, H] by `PagedDecode` over a cache used once; see `ScoreRules`."""
    if q.shape[1] % keys.shape[1]:
        raise ValueError(f"{q.shape[1]} heads do not share {keys.shape[1]} KV heads evenly")
    attend = PagedDecode(
        keys,
        values,
        ScoreRules(scale, window, softcap, sinks, slopes, k_scale, v_scale, chunk, lookback, root),
        dtype=q.dtype,
        group=q.shape[1] // keys.shape[1],
        query_len=query_len,
        use_kernel=use_kernel,
        chip=chip,
    )
    out = q.new_empty(*q.shape[:2], values.shape[3])
    return attend(q, tables, kv_lens, out, query_counts=query_counts, work=work)


def _check_caches(keys: Tensor, values: Tensor) -> None:
    page = keys.shape[2]
    if keys.shape[:-1] != values.shape[:-1] or keys.dtype != values.dtype:
        raise ValueError(f"keys {keys.dtype} {tuple(keys.shape)}, values {values.dtype} {tuple(values.shape)}")
    if any(x.stride()[1:] != (page * x.shape[3], x.shape[3], 1) for x in (keys, values)):
        raise ValueError(f"keys have strides {keys.stride()}, values {values.stride()}: pages are not contiguous")
    if page & (page - 1):
        raise ValueError(f"pages have {page} tokens, not a power of two")


def choose_pieces(seqs: int, kv_heads: int, chip: Chip) -> int:
    """Return into how many pieces `seqs` sequences are cut together, see `work_list.pieces_for`."""
    return pieces_for(seqs, kv_heads, chip, PROGRAMS)


def even_pieces(seqs: int, kv_heads: int, longest: int, device: torch.device, chip: Chip) -> WorkList | None:
    """Return the work list of sequences that mostly have `longest` tokens; see `work_list.fixed_work`."""
    return fixed_work(seqs, longest, pieces_of_each(seqs, kv_heads, longest, chip, PROGRAMS), device)


def decode_attention_reference(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    kv_lens: Tensor,
    query_len: int,
    query_counts: Tensor | None,
    rules: ScoreRules,
) -> Tensor:
    """Return [S * query_len, N, V], computed in float32, or in float64 if q is. Keys may be of another type."""
    tokens, heads, dim = q.shape
    kv_heads = keys.shape[1]
    wide = torch.promote_types(q.dtype, torch.float32)
    if not len(kv_lens):
        return q.new_empty(0, heads, values.shape[3])
    seen, slots = _seen(tables, kv_lens, query_len, query_counts, rules, keys.shape[2])
    k = _gather(keys, slots, rules.k_scale, wide)  # [S, K, C, H]
    v = _gather(values, slots, rules.v_scale, wide).masked_fill(~seen.any(1)[:, None, :, None], 0)
    rows = q.to(wide).view(-1, query_len, kv_heads, heads // kv_heads, dim).transpose(1, 2).flatten(2, 3)
    scores = torch.matmul(rows, k.transpose(-1, -2)) * rules.scale
    if rules.softcap is not None:
        scores = capped(scores, rules.softcap)
    scores = scores.unflatten(2, (query_len, -1))
    if rules.slopes is not None:
        last = kv_lens[:, None] - query_len + torch.arange(query_len, device=kv_lens.device)  # [S, query_len]
        behind = last[..., None] - torch.arange(scores.shape[-1], device=kv_lens.device)
        distance = behind.clamp(min=0).to(wide).sqrt() if rules.root else behind
        scores = scores - rules.slopes.to(wide).view(kv_heads, 1, -1, 1) * distance[:, None, :, None]
    scores = scores.masked_fill(~seen[:, None, :, None], float("-inf"))
    weights = _softmax(scores, rules.sinks).flatten(2, 3)  # [S, K, query_len * N/K, C]
    out = torch.matmul(weights, v).unflatten(2, (query_len, -1)).transpose(1, 2).reshape(tokens, heads, -1)
    return out.masked_fill(~seen.any(-1).view(-1, 1, 1), 0).to(q.dtype)


def _seen(
    tables: Tensor, kv_lens: Tensor, query_len: int, query_counts: Tensor | None, rules: ScoreRules, page_size: int
) -> tuple[Tensor, Tensor]:
    """Return which of positions 0..C each token sees, bool [S, query_len, C], and their cache slots, int64 [S, C].

    C is the maximum length. Positions that no token sees get the cache's first slot.
    """
    positions = torch.arange(max(int(kv_lens.max()), 1), device=kv_lens.device)
    last = kv_lens[:, None] - query_len + torch.arange(query_len, device=kv_lens.device)
    seen = positions <= last[..., None]
    if (window := rules.window) is not None:
        seen &= positions > last[..., None] - window
        if query_counts is not None:
            seen &= positions > (kv_lens - query_counts - window)[:, None, None]
    if (chunk := rules.chunk) is not None:
        seen &= positions >= last[..., None] // chunk * chunk - rules.lookback
        if query_counts is not None:
            seen &= positions >= ((kv_lens - query_counts) // chunk * chunk - rules.lookback)[:, None, None]
    slots = tables[:, positions // page_size].long() * page_size + positions % page_size
    return seen, slots.masked_fill(~seen.any(1), 0)


def _gather(cache: Tensor, slots: Tensor, scale: Tensor | None, wide: torch.dtype) -> Tensor:
    """Return [S, K, C, H] of a cache [P, K, B, H] at slots [S, C]."""
    page_size = cache.shape[2]
    rows = _indexable(cache)[slots // page_size, :, slots % page_size].view(cache.dtype)
    rows = rows.to(wide).transpose(1, 2)
    return rows if scale is None else rows * scale.to(wide)


def _indexable(cache: Tensor) -> Tensor:
    """Return float8 as bytes: torch does not index it on every device."""
    return cache.view(torch.uint8) if cache.element_size() == 1 else cache


def _softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Return the softmax of scores [S, K, query_len, N/K, C] with each head's sink [N]."""
    if sinks is None:
        return scores.softmax(-1)
    sink = sinks.to(scores.dtype).view(1, scores.shape[1], 1, -1, 1).expand(*scores.shape[:-1], 1)
    return torch.cat((scores, sink), -1).softmax(-1)[..., :-1]
