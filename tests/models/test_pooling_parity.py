"""Every family that pools, in every implementation, against transformers in float32."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from models import tiny, tiny_pooling
from models.tiny_pooling import CASES, Case
from support.backend_options import make_pooling_options
from support.pooling_plans import plan_of
from support.refusals import is_refused

from pagoda.backends.reference import pooling as reference
from pagoda.common.backend import PoolingBackend, Weight
from pagoda.common.config.engine import Limits
from pagoda.common.config.groups.pooler import PoolerConfig
from pagoda.common.engine.messages import pooling_request
from pagoda.common.engine.pooling import PoolingRules
from pagoda.common.models.registry import ENCODERS, find, pooling_spec
from pagoda.common.models.shapes import params
from pagoda.common.models.spec import ModelSpec
from pagoda.common.weights.checkpoint import open_checkpoint
from pagoda.common.weights.rules import apply_rules

TOLERANCE = 3e-5
LENGTHS = (1, 12, 30, 12, 3)
"""Lengths of the prompts: longer than the windows, two equal ones, one token."""
LIMITS = Limits(max_model_len=40, max_num_batched_tokens=64, max_num_seqs=8, block_size=16)

Make = Callable[[ModelSpec], PoolingBackend]


def torch_cuda(spec: ModelSpec) -> PoolingBackend:
    from pagoda.backends.torch_cuda.device import CPU
    from pagoda.backends.torch_cuda.pooling import TorchCudaPooling

    return TorchCudaPooling(spec, LIMITS, torch.float32, CPU)


def jax_tpu(spec: ModelSpec) -> PoolingBackend:
    import support.jax_devices  # noqa: F401

    from pagoda.backends.jax_tpu import pooling

    return pooling.create(make_pooling_options(spec, limits=LIMITS))


IMPLEMENTATIONS: dict[str, Make] = {
    "reference": lambda spec: reference.create(make_pooling_options(spec, limits=LIMITS)),
}
if find_spec("triton") is not None:
    IMPLEMENTATIONS["torch_cuda"] = torch_cuda
if find_spec("flax") is not None:
    IMPLEMENTATIONS["jax_tpu"] = jax_tpu


@dataclass
class Saved:
    case: Case
    model: transformers.PreTrainedModel
    folder: Path

    def built(self) -> tuple[ModelSpec, Iterator[Weight]]:
        checkpoint = open_checkpoint(self.folder)
        spec, family = pooling_spec(checkpoint.config(), self.case.use, None, PoolerConfig())
        return spec, apply_rules(family.rules, params(spec), checkpoint.tensors(), family.ignored)


@pytest.fixture(scope="module", params=CASES, ids=lambda case: case.name)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    folder = tmp_path_factory.mktemp(request.param.name)
    return Saved(request.param, request.param.tiny.save(folder), folder)


def rules_of(case: Case, second: int | None) -> PoolingRules:
    task = {"embed": "embed", "classify": "classify", "token_classify": "token_classify"}[case.use]
    return PoolingRules(task=task, use_activation=False, second_text=second)


COMPILED = ("bert-classify", "modernbert-mean", "modernbert-tokens", "gemma3-both-ways", "qwen3-score", "mixtral")
"""Cases that have every mechanism, for the implementation that compiles for seconds."""


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_answers(saved: Saved, implementation: str):
    """A batch of prompts against one prompt at a time."""
    if implementation == "jax_tpu" and saved.case.name not in COMPILED:
        pytest.skip("its mechanisms are in other cases")
    prompts = [tiny.tokens(length, seed=length + index) for index, length in enumerate(LENGTHS)]
    if saved.case.base is tiny_pooling.SMALL_BERT or saved.case.architecture.startswith(
        ("Llama", "GPT2", "Qwen", "Deepseek")
    ):
        prompts = [[token % (tiny.VOCAB - 5) + 5 for token in prompt] for prompt in prompts]  # none is padding
    seconds = [None, 9, 25, None, 2] if saved.case.types else [None] * len(prompts)
    spec, weights = saved.built()
    if is_refused(saved.case.architecture, spec, implementation):
        return
    backend = IMPLEMENTATIONS[implementation](spec)
    try:
        backend.load(weights)
        backend.warmup()
        requests = tuple(
            pooling_request(str(index), prompt, rules_of(saved.case, second))
            for index, (prompt, second) in enumerate(zip(prompts, seconds))
        )
        ours = backend.execute(plan_of(requests)).result().vectors
        alone = [backend.execute(plan_of((request,))).result().vectors[0] for request in requests]
    finally:
        backend.close()
    for prompt, second, answer, single in zip(prompts, seconds, ours, alone):
        theirs = tiny_pooling.theirs(saved.case, saved.model, prompt, second)
        np.testing.assert_allclose(answer, theirs.numpy(), atol=TOLERANCE, rtol=0)
        np.testing.assert_allclose(answer, single, atol=1e-5)
    assert np.ptp(np.concatenate([answer.ravel() for answer in ours])) > 0.1, "a flat answer proves nothing"


def test_every_encoder_is_covered():
    covered = {id(find(case.architecture)[0]) for case in CASES}
    assert {id(find(f"{stem}Model")[0]) for stem in ENCODERS} <= covered
