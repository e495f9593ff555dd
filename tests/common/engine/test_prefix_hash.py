"""Equal digests must mean equal everything."""

from __future__ import annotations

from hashlib import sha256

import numpy as np

from pagoda.common.engine.messages import EngineRequest
from pagoda.common.engine.prefix_hash import ExtraKeys, extend_hashes, page_digest, root_digest
from pagoda.common.engine.request import Request
from pagoda.common.engine.sampling import SamplingRules


def request(prompt: list[int], salt: str | None = None) -> Request:
    asked = EngineRequest(request_id="r", prompt_token_ids=prompt, rules=SamplingRules(), max_tokens=4, cache_salt=salt)
    return Request.of(asked, limit=len(prompt) + 4, rank=(1,))


def test_a_digest_covers_its_parent_and_its_tokens():
    one, two = extend_hashes(request([1, 2, 3, 4, 5]), 2, 2)
    root = root_digest(ExtraKeys())
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


def test_extras_never_run_together():
    roots = {
        root_digest(extras)
        for extras in (
            ExtraKeys(),
            ExtraKeys(cache_salt=""),
            ExtraKeys(cache_salt="ab"),
            ExtraKeys(lora="ab"),
            ExtraKeys(cache_salt="a", lora="b"),
            ExtraKeys(media=(b"ab",)),
            ExtraKeys(media=(b"a", b"b")),
        )
    }
    assert len(roots) == 7
    assert extend_hashes(request([1, 2], "x"), 2, 1) != extend_hashes(request([1, 2]), 2, 1)
