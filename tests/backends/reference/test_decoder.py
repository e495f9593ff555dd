"""The fast paged path against the naive oracle: chunks, batches, scattered blocks, windows, soft caps, experts."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.reference_driver import random_weights, tiny_spec

from pagoda.backends.reference.model.naive import NaiveModel
from pagoda.common.engine.sampling import SamplingRules
from pagoda.common.engine.step import PREVIOUS

SPECS = {
    "full": tiny_spec(),
    "window": tiny_spec(window=6),
    "softcap": tiny_spec(window=6, softcap=2.0),
    "moe": tiny_spec(moe=True),
}
PROMPT = [5, 17, 3, 80, 41, 2, 9, 60, 33, 21, 7, 8, 90]
EVERYTHING = SamplingRules(logprobs=-1, prompt_logprobs=-1)


def by_token(logprobs) -> np.ndarray:
    """[n, V] logprobs in vocabulary order."""
    out = np.full((len(logprobs.ranks), 96), np.nan, np.float32)
    np.put_along_axis(out, logprobs.token_ids[:, 1:], logprobs.logprobs[:, 1:], 1)
    return out


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


@pytest.mark.parametrize("kind", SPECS)
def test_a_mixed_batch_answers_like_one_at_a_time(driver, kind: str) -> None:
    spec = SPECS[kind]
    prompts = [[(7 * i + j * j) % 96 for j in range(2 + 3 * i)] for i in range(5)]
    alone = [driver(spec).generate(prompt, 8) for prompt in prompts]
    d = driver(spec, "scattered")
    outputs: dict[int, list[int]] = {i: [] for i in range(5)}
    pending = dict(enumerate(prompts))
    while any(len(tokens) < 8 for tokens in outputs.values()):
        pieces, starts = {}, []
        for row, tokens in outputs.items():
            if tokens and len(tokens) < 8:
                pieces[row] = [PREVIOUS]
        if pending:  # one prompt joins per step, beside the rows already decoding
            row, prompt = pending.popitem()
            pieces[row] = prompt
            starts.append(d.start(row, prompt))
        rows, result = d.step(pieces, starts)
        for row, token in zip(rows, result.token_ids):
            outputs[row].append(int(token))
    assert [outputs[i] for i in range(5)] == alone


def test_rows_share_blocks_that_are_filled_in_the_same_step(driver) -> None:
    spec = SPECS["full"]
    d = driver(spec)
    d.tables[0][1, :2] = d.tables[0][0, :2]  # row 1 reuses row 0's first eight tokens
    alone = driver(spec).generate(PROMPT, 1)
    d_starts = [d.start(0, PROMPT), d.start(1, PROMPT)]
    d.context[1] = 8
    _, result = d.step({0: PROMPT, 1: PROMPT[8:]}, d_starts)
    assert result.token_ids.tolist() == alone * 2


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_weights_stay_near_float32(driver, dtype: str) -> None:
    spec = SPECS["full"]
    wide = {name: torch.from_numpy(w) for name, w in random_weights(spec)}
    rounded = ((n, w.to(getattr(torch, dtype)).float().numpy()) for n, w in wide.items())
    want = NaiveModel(spec, rounded).logits(PROMPT).log_softmax(-1)[-1].numpy()
    d = driver(spec, dtype=dtype)
    _, result = d.step({0: PROMPT}, [d.start(0, PROMPT, EVERYTHING)])
    np.testing.assert_allclose(by_token(result.logprobs[0])[0], want, atol=0.05)
