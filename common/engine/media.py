"""Media of a prompt: an item becomes rows on the device, and a position of the prompt names a row.

An item is a picture, a video, a sound, or rows that the caller gives (prompt embeddings). A row is D numbers, which take
the place of a token's embedding. `RowCache` decides which rows of the device hold which item.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import sha256
from typing import Literal, TypeAlias

MediaKind: TypeAlias = Literal["image", "video", "audio", "rows"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaItem:
    """One item of a prompt, ready for the device. It crosses process boundaries, so it has plain types only."""

    digest: bytes  # 32 bytes of SHA-256 that name the rows; see `media_digest`
    kind: MediaKind
    payload: bytes = field(repr=False)  # an array of `shape` and `dtype` in C order
    # image, video: patches [n, channels * frames * size * size]; audio: log-mel [frames, bins]; rows: [n, D].
    shape: tuple[int, ...]
    dtype: str  # uint8 of patches, float32 of log-mel, the model's dtype of rows
    grid: tuple[int, int, int]  # patches in time, height and width; of audio (1, 1, frames), of rows (1, 1, n)
    spans: tuple[tuple[int, int], ...]  # (first position of the prompt, number of rows) of its rows, in order
    seconds: float = 0.0  # of a video: the time between steps of the grid

    @property
    def num_rows(self) -> int:
        """Rows of the item."""
        return sum(length for _, length in self.spans)


def media_digest(
    *, kind: MediaKind, shape: tuple[int, ...], dtype: str, payload: bytes, options: tuple[object, ...]
) -> bytes:
    """Return the SHA-256 digest of an item, 32 bytes.

    `options`: all else that its rows depend on, apart from the model: the grid, the time between its steps.
    """
    head = repr((kind, shape, dtype, options)).encode()
    return sha256(b"%d:" % len(head) + head + payload).digest()
