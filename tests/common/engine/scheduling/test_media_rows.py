"""The row cache: which rows hold which item, and what goes first when rows are needed."""

from __future__ import annotations

import pytest
from fakes import row_items

from pagoda.common.engine.media.items import PromptMedia, media_digest
from pagoda.common.engine.media.rows import RowCache
from pagoda.common.engine.steps.contract import EMBEDDED

A, B, C, D = (bytes([number]) * 32 for number in range(4))


def test_items_keep_their_rows_and_the_first_released_goes_first() -> None:
    cache = RowCache(6)
    rows = {digest: cache.put(digest, 2).tolist() for digest in (A, B, C)}
    assert sorted(row for each in rows.values() for row in each) == list(range(6))
    assert cache.num_available == 0
    for digest in (B, A):
        cache.release(digest)
    assert cache.num_available == 4
    assert cache.hold(A).tolist() == rows[A]
    assert (cache.num_available, cache.is_held(A), cache.is_held(B)) == (2, True, False)
    cache.release(A)
    assert sorted(cache.put(D, 1).tolist()) == [row for row in rows[B] if B not in cache][-1:]
    assert (A in cache, B in cache) == (True, False)
    cache.check_integrity({C: 1, D: 1})


def test_an_item_with_two_references_is_available_after_both_are_dropped() -> None:
    cache = RowCache(2)
    cache.put(A, 2)
    cache.hold(A)
    cache.release(A)
    assert cache.num_available == 0
    with pytest.raises(RuntimeError, match="needs 1 rows, of which 0 are available"):
        cache.put(B, 1)
    cache.release(A)
    assert cache.num_available == 2


def test_what_is_wrong_is_noticed() -> None:
    cache = RowCache(3)
    cache.put(A, 2)
    with pytest.raises(RuntimeError, match="in the row cache already"):
        cache.put(A, 1)
    with pytest.raises(RuntimeError, match="1 media items are held, sequences hold 0"):
        cache.check_integrity({})
    cache._free.pop()
    with pytest.raises(RuntimeError, match="lost or given twice"):
        cache.check_integrity({A: 1})


def test_the_rows_of_a_prompt_are_found_by_position() -> None:
    prompt = [7, EMBEDDED, EMBEDDED, EMBEDDED, 8, EMBEDDED]
    media = PromptMedia(row_items(prompt, b"aabbccdd", most=2))
    spans = [(span.start, span.stop, span.item, span.row) for span in media.overlapping(2, 6)]
    assert spans == [(2, 3, 0, 1), (3, 4, 1, 0), (5, 6, 2, 0)]
    assert list(media.overlapping(4, 5)) == []
    assert (media.stop, media.ends) == (6, [3, 4, 6])
    assert [item.payload for item in media.without_payloads().items] == [b""] * 3
    assert media.without_payloads().page_bytes(0, 6) == media.page_bytes(0, 6)


def test_a_digest_covers_everything_that_rows_depend_on() -> None:
    plain = {"kind": "image", "shape": (1, 4), "dtype": "uint8", "payload": b"abcd", "options": (1, 2)}
    changes = ({"kind": "video"}, {"shape": (4, 1)}, {"dtype": "int8"}, {"payload": b"abce"}, {"options": (2, 1)})
    digests = {media_digest(**(plain | change)) for change in ({}, *changes)}  # type: ignore[arg-type]
    assert len(digests) == 6
    assert {len(digest) for digest in digests} == {32}
