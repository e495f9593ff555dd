"""Steps with drafts on the accelerators' backends, planned ahead of the results: same tokens as one at a time."""

from __future__ import annotations

import numpy as np
import pytest
import support.jax_devices  # noqa: F401
from support.draft_host import DraftHost, Sequence
from support.reference_driver import Driver, tiny_spec

from pagoda.backends.torch_cuda.device import CPU
from pagoda.common.engine.sampling import SamplingRules

SPEC = tiny_spec(window=6)
BACKENDS = ["torch_cuda", "jax_tpu"]
SEEDED = SamplingRules(temperature=1.0, seed=5, logprobs=2)
RULES = (
    SamplingRules(logprobs=0),
    SEEDED,
    SamplingRules(temperature=0.8, top_k=20, top_p=0.9, seed=(1 << 40) + 3),
    SamplingRules(temperature=0.7, seed=9, repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=0.2),
    SamplingRules(temperature=1.5, seed=2, bad_words=tuple((a, b) for a in range(40) for b in range(3, 7))),
    SamplingRules(repetition_penalty=1.2, logit_bias=((5, 1.0),), min_tokens=3, stop_ids=(7,)),
    SamplingRules(temperature=1.0, seed=4, allowed_token_ids=tuple(range(0, 96, 3)), logprobs=1),
    SamplingRules(temperature=1.0, seed=8),
)


def sequences(count: int = 16) -> list[Sequence]:
    """One of each kind, half of the random ones under masks."""
    rng = np.random.default_rng(3)
    return [
        Sequence(row, rng.integers(1, 96, 1 + 4 * (row % 4)).tolist(), count + row, rules, masked=row in (1, 5, 7))
        for row, rules in enumerate(RULES)
    ]


def make_driver(backend: str, drafts: int, **options) -> Driver:
    device = {"device": CPU} if backend == "torch_cuda" else {}
    return Driver(SPEC, "scattered", 8, 8, backend=backend, max_drafts=drafts, **device, **options)


@pytest.fixture(scope="module", params=BACKENDS)
def answers(request: pytest.FixtureRequest) -> tuple[str, list[Sequence]]:
    """A backend, and what its sequences generate one token per step."""
    driver, work = make_driver(request.param, 0), sequences()
    DraftHost(driver, SPEC.vocab, drafts=0, ahead=False).serve(work)
    driver.backend.close()
    return request.param, work


@pytest.mark.parametrize("drafts", [1, 2, 3, 7])
@pytest.mark.parametrize("ahead", [False, True])
def test_drafts_change_no_token(answers: tuple[str, list[Sequence]], drafts: int, ahead: bool) -> None:
    backend, want = answers
    driver, work = make_driver(backend, drafts), sequences()
    known = {one.row: one.tokens for one in want}
    host = DraftHost(driver, SPEC.vocab, drafts=drafts, ahead=ahead, answers=known, seed=drafts)
    tokens = host.serve(work)
    driver.backend.close()
    assert tokens == known
    assert sum(one.rejected for one in work) > 10
    for one, other in zip(work, want):
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-4)
    assert sum(len(result.token_ids.shape) == 2 for result in host.results) > 5
