"""The fast paged path against the naive oracle: chunks, batches, scattered blocks, windows, soft caps, experts."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.engines.reference_driver import by_token, random_weights, tiny_spec

from pagoda.backends.reference.model.naive.model import NaiveModel
from pagoda.common.engine.sampling.rules import SamplingRules
from pagoda.common.engine.steps.contract import PREVIOUS

SPECS = {
    "full": tiny_spec(),
    "window": tiny_spec(window=6),
    "softcap": tiny_spec(window=6, softcap=2.0),
    "moe": tiny_spec(moe=True),
}
PROMPT = [5, 17, 3, 80, 41, 2, 9, 60, 33, 21, 7, 8, 90]
EVERYTHING = SamplingRules(logprobs=-1, prompt_logprobs=-1)


@pytest.mark.parametrize("kind", SPECS)
@pytest.mark.parametrize("order", ["consecutive", "scattered"])
@pytest.mark.parametrize("chunk", [13, 5, 1])
def test_logprobs_equal_the_naive_model(driver, kind: str, order: str, chunk: int) -> None:
    spec = SPECS[kind]
    naive = NaiveModel(spec, random_weights(spec))
    d = driver(spec, order)
    starts, prompt_parts, result = [d.start(3, PROMPT, EVERYTHING)], [], None
    for begin in range(0, len(PROMPT), chunk):
        piece = PROMPT[begin : begin + chunk]
        _, result = d.step({3: piece}, starts, {3: begin + chunk >= len(PROMPT)})
        starts = []
        if result.prompt_logprobs:
            prompt_parts.append(by_token(result.prompt_logprobs[0]))
    want = naive.logits(PROMPT).log_softmax(-1).numpy()
    np.testing.assert_allclose(np.concatenate(prompt_parts), want[:-1], atol=3e-5)
    tokens = list(PROMPT)
    for _ in range(6):
        want = naive.logits(tokens).log_softmax(-1)[-1].numpy()
        np.testing.assert_allclose(by_token(result.logprobs[0])[0], want, atol=3e-5)
        assert result.token_ids[0] == want.argmax()
        tokens.append(int(result.token_ids[0]))
        _, result = d.step({3: [PREVIOUS]})


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_weights_stay_near_float32(driver, dtype: str) -> None:
    spec = SPECS["full"]
    wide = {name: torch.from_numpy(w) for name, w in random_weights(spec)}
    rounded = ((n, w.to(getattr(torch, dtype)).float().numpy()) for n, w in wide.items())
    want = NaiveModel(spec, rounded).logits(PROMPT).log_softmax(-1)[-1].numpy()
    d = driver(spec, dtype=dtype)
    _, result = d.step({0: PROMPT}, [d.start(0, PROMPT, EVERYTHING)])
    np.testing.assert_allclose(by_token(result.logprobs[0])[0], want, atol=0.05)
