"""Drafts of models with recurrent state on torch_cuda: same tokens as without, in captured steps and in others."""

from __future__ import annotations

import pytest
from support.engines.draft_runs import EVERY_KIND, KEPT, PATTERNS, Run, assert_equal, mixed, run
from support.engines.replaying import Replaying
from support.suite.rows import each_row

from pagoda.backends.torch_cuda.kernels.attention.decode_attention import MAX_QUERY_LEN


@pytest.fixture(scope="module")
def plain() -> Run:
    """Without drafts."""
    return run("torch_cuda", spec=EVERY_KIND, **KEPT)


@each_row(("drafts", "ahead"), [(1, True), (4, False), (MAX_QUERY_LEN, True)])
def test_drafts_change_no_token(plain: Run, drafts: int, ahead: bool) -> None:
    """The most drafts are more than a captured step has."""
    proposer = Replaying(plain.tokens, mixed)
    ran = run("torch_cuda", proposer, spec=EVERY_KIND, max_drafts=drafts, async_scheduling=ahead, **KEPT)
    assert_equal(ran, plain)
    assert 0 < ran.accepted < ran.drafted
    assert ran.cached > 0
    assert (ran.shifted > 0) == ahead


def test_right_drafts_save_steps(plain: Run) -> None:
    proposer = Replaying(plain.tokens, PATTERNS["right"])
    ran = run("torch_cuda", proposer, spec=EVERY_KIND, max_drafts=3, async_scheduling=True, **KEPT)
    assert_equal(ran, plain)
    assert ran.steps < plain.steps * 0.6


def test_drafts_under_preemption(plain: Run) -> None:
    settings = {"max_drafts": 3, "async_scheduling": True, **KEPT}
    ran = run("torch_cuda", Replaying(plain.tokens, mixed), spec=EVERY_KIND, num_blocks=17, **settings)
    assert ran.preemptions > 0
    assert_equal(ran, plain)
