"""The paged KV cache as the kernel stores it: 32-bit words in rows of 128 lanes.

    cache [L, P, R, B, 128]         R = rows per token; the B tokens of a row are adjacent

One page of one layer is contiguous, so one DMA fetches it. Within it the tokens of a row are adjacent, so a head's K
and V are read with a stride of at most two. In the other order, rows within tokens, a read of eight tokens hits two
memory banks and costs four loads.

Words are 32 bits wide, so a row of 128 is one sublane of the TPU's (8, 128) tile, and a DMA may start at any token and
have any length: single-token writes need no alignment. Narrow types are packed *inside* the words, K and V of a head
side by side, so that a few shifts give both matrices:

    float32            one row holds K, the next holds V
    bfloat16           word = K | V << 16
    8-bit              word = K | V << 8 | K' << 16 | V' << 24     (K', V': the next head)

Heads narrower than 128 share a row: two heads of width 64 fill its lanes (head widths are padded to the next power of
two below 128 and to a multiple of 128 above). A *lane head* is one such group of lanes.

Value heads may be narrower or wider than key heads: the wider ones set the lanes of both. Of a head of several rows
only those with values are read as V; float32, which has rows of V alone, has no others.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import jax
import jax.numpy as jnp

LANES = 128
WORD_BYTES = 4
CACHE_DTYPES = ("float32", "bfloat16", "int8", "float8_e4m3fn", "float8_e5m2")


class PageLayout(Protocol):
    """What the kernel reads of a layout; of one KV head whose K and V are the same words, K may be wider than V."""

    @property
    def dtype(self) -> str: ...
    @property
    def page_size(self) -> int: ...
    @property
    def packing(self) -> int: ...
    @property
    def lane_heads(self) -> int: ...
    @property
    def width(self) -> int:
        """Return the width of K in a lane head, a multiple of 128: the kernel's contraction size."""
        ...

    @property
    def value_width(self) -> int:
        """Return the width of V in a lane head, a multiple of 128."""
        ...

    @property
    def value_dim(self) -> int: ...
    @property
    def rows_per_token(self) -> int: ...
    @property
    def sections(self) -> int:
        """Return 1, or 2 where the first and second half of a page's tokens have rows of their own and one shared row.

        A section has `rows_per_token` rows of `page_size // sections` tokens, the second one from the last row of the
        first.
        """
        ...

    @property
    def bytes_per_page(self) -> int: ...
    def halved(self) -> PageLayout | None:
        """Return the layout of half of the lane heads, with half of a page's rows; None if they cannot be split."""
        ...

    @property
    def word_dtype(self) -> jnp.dtype: ...
    @property
    def compute_dtype(self) -> jnp.dtype: ...
    def unpack_pages(self, words: jax.Array) -> tuple[jax.Array, jax.Array]: ...


@dataclass(frozen=True)
class PagedKvLayout:
    """The layout of K and V in a page. Raise ValueError if a field is out of range.

    Under tensor parallelism `kv_heads` are those of one shard: the global array has axis 2 multiplied, and is sharded
    along it.
    """

    kv_heads: int
    head_dim: int
    dtype: str  # stored dtype, one of CACHE_DTYPES
    page_size: int  # tokens
    value_dim: int = 0  # channels of a value head; 0: head_dim

    def __post_init__(self) -> None:
        object.__setattr__(self, "value_dim", self.value_dim or self.head_dim)
        object.__setattr__(self, "dtype", jnp.dtype(self.dtype).name)
        if self.dtype not in CACHE_DTYPES:
            raise ValueError(f"KV dtype {self.dtype!r} is not one of {', '.join(CACHE_DTYPES)}")
        dims = self.head_dim, self.value_dim
        if self.kv_heads < 1 or self.page_size < 1 or not 1 <= min(dims) <= max(dims) <= 512:
            raise ValueError(f"kv_heads and page_size must be >= 1, head_dim and value_dim in 1..512: {self}")
        if self.page_size % 8:
            raise ValueError(f"page_size must be a multiple of 8 tokens, not {self.page_size}")

    @property
    def packing(self) -> int:
        """Return the elements per word: 1, 2 or 4."""
        return WORD_BYTES // jnp.dtype(self.dtype).itemsize

    @property
    def heads_per_row(self) -> int:
        """Return the number of KV heads that share the 128 lanes of a row."""
        return max(1, LANES // next_power_of_two(self._widest))

    @property
    def slot_width(self) -> int:
        """Return the lanes per head: the wider of key and value head, padded."""
        if self._widest >= LANES:
            return -(-self._widest // LANES) * LANES
        return LANES // self.heads_per_row

    @property
    def _widest(self) -> int:
        return max(self.head_dim, self.value_dim)

    @property
    def width(self) -> int:
        """Return the width of a lane head, a multiple of 128: the kernel's contraction size."""
        return max(LANES, self.slot_width)

    @property
    def value_width(self) -> int:
        """Return the width of V in a lane head, a multiple of 128, at most that of K."""
        return -(-self.value_dim // LANES) * LANES

    @property
    def lane_heads(self) -> int:
        """Return the number of lane heads, padded to an even number for 8-bit types (two of them share a word)."""
        heads = -(-self.kv_heads // self.heads_per_row)
        return heads + heads % 2 if self.packing == 4 else heads

    @property
    def rows_per_token(self) -> int:
        """Return R, the rows of 128 words per token and layer."""
        if self.packing == 1:
            return self.lane_heads * (self.width + self.value_width) // LANES
        return self.lane_heads * (self.width // LANES) * 2 // self.packing

    @property
    def sections(self) -> int:
        """Return 1: all tokens of a page are in the same rows."""
        return 1

    def halved(self) -> PagedKvLayout | None:
        """Return the layout of half of the lane heads; None if their number is odd, or a half's words are shared."""
        heads = self.lane_heads // 2
        if self.lane_heads % 2 or (self.packing == 4 and heads % 2):
            return None
        return replace(self, kv_heads=heads * self.heads_per_row)

    @property
    def word_dtype(self) -> jnp.dtype:
        """Return the cache array's dtype: float32, or uint32 words for narrower types."""
        return jnp.dtype(jnp.float32 if self.packing == 1 else jnp.uint32)

    @property
    def compute_dtype(self) -> jnp.dtype:
        """Return the dtype in which K, V and the queries are multiplied."""
        return jnp.dtype(jnp.float32 if self.packing == 1 else jnp.bfloat16)

    @property
    def bytes_per_page(self) -> int:
        """Return the bytes of one page of one layer, padding included."""
        return self.page_size * self.rows_per_token * LANES * WORD_BYTES

    def shape(self, layers: int, pages: int) -> tuple[int, int, int, int, int]:
        """Return the shape [L, P, R, B, 128] of the stacked cache; its dtype is `word_dtype`."""
        return layers, pages, self.rows_per_token, self.page_size, LANES

    def init(self, layers: int, pages: int) -> jax.Array:
        """Return an empty cache [L, P, R, B, 128] on the default device."""
        return jnp.zeros(self.shape(layers, pages), self.word_dtype)

    def pack(self, k: jax.Array, v: jax.Array) -> jax.Array:
        """Pack K [..., K, H] and V [..., K, V] of any float dtype into words [..., R, 128].

        Values are cast to `dtype` (int8: rounded and clipped); divide by the scales first.
        """
        k, v = (self._to_lanes(self._narrow(x)) for x in (k, v))
        lead = k.shape[:-2]
        if self.packing == 1:
            both = jnp.concatenate((k, v[..., : self.value_width]), axis=-1)
            return both.reshape(*lead, self.rows_per_token, LANES)
        bits = jnp.uint16 if self.packing == 2 else jnp.uint8
        k, v = (jax.lax.bitcast_convert_type(x, bits).astype(jnp.uint32) for x in (k, v))
        words = k | v << (8 * self._bytes)
        if self.packing == 4:
            pairs = words.reshape(*lead, self.lane_heads // 2, 2, self.width)
            words = pairs[..., 0, :] | pairs[..., 1, :] << 16
        return words.reshape(*lead, self.rows_per_token, LANES)

    def unpack(self, words: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Unpack words [..., R, 128] into K [..., K, H] and V [..., K, V] of dtype `dtype`."""
        lead = words.shape[:-2]
        if self.packing == 1:
            both = words.reshape(*lead, self.lane_heads, self.width + self.value_width)
            k = both[..., : self.width]
            v = both[..., self.width :]
            return self._from_lanes(k, self.head_dim), self._from_lanes(v, self.value_dim)
        shifts = 16 * jnp.arange(self.packing // 2, dtype=jnp.uint32)
        words = words.reshape(*lead, -1, 1, self.width) >> shifts[:, None]
        words = words.reshape(*lead, self.lane_heads, self.width)
        bits = jnp.uint16 if self.packing == 2 else jnp.uint8
        k, v = (
            jax.lax.bitcast_convert_type((words >> shift).astype(bits), jnp.dtype(self.dtype))
            for shift in (0, 8 * self._bytes)
        )
        return self._from_lanes(k, self.head_dim), self._from_lanes(v, self.value_dim)

    def unpack_pages(self, words: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Unpack pages [n, R, B, 128] into K [n * B, K, H] and V [n * B, K, V] of dtype `dtype`."""
        return self.unpack(words.swapaxes(1, 2).reshape(-1, self.rows_per_token, LANES))

    @property
    def _bytes(self) -> int:
        return WORD_BYTES // self.packing

    def _narrow(self, x: jax.Array) -> jax.Array:
        if self.dtype == "int8":
            return jnp.clip(jnp.round(x.astype(jnp.float32)), -127, 127).astype(jnp.int8)
        if self.packing == 4:  # saturate: a float8 has no infinity, or one that would corrupt a page
            limit = float(jnp.finfo(self.dtype).max)
            x = jnp.clip(x.astype(jnp.float32), -limit, limit)
        return x.astype(self.dtype)

    def _to_lanes(self, x: jax.Array) -> jax.Array:
        """[..., K, n] -> [..., lane heads, width], zeros in the padding."""
        heads = self.lane_heads * self.heads_per_row
        pad = [(0, 0)] * (x.ndim - 2) + [(0, heads - self.kv_heads), (0, self.slot_width - x.shape[-1])]
        return jnp.pad(x, pad).reshape(*x.shape[:-2], self.lane_heads, self.width)

    def _from_lanes(self, x: jax.Array, dim: int) -> jax.Array:
        """Invert `_to_lanes` of heads of `dim` channels, of which the last lanes may be missing."""
        x = x.reshape(*x.shape[:-2], self.lane_heads * self.heads_per_row, x.shape[-1] // self.heads_per_row)
        return x[..., : self.kv_heads, :dim]


def next_power_of_two(n: int) -> int:
    """Return the smallest power of two that is >= n >= 1."""
    return 1 << (n - 1).bit_length()
