"""Equal digests must mean equal everything."""

from __future__ import annotations

from hashlib import sha256

import numpy as np
from fakes import row_items

from pagoda.common.engine.kv_cache.manager import extend_hashes, page_digest, root_digest
from pagoda.common.engine.messages import EngineRequest
from pagoda.common.engine.sampling.rules import SamplingRules
from pagoda.common.engine.scheduling.request import Request
from pagoda.common.engine.steps.contract import EMBEDDED


def request(prompt: list[int], salt: str | None = None) -> Request:
    asked = EngineRequest(request_id="r", prompt_token_ids=prompt, rules=SamplingRules(), max_tokens=4, cache_salt=salt)
    return Request.of(asked, limit=len(prompt) + 4, rank=(1,))


def test_a_digest_covers_its_parent_and_its_tokens():
    one, two = extend_hashes(request([1, 2, 3, 4, 5]), 2, 2)
    root = root_digest(None)
    assert one == sha256(root + np.array([1, 2], np.int32).tobytes()).digest()
    assert two == page_digest(one, np.array([3, 4], np.int32).tobytes())


def test_an_early_difference_changes_all_later_digests():
    one = extend_hashes(request([1, 2, 3, 4]), 2, 2)
    two = extend_hashes(request([9, 2, 3, 4]), 2, 2)
    assert not set(one) & set(two)


def test_generated_tokens_continue_the_chain_as_if_they_were_prompt():
    grown = request([1, 2, 3])
    grown.outputs += [4, 5, 6]
    assert extend_hashes(grown, 2, 3) == extend_hashes(request([1, 2, 3, 4, 5, 6]), 2, 3)


def test_hashes_are_computed_on_demand_and_kept():
    r = request([1, 2, 3, 4])
    first = extend_hashes(r, 2, 1)[0]
    assert len(r.hashes) == 1
    assert extend_hashes(r, 2, 2)[0] is first


def embedded(prompt: list[int], rows: bytes) -> Request:
    asked = EngineRequest(
        request_id="r",
        prompt_token_ids=prompt,
        rules=SamplingRules(),
        max_tokens=4,
        media=row_items(prompt, rows, most=2),
    )
    return Request.of(asked, limit=len(prompt) + 4, rank=(1,))


def test_a_digest_covers_the_rows_of_its_page_and_those_before():
    """Three rows of two bytes; the last page holds one, and a token."""
    prompt = [EMBEDDED, EMBEDDED, EMBEDDED, 4]
    first, second = extend_hashes(embedded(prompt, b"aabbcc"), 2, 2)
    same_first, other_second = extend_hashes(embedded(prompt, b"aabbcd"), 2, 2)
    assert (same_first, other_second == second) == (first, False)
    assert not set(extend_hashes(embedded(prompt, b"abbbcc"), 2, 2)) & {first, second}
    assert extend_hashes(embedded(prompt, b"aabbcc"), 2, 2) == [first, second]
    moved = extend_hashes(embedded([EMBEDDED, EMBEDDED, 4, EMBEDDED], b"aabbcc"), 2, 2)
    assert (moved[0], moved[1] == second) == (first, False)


def test_a_difference_behind_a_placeholder_leaves_the_pages_before_it_shared():
    """Not the root but the page that the embedding stands in differs."""
    prompt = [1, 2, EMBEDDED, 4, 5, 6]
    one, other = (extend_hashes(embedded(prompt, rows), 2, 3) for rows in (b"aa", b"ab"))
    assert [left == right for left, right in zip(one, other)] == [True, False, False]


def test_parts_of_the_root_never_run_together():
    parts = [(None,), ("",), ("ab",), (None, "ab"), ("a", "b"), ("ab", None), ("ab", "")]
    assert len({root_digest(*each) for each in parts}) == 7
    assert extend_hashes(request([1, 2], "x"), 2, 1) != extend_hashes(request([1, 2]), 2, 1)
