"""Media of a prompt: an item becomes rows on the device, and a position of the prompt names a row.

An item is a picture, a video, a sound, or rows that the caller gives (prompt embeddings). A row is D numbers, which
take the place of a token's embedding. `RowCache` decides which rows of the device hold which item.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
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


@dataclass(frozen=True, slots=True)
class MediaSpan:
    """Consecutive positions [start, stop) of a prompt, which name rows [row, row + stop - start) of an item."""

    start: int
    stop: int
    item: int  # number of the item in the prompt
    row: int


class PromptMedia:
    """The items of one prompt, and the positions that name their rows. Spans do not overlap."""

    def __init__(self, items: Sequence[MediaItem]) -> None:
        self.items = tuple(items)
        spans: list[MediaSpan] = []
        for number, item in enumerate(self.items):
            row = 0
            for start, length in item.spans:
                spans.append(MediaSpan(start=start, stop=start + length, item=number, row=row))
                row += length
        self.spans = sorted(spans, key=lambda span: span.start)
        self._stops = [span.stop for span in self.spans]
        # The position after the last one that names a row of each item.
        self.ends = [max((start + length for start, length in item.spans), default=0) for item in self.items]

    def without_payloads(self) -> PromptMedia:
        """Return the same, of items that nothing can be encoded from any more."""
        return PromptMedia([replace(item, payload=b"") for item in self.items])

    @property
    def stop(self) -> int:
        """The position after the last one that names a row."""
        return self._stops[-1] if self._stops else 0

    def overlapping(self, start: int, stop: int) -> Iterator[MediaSpan]:
        """Yield the parts of spans that lie within positions [start, stop), in order."""
        for index in range(bisect_right(self._stops, start), len(self.spans)):
            span = self.spans[index]
            if span.start >= stop:
                return
            first = max(start, span.start)
            yield MediaSpan(start=first, stop=min(stop, span.stop), item=span.item, row=span.row + first - span.start)

    def page_bytes(self, start: int, stop: int) -> bytes:
        """Return what tells apart the contents of positions [start, stop) beside their ids: the rows named there."""
        parts = self.overlapping(start, stop)
        return b"".join(self.items[part.item].digest + part.row.to_bytes(8, "little") for part in parts)


def rows_items(values: bytes, *, count: int, dtype: str, rows_per_item: int) -> tuple[MediaItem, ...]:
    """Return prompt embeddings as items of `rows_per_item` rows, from the prompt's first position on.

    `values`: [count, D] in `dtype`, in C order. Items of a page each let prompts with a common beginning share cached
    pages, and a step needs the rows of its own tokens only.
    """
    size = len(values) // count
    items = []
    for start in range(0, count, rows_per_item):
        length = min(rows_per_item, count - start)
        payload = values[start * size : (start + length) * size]
        shape = (length, size)
        items.append(
            MediaItem(
                digest=media_digest(kind="rows", shape=shape, dtype=dtype, payload=payload, options=()),
                kind="rows",
                payload=payload,
                shape=shape,
                dtype=dtype,
                grid=(1, 1, length),
                spans=((start, length),),
            )
        )
    return tuple(items)
