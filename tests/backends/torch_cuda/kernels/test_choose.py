"""The sampler with all its kernels, in Triton's interpreter, against the definition."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from support.sampling_definition import ROWS, VOCAB, decode_step
from support.torch_sampling import INTERPRETED, follows_the_definition, run

from pagoda.backends.torch_cuda.sampling import CudaSampler
from pagoda.common.engine.sampling import SamplingRules
from pagoda.common.engine.step import RowStart

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck), phases=[Phase.generate])
@given(ROWS, st.integers(0, 2**31), st.sampled_from([1.0, 6.0]))
def test_tokens_follow_the_definition(rows, seed: int, spread: float) -> None:
    follows_the_definition(INTERPRETED, rows, seed, spread)


def test_a_seed_gives_the_same_token_in_any_batch() -> None:
    logits = (np.random.default_rng(3).standard_normal((4, VOCAB)) * 3).astype(np.float32)
    sampler = CudaSampler(VOCAB, 8, 32, INTERPRETED)
    for row, top_k in enumerate((0, 40, 0, 7)):
        rules = SamplingRules(temperature=1.0, seed=row, top_k=top_k, top_p=0.9)
        sampler.start(RowStart(row, np.zeros(3, np.int32), 3, rules))
    together, _ = run(sampler, logits, decode_step([3] * 4), 8)
    for row in range(4):
        alone, _ = run(sampler, logits[row : row + 1], decode_step([3], [row]))
        assert alone.tolist() == [together[row]]
