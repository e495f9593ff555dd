"""The paged cache of latents (MLA): per token one vector that is the key of all heads, its first channels their value.

    cache [L, P, R, B, 128]         as of `ragged_paged_attention.layout`: R rows of 32-bit words per token

A token's latent (`rank` channels) and its rotary key (`rope_dim`) are each padded to lanes of 128, a *chunk*. float32
has one row per chunk. In bfloat16 a word holds the same channel of two chunks, 2 r and 2 r + 1 of row r.

Of an odd number of chunks, 2 n + 1, the last would leave half a word empty: 512 + 64 channels would take 768. The
tokens of a page's two halves, its *sections*, therefore share the words of the last chunk: token i in the low halves,
token i + B/2 in the high ones. A page is [2 n + 1, B/2, 128]: n rows of the first section, the shared row, n rows of
the second section. Where a token of the second section is written, the low halves are read first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pagoda.kernels_pallas.ragged_paged_attention.attend import SUBLANES, high_halves, load_rows, low_halves
from pagoda.kernels_pallas.ragged_paged_attention.layout import LANES, WORD_BYTES
from pagoda.kernels_pallas.ragged_paged_attention.plan import div, rem

LATENT_DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True)
class LatentLayout:
    """The layout of latents in a page. Raise ValueError if a field is out of range."""

    rank: int  # channels of the latent
    rope_dim: int  # channels of the rotary key; 0: none
    dtype: str  # stored dtype, one of LATENT_DTYPES
    page_size: int  # tokens

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", jnp.dtype(self.dtype).name)
        if self.dtype not in LATENT_DTYPES:
            raise ValueError(f"latent dtype {self.dtype!r} is not one of {', '.join(LATENT_DTYPES)}")
        if self.rank < 1 or self.rope_dim < 0 or self.page_size < 1 or self.page_size % 8:
            raise ValueError(f"rank must be >= 1, rope_dim >= 0, page_size a multiple of 8 tokens: {self}")

    @property
    def channels(self) -> int:
        """Return the channels of a token: latent and rotary key."""
        return self.rank + self.rope_dim

    @property
    def packing(self) -> int:
        """Return the elements per word: 1 or 2."""
        return WORD_BYTES // jnp.dtype(self.dtype).itemsize

    @property
    def lane_heads(self) -> int:
        """Return 1: all query heads are the rows of one matmul."""
        return 1

    @property
    def value_dim(self) -> int:
        """Return the channels of the latent, which is the value."""
        return self.rank

    @property
    def value_width(self) -> int:
        """Return the lanes of the latent."""
        return -(-self.rank // LANES) * LANES

    @property
    def width(self) -> int:
        """Return the lanes of latent and rotary key: the kernel's contraction size."""
        return self.value_width + -(-self.rope_dim // LANES) * LANES

    @property
    def sections(self) -> int:
        """Return 2 if the halves of a page share a row, which needs halves of whole tiles of 16 tokens; else 1."""
        odd = self.width // LANES % 2 == 1
        return 2 if self.packing == 2 and odd and self.page_size % (4 * SUBLANES) == 0 else 1

    @property
    def rows_per_token(self) -> int:
        """Return the rows of 128 words that hold a token, a shared one included."""
        return -(-self.width // LANES // self.packing)

    def halved(self) -> None:
        """Return None: there is one lane head."""

    @property
    def word_dtype(self) -> jnp.dtype:
        """Return the cache array's dtype: float32, or uint32 words."""
        return jnp.dtype(jnp.float32 if self.packing == 1 else jnp.uint32)

    @property
    def compute_dtype(self) -> jnp.dtype:
        """Return the dtype in which latents and queries are multiplied."""
        return jnp.dtype(self.dtype)

    @property
    def bytes_per_page(self) -> int:
        """Return the bytes of one page of one layer, padding included."""
        _, _, rows, tokens, lanes = self.shape(1, 1)
        return rows * tokens * lanes * WORD_BYTES

    def shape(self, layers: int, pages: int) -> tuple[int, int, int, int, int]:
        """Return the shape of the stacked cache, whose dtype is `word_dtype`."""
        rows = self.sections * (self.rows_per_token - 1) + 1 if self.sections == 2 else self.rows_per_token
        return layers, pages, rows, self.page_size // self.sections, LANES

    def init(self, layers: int, pages: int) -> jax.Array:
        """Return an empty cache on the default device."""
        return jnp.zeros(self.shape(layers, pages), self.word_dtype)

    def to_lanes(self, x: jax.Array) -> jax.Array:
        """[..., channels] -> [..., width], zeros in the padding."""
        pads = (self.value_width - self.rank, self.width - self.value_width - self.rope_dim)
        parts = jnp.split(x, [self.rank], axis=-1)
        return jnp.concatenate(
            [jnp.pad(part, [(0, 0)] * (x.ndim - 1) + [(0, pad)]) for part, pad in zip(parts, pads)], -1
        )

    def pack(self, latents: jax.Array) -> jax.Array:
        """Pack latents [..., channels] into words [..., R, 128]; a last chunk alone is in the low halves."""
        lanes = self.to_lanes(latents).astype(self.dtype)
        lead = lanes.shape[:-1]
        if self.packing == 1:
            return lanes.reshape(*lead, self.rows_per_token, LANES)
        chunks = jax.lax.bitcast_convert_type(lanes, jnp.uint16).astype(jnp.uint32)
        chunks = jnp.pad(chunks, [(0, 0)] * len(lead) + [(0, 2 * LANES * self.rows_per_token - self.width)])
        chunks = chunks.reshape(*lead, self.rows_per_token, 2, LANES)
        return chunks[..., 0, :] | chunks[..., 1, :] << 16

    def unpack(self, words: jax.Array) -> jax.Array:
        """Invert `pack`: words [..., R, 128] -> latents [..., channels] of dtype `dtype`."""
        lead = words.shape[:-2]
        if self.packing == 2:
            halves = jnp.stack([words & 0xFFFF, words >> 16], -2).astype(jnp.uint16)
            words = jax.lax.bitcast_convert_type(halves, jnp.bfloat16)
        lanes = words.reshape(*lead, -1)
        rope = lanes[..., self.value_width : self.value_width + self.rope_dim]
        return jnp.concatenate([lanes[..., : self.rank], rope], -1)

    def token_words(self, pages: jax.Array) -> jax.Array:
        """Return the words of each token of pages [n, *shape[2:]], as of `pack`: [n, B, R, 128]."""
        if self.sections == 2:
            own = self.rows_per_token - 1
            first = pages[:, :own]
            shared = pages[:, own : own + 1]
            second = pages[:, own + 1 :]
            low = shared & 0xFFFF
            high = shared >> 16
            pages = jnp.concatenate([jnp.concatenate([first, low], 1), jnp.concatenate([second, high], 1)], 2)
        return pages.swapaxes(1, 2)

    def unpack_pages(self, words: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Unpack pages [n, *shape[2:]] into keys [n * B, 1, channels] and values [n * B, 1, rank]."""
        keys = self.unpack(self.token_words(words)).reshape(-1, 1, self.channels)
        return keys, keys[..., : self.rank]


def load_latents(
    kv: Any, layout: Any, tokens: int, pass_index: Any, head: Any, part: int
) -> tuple[jax.Array, jax.Array]:
    """Load keys [tokens, width] and values [tokens, value_width] of one pass, from pages kv [.., *shape[2:]]."""
    chunks: list[jax.Array] = []
    for row in range(layout.rows_per_token):
        if layout.packing == 1:
            chunks.append(load_rows(kv, layout, tokens, pass_index, row))
            continue
        if layout.sections == 2 and row == layout.rows_per_token - 1:
            chunks.append(_shared_chunk(kv, layout, tokens, pass_index))
            continue
        load = _section_rows if layout.sections == 2 else load_rows
        even, odd = (load(kv, layout, tokens, pass_index, row, start, 2) for start in (0, 1))
        chunks.append(pltpu.bitcast(low_halves(even, odd), jnp.bfloat16))
        chunks.append(pltpu.bitcast(high_halves(even, odd), jnp.bfloat16))
    keys = chunks[: layout.width // LANES]
    return jnp.concatenate(keys, axis=-1), jnp.concatenate(keys[: layout.value_width // LANES], axis=-1)


def _section_rows(
    kv: Any, layout: LatentLayout, tokens: int, pass_index: Any, row: Any, start: int, step: int
) -> jax.Array:
    """Load a row of a token's own of every `step`-th token of a pass, as `load_rows`."""
    size = layout.page_size // 2
    if tokens <= size:
        page, section, first = _within_section(layout, tokens, pass_index)
        words: jax.Array = kv[
            page, section * layout.rows_per_token + row, pl.ds(first + start, tokens // step, step), :
        ]
        return words
    pages = tokens // layout.page_size
    parts = [
        kv[pass_index * pages + i, section * layout.rows_per_token + row, pl.ds(start, size // step, step), :]
        for i in range(pages)
        for section in (0, 1)
    ]
    return jnp.concatenate(parts, axis=0)


def _shared_chunk(kv: Any, layout: LatentLayout, tokens: int, pass_index: Any) -> jax.Array:
    """Load the chunk in the shared row of all tokens of a pass, [tokens, 128]."""
    size = layout.page_size // 2
    row = layout.rows_per_token - 1
    if tokens <= size:
        page, section, first = _within_section(layout, tokens, pass_index)
        shift = (16 * section).astype(jnp.uint32)
        even, odd = (kv[page, row, pl.ds(first + start, tokens // 2, 2), :] >> shift for start in (0, 1))
        return pltpu.bitcast(low_halves(even, odd), jnp.bfloat16)
    parts: list[jax.Array] = []
    for i in range(tokens // layout.page_size):
        page = pass_index * (tokens // layout.page_size) + i
        even, odd = (kv[page, row, pl.ds(start, size // 2, 2), :] for start in (0, 1))
        parts += low_halves(even, odd), high_halves(even, odd)
    return pltpu.bitcast(jnp.concatenate(parts, axis=0), jnp.bfloat16)


def _within_section(layout: LatentLayout, tokens: int, pass_index: Any) -> tuple[Any, Any, Any]:
    """Return page, section and first token there of a pass that is a part of a section."""
    per_section = layout.page_size // 2 // tokens
    index = div(jnp.asarray(pass_index, jnp.int32), per_section)
    return div(index, 2), rem(index, 2), (pass_index - index * per_section) * tokens
