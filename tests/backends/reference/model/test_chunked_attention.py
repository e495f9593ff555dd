"""Attention within chunks of positions, and queries that grow with their position."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from support.engines.reference_driver import random_weights, tiny_spec
from support.engines.reference_engine import assert_naive_tokens

from pagoda.backends.reference.model.naive.model import NaiveModel
from pagoda.common.errors import ModelError
from pagoda.common.models.mixers import Attention, QueryGrowth
from pagoda.common.models.mixers.caches import FullCache, WindowCache
from pagoda.common.models.registry import within_context, without_windows
from pagoda.common.models.spec import ModelSpec

PROMPT = [5, 17, 3, 80, 41, 2, 9, 60, 33, 21, 7, 8]
GROWTH = QueryGrowth(0.5, period=6, offset=1)


def changed(**fields: Any) -> ModelSpec:
    """The tiny model with the second layer's attention changed."""
    first, second = tiny_spec().layers
    mixer = replace(second.attention, **fields)
    return replace(tiny_spec(), layers=(first, replace(second, mixers=(mixer,))))


CHUNKED = changed(chunk=7, query_growth=GROWTH)


@pytest.mark.parametrize("blocks", [40, 160])
def test_chunked_prefill_preemption_and_prefix_hits(blocks: int) -> None:
    assert_naive_tokens(CHUNKED, PROMPT, blocks, preempts=blocks == 40)


def test_the_cache_keeps_the_tokens_of_a_chunk() -> None:
    assert CHUNKED.caches == (FullCache(2, 16), WindowCache(2, 16, 7))
    assert without_windows(CHUNKED).layers[1].attention == replace(changed(query_growth=GROWTH).layers[1].attention)
    assert without_windows(CHUNKED).max_positions == 7


@pytest.mark.parametrize(
    ("fields", "longest"),
    [({"chunk": 7}, 7), ({"query_growth": GROWTH}, 5), ({"query_growth": QueryGrowth(1.0, 6)}, 6)],
)
def test_what_makes_no_difference_in_short_contexts_is_left_out(fields: dict[str, Any], longest: int) -> None:
    spec = changed(**fields)
    assert within_context(spec, longest) == tiny_spec()
    assert within_context(spec, longest + 1) == spec
    plain, other = (NaiveModel(each, random_weights(spec)).logits(PROMPT) for each in (tiny_spec(), spec))
    torch.testing.assert_close(other[:longest], plain[:longest], atol=0, rtol=0)
    assert (other[longest:] - plain[longest:]).abs().max() > 1e-3


def test_weights_of_the_input_are_of_one_expert() -> None:
    moe = tiny_spec(moe=True).layers[0].ffn
    with pytest.raises(ModelError, match="weighted inputs of 2 experts per token are not supported"):
        replace(moe, weighs_input=True)  # type: ignore[type-var]


def test_a_norm_of_queries_without_weights_comes_before_rope() -> None:
    norm = tiny_spec().layers[0].attention.qk_norm
    assert norm is not None
    with pytest.raises(AssertionError, match="applied to each head before RoPE"):
        Attention(4, 2, 16, 0.25, None, qk_norm=replace(norm, scale=False), qk_norm_after_rope=True)
