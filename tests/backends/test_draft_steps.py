"""Hand-made steps with drafts on the accelerators' backends, planned ahead: same tokens as one at a time."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import pytest
import support.jax_devices  # noqa: F401
from support.draft_host import DraftHost, Sequence
from support.reference_driver import Driver, tiny_spec

from pagoda.backends.torch_cuda.device import CPU
from pagoda.backends.torch_cuda.execution.runner import StepPrograms
from pagoda.common.engine.sampling import SamplingRules

SPECS = {"full": tiny_spec(), "windows": tiny_spec(window=6, moe=True)}
VOCAB = SPECS["full"].vocab
RULES = (
    SamplingRules(logprobs=0),
    SamplingRules(temperature=1.0, seed=5, logprobs=2),
    SamplingRules(temperature=0.8, top_k=20, top_p=0.9, seed=(1 << 40) + 3),
    SamplingRules(
        temperature=0.7,
        seed=9,
        repetition_penalty=1.5,
        frequency_penalty=0.9,
        presence_penalty=0.5,
        allowed_token_ids=tuple(range(16)),
    ),
    SamplingRules(
        temperature=1.5,
        seed=2,
        bad_words=tuple((a, b) for a in range(9) for b in range(9) if (a + b) % 3),
        allowed_token_ids=tuple(range(9)),
    ),
    SamplingRules(frequency_penalty=2.0, logit_bias=((5, 1.0),), min_tokens=3, stop_ids=(7,)),
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


def make_driver(backend: str, model: str, drafts: int, block_size: int = 8, **options) -> Driver:
    device = {"device": CPU} if backend == "torch_cuda" else {}
    rows = len(RULES)
    sizes = {"rows": rows, "block_size": block_size, "max_len": 64, "step_tokens": max(64, rows * (1 + drafts))}
    return Driver(SPECS[model], "scattered", backend=backend, max_drafts=drafts, **sizes, **device, **options)


@lru_cache
def one_by_one(model: str) -> list[Sequence]:
    """What the sequences generate one token per step, on torch_cuda: jax_tpu would compile further programs."""
    driver, work = make_driver("torch_cuda", model, 0), sequences()
    DraftHost(driver, VOCAB, drafts=0, ahead=False).serve(work)
    driver.backend.close()
    return work


def check(driver: Driver, model: str, drafts: int, *, ahead: bool = True) -> DraftHost:
    want, work = one_by_one(model), sequences()
    known = {one.row: one.tokens for one in want}
    host = DraftHost(driver, VOCAB, drafts=drafts, ahead=ahead, answers=known, seed=drafts)
    tokens = host.serve(work)
    driver.backend.close()
    assert tokens == known
    assert sum(one.rejected for one in work) > 10
    for one, other in zip(work, want):
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-4)
    assert sum(len(result.token_ids.shape) == 2 for result in host.results) > 5
    return host


@pytest.mark.parametrize("drafts", [1, 2, 7, 9])
@pytest.mark.parametrize("model", SPECS)
def test_torch_cuda(monkeypatch: pytest.MonkeyPatch, model: str, drafts: int) -> None:
    """Decodes with drafts are padded to one length, as in a graph, up to the most that attention takes."""
    decode, widths = StepPrograms.decode, []
    monkeypatch.setattr(
        StepPrograms, "decode", lambda *args, **kwargs: widths.append(args[2]) or decode(*args, **kwargs)
    )
    check(make_driver("torch_cuda", model, drafts), model, drafts)
    assert set(widths) == ({1, 1 + drafts} if drafts < 8 else {1})


def test_torch_cuda_in_turn() -> None:
    check(make_driver("torch_cuda", "full", 3), "full", 3, ahead=False)


@pytest.mark.parametrize("drafts", [pytest.param(1, marks=pytest.mark.slow_matrix), 7])
def test_jax_tpu(drafts: int) -> None:
    check(make_driver("jax_tpu", "windows", drafts), "windows", drafts)


def test_jax_tpu_compiles_nothing_after_the_warm_up() -> None:
    driver = make_driver("jax_tpu", "full", 3, block_size=64, strict=True)  # one number of pages
    driver.backend.warmup()
    host = check(driver, "full", 3)
    assert not host.recompiles
