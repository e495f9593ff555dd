"""Every family, in every implementation, against transformers in float32."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import transformers
from models import tiny
from support.paged_model import PagedModel
from support.refusals import is_refused

from pagoda.backends.reference.model.naive import NaiveModel
from pagoda.common.backend import Weight
from pagoda.common.models.registry import ARCHITECTURES, spec_from_config
from pagoda.common.models.shapes import params
from pagoda.common.models.spec import ModelSpec
from pagoda.common.weights.checkpoint import open_checkpoint
from pagoda.common.weights.rules import apply_rules

TOLERANCE = 3e-5
GREEDY = 8

Implementation = Callable[[ModelSpec, Iterable[Weight], int], tiny.Logits]


def naive(spec: ModelSpec, weights: Iterable[Weight], max_len: int) -> tiny.Logits:
    return NaiveModel(spec, weights, max_len=max_len).logits


def paged(spec: ModelSpec, weights: Iterable[Weight], max_len: int) -> tiny.Logits:
    return PagedModel(spec, weights, max_len).logits


def jax_tpu(spec: ModelSpec, weights: Iterable[Weight], max_len: int) -> tiny.Logits:
    from support.jax_model import JaxModel

    return JaxModel(spec, weights, max_len).logits


def torch_cuda(spec: ModelSpec, weights: Iterable[Weight], max_len: int) -> tiny.Logits:
    from support.torch_cuda_model import TorchCudaModel

    return TorchCudaModel(spec, weights, max_len).logits


IMPLEMENTATIONS: dict[str, Implementation] = {"naive": naive, "paged": paged}
if find_spec("triton") is not None:
    IMPLEMENTATIONS["torch_cuda"] = torch_cuda
if find_spec("flax") is not None:
    IMPLEMENTATIONS["jax_tpu"] = jax_tpu


@dataclass
class Saved:
    case: tiny.Tiny
    model: transformers.PreTrainedModel
    folder: Path

    @property
    def spec(self) -> ModelSpec:
        return spec_from_config(open_checkpoint(self.folder).config())[0]

    def weights(self) -> Iterator[Weight]:
        checkpoint = open_checkpoint(self.folder)
        spec, family = spec_from_config(checkpoint.config())
        return apply_rules(family.rules, params(spec), checkpoint.tensors(), family.ignored)


@pytest.fixture(scope="module", params=tiny.TINY, ids=lambda case: case.name)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    folder = tmp_path_factory.mktemp(request.param.name)
    return Saved(request.param, request.param.save(folder), folder)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_logits(saved: Saved, implementation: str):
    if is_refused(saved.case.architecture, saved.spec, implementation):
        return
    prompt = tiny.tokens()
    ours = IMPLEMENTATIONS[implementation](saved.spec, saved.weights(), len(prompt))(prompt)
    theirs = tiny.logits(saved.model, prompt)
    assert theirs.std() > 0.1, "a flat answer proves nothing"
    torch.testing.assert_close(ours, theirs, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_greedy_tokens(saved: Saved, implementation: str):
    """Each token from a whole forward pass of both, so that nothing but the model is compared."""
    if saved.case.grows:
        pytest.skip("transformers changes its frequencies at every length")
    if is_refused(saved.case.architecture, saved.spec, implementation):
        return
    prompt = tiny.tokens(seed=1)
    ours = IMPLEMENTATIONS[implementation](saved.spec, saved.weights(), len(prompt) + GREEDY)
    theirs = list(prompt)
    mine = list(prompt)
    for _ in range(GREEDY):
        theirs.append(int(tiny.logits(saved.model, theirs)[-1].argmax()))
        mine.append(int(ours(mine)[-1].argmax()))
    assert mine == theirs


def test_every_family_is_covered():
    same_family_as_llama = {"LLaMAForCausalLM"}
    assert {case.architecture for case in tiny.TINY} == set(ARCHITECTURES) - same_family_as_llama
