"""What every backend does with plans: logprobs, chunks, batches, shared blocks, types of numbers, weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import support.devices.jax_devices
from support.engines.backend_options import make_options
from support.engines.reference_driver import Driver, by_token, random_weights, tiny_spec
from support.suite.shared_programs import SharedPrograms
from support.suite.slow_matrix import thinned

from pagoda.backends.reference.model.naive.model import NaiveModel
from pagoda.backends.registry import load_backend
from pagoda.backends.torch_cuda.device import CPU
from pagoda.common.config.engine import Limits
from pagoda.common.engine.sampling.rules import SamplingRules
from pagoda.common.engine.steps.contract import PREVIOUS
from pagoda.common.errors import WeightError

assert support.devices.jax_devices.DEVICES > 1

OPTIONS: dict[str, dict[str, Any]] = {
    "reference": {"backend": "reference"},
    "torch_cuda": {"backend": "torch_cuda", "device": CPU},
    "jax_tpu": {"backend": "jax_tpu"},
    "jax_tpu on two devices": {"backend": "jax_tpu", "tensor": 2},
}
BACKENDS = [name for name in OPTIONS if "two" not in name]
SPECS = {
    "full": tiny_spec(),
    "window": tiny_spec(window=6),
    "softcap": tiny_spec(window=6, softcap=2.0),
    "moe": tiny_spec(moe=True),
}
PROMPT = [5, 17, 3, 80, 41, 2, 9, 60, 33, 21, 7, 8, 90]
EVERYTHING = SamplingRules(logprobs=-1, prompt_logprobs=-1)
Make = Callable[..., Driver]


@pytest.fixture(scope="module")
def programs() -> Iterator[SharedPrograms]:
    shared = SharedPrograms()
    yield shared
    shared.clear()


@pytest.fixture
def make(programs: SharedPrograms) -> Iterator[Make]:
    """Return a function that makes drivers of a backend of `OPTIONS`, closed at the end."""
    drivers: list[Driver] = []

    def made(backend: str, kind: str = "full", order: str = "scattered", **more: Any) -> Driver:
        drivers.append(Driver(SPECS[kind], order, block_size=8, **OPTIONS[backend], **more))
        programs.join(drivers[-1].backend)
        return drivers[-1]

    yield made
    for one in drivers:
        one.backend.close()


def of_jax(backend: str, kind: str) -> bool:
    """jax_tpu compiles for each kind: one on one device, others on two, of which `softcap` has a window."""
    return kind == "full" if backend == "jax_tpu" else kind in ("softcap", "moe")


@thinned(
    lambda backend, kind, order: of_jax(backend, kind) and order != "consecutive" if "jax" in backend else True,
    backend=list(OPTIONS),
    kind=list(SPECS),
    order=["consecutive", "scattered"],
)
def test_logprobs_equal_the_naive_model(make: Make, backend: str, kind: str, order: str) -> None:
    """Of a prompt in chunks, one of them a single token, and of what is generated."""
    naive = NaiveModel(SPECS[kind], random_weights(SPECS[kind]))
    d = make(backend, kind, order)
    want = naive.logits(PROMPT).log_softmax(-1).numpy()
    _, first = d.step({3: PROMPT[:6]}, [d.start(3, PROMPT, EVERYTHING)], {3: False})
    _, second = d.step({3: PROMPT[6:7]}, samples={3: False})
    _, result = d.step({3: PROMPT[7:]})
    scores = [by_token(part.prompt_logprobs[0]) for part in (first, second, result)]
    np.testing.assert_allclose(np.concatenate(scores), want[:-1], atol=3e-5)
    tokens = list(PROMPT)
    for _ in range(6):
        want = naive.logits(tokens).log_softmax(-1)[-1].numpy()
        np.testing.assert_allclose(by_token(result.logprobs[0])[0], want, atol=3e-5)
        assert result.token_ids[0] == want.argmax()
        tokens.append(int(result.token_ids[0]))
        _, result = d.step({3: [PREVIOUS]})


@thinned(lambda backend, kind: backend != "jax_tpu" or kind == "full", backend=BACKENDS, kind=list(SPECS))
def test_a_mixed_batch_answers_like_one_at_a_time(make: Make, backend: str, kind: str) -> None:
    prompts = [[(7 * i + j * j) % 96 for j in range(2 + 3 * i)] for i in range(5)]
    one = make(backend, kind)
    alone = [one.generate(prompt, 8, row=row) for row, prompt in enumerate(prompts)]
    d = make(backend, kind)
    outputs: dict[int, list[int]] = {i: [] for i in range(5)}
    waiting = dict(enumerate(prompts))
    while any(len(tokens) < 8 for tokens in outputs.values()):
        pieces = {row: [PREVIOUS] for row, tokens in outputs.items() if tokens and len(tokens) < 8}
        starts = []
        if waiting:  # one prompt joins per step, beside the rows already decoding
            row, prompt = waiting.popitem()
            pieces[row] = prompt
            starts.append(d.start(row, prompt))
        rows, result = d.step(pieces, starts)
        for row, token in zip(rows, result.token_ids):
            outputs[row].append(int(token))
    assert [outputs[i] for i in range(5)] == alone


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_share_blocks_that_are_filled_in_the_same_step(make: Make, backend: str) -> None:
    alone = make(backend).generate(PROMPT, 1)
    d = make(backend)
    d.tables[0][1, 0] = d.tables[0][0, 0]  # row 1 reuses row 0's first eight tokens
    starts = [d.start(0, PROMPT), d.start(1, PROMPT)]
    d.context[1] = 8
    _, result = d.step({0: PROMPT, 1: PROMPT[8:]}, starts)
    assert result.token_ids.tolist() == alone * 2


@pytest.mark.parametrize(
    ("backend", "dtype"), [(name, "bfloat16") for name in BACKENDS] + [(name, "float16") for name in BACKENDS[:2]]
)
def test_narrow_numbers_stay_close(make: Make, backend: str, dtype: str) -> None:
    want = NaiveModel(SPECS["full"], random_weights(SPECS["full"])).logits(PROMPT).log_softmax(-1).numpy()
    d = make(backend, dtype=dtype)
    _, result = d.step({3: PROMPT}, [d.start(3, PROMPT, EVERYTHING)])
    assert 1e-4 < np.abs(by_token(result.prompt_logprobs[0]) - want[:-1]).max() < 0.2


@pytest.mark.parametrize("backend", BACKENDS)
def test_weights_are_strict_both_ways(backend: str) -> None:
    weights = dict(random_weights(SPECS["full"]))
    limits = Limits(max_model_len=64, max_num_batched_tokens=48, max_num_seqs=12, block_size=8)
    device = {"device": CPU} if backend == "torch_cuda" else {}
    made = load_backend(backend).create(make_options(SPECS["full"], limits=limits), **device)
    missing = dict(list(weights.items())[:-1])
    with pytest.raises(WeightError, match="lacks 1 parameters, first head"):
        made.load(missing.items())
    with pytest.raises(WeightError, match="stray is unknown"):
        made.load({**weights, "stray": np.zeros(3, np.float32)}.items())
    with pytest.raises(WeightError, match=r"embed has shape \(3,\)"):
        made.load({**weights, "embed": np.zeros(3, np.float32)}.items())
