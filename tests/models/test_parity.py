"""Every family, in every implementation, against transformers in float32."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from models import tiny
from models.compiled_cases import COMPILED, traits
from support.paged_model import PagedModel
from support.refusals import is_refused

from pagoda.backends.reference.model.naive import NaiveModel
from pagoda.common.backend import Weight
from pagoda.common.models.registry import ARCHITECTURES, spec_from_config, within_context
from pagoda.common.models.shapes import params
from pagoda.common.models.spec import ModelSpec
from pagoda.common.weights.checkpoint import open_checkpoint
from pagoda.common.weights.rules import apply_rules

TOLERANCE = 3e-5
OTHER_NAMES = {
    *("AquilaForCausalLM", "ChatGLMForConditionalGeneration", "Ernie4_5_ForCausalLM", "GritLM", "InternLMForCausalLM"),
    *("LLaMAForCausalLM", "MPTForCausalLM", "PhiMoEForCausalLM", "RWForCausalLM", "StableLMEpochForCausalLM"),
    *("TeleChat3ForCausalLM", "XverseForCausalLM", "DotsOCRForCausalLM", "Param2MoEForCausalLM"),
    *("SarvamMoEForCausalLM", "TeleChatForCausalLM", "MiniMaxText01ForCausalLM"),
    *("MistralLarge3ForCausalLM", "MiMoV2ForCausalLM"),
}
"""Architectures of the same families as others in the matrix."""
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
    folder: Path
    token_ids: list[int]
    """A prompt, then the tokens that transformers answers greedily."""
    logits: torch.Tensor
    """Those of transformers, [T, V]."""

    @property
    def spec(self) -> ModelSpec:
        spec = spec_from_config(open_checkpoint(self.folder).config())[0]
        return within_context(spec, tiny.TOKENS + GREEDY)

    def runs_on(self, implementation: str) -> bool:
        if self.case.names_only and implementation not in ("naive", "paged"):
            return False
        return not is_refused(self.case.architecture, self.spec, implementation)

    def weights(self) -> Iterator[Weight]:
        checkpoint = open_checkpoint(self.folder)
        spec, family = spec_from_config(checkpoint.config())
        return apply_rules(family.rules, params(spec), checkpoint.tensors(), family.ignored)


@pytest.fixture(scope="module")
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    case: tiny.Tiny = request.param
    folder = tmp_path_factory.mktemp(case.name)
    model = case.save(folder)
    token_ids = tiny.tokens()
    for _ in range(0 if case.grows else GREEDY):  # if frequencies grow, each length is another model
        token_ids.append(int(tiny.logits(model, token_ids)[-1].argmax()))
    return Saved(case, folder, token_ids, tiny.logits(model, token_ids))


def is_usual(case: tiny.Tiny, implementation: str) -> bool:
    """Whether `make test` runs it."""
    return implementation != "jax_tpu" or case.name in COMPILED


@pytest.mark.parametrize(
    ("saved", "implementation"),
    [
        pytest.param(
            *(case, name),
            id=f"{case.name}-{name}",
            marks=() if is_usual(case, name) else pytest.mark.slow_matrix,
        )
        for case in tiny.TINY
        for name in IMPLEMENTATIONS
    ],
    indirect=["saved"],
)
def test_logits_and_greedy_tokens(saved: Saved, implementation: str):
    """Half of the sequence as one prompt, the rest token by token, where the implementation has a cache."""
    if not saved.runs_on(implementation):
        return
    ours = IMPLEMENTATIONS[implementation](saved.spec, saved.weights(), len(saved.token_ids))(saved.token_ids)
    assert saved.logits.std() > 0.1, "a flat answer proves nothing"
    torch.testing.assert_close(ours, saved.logits, atol=TOLERANCE, rtol=0)
    assert ours[tiny.TOKENS - 1 : -1].argmax(1).tolist() == saved.token_ids[tiny.TOKENS :]


def test_cases_that_are_compiled_have_every_trait():
    """Whoever adds a case with a new trait adds its name to COMPILED."""
    everywhere = [case for case in tiny.TINY if not case.names_only]
    assert {case.name for case in everywhere} >= COMPILED
    compiled = set().union(*(traits(case) for case in everywhere if case.name in COMPILED))
    lacking = {case.name: found for case in everywhere if (found := traits(case) - compiled)}
    assert not lacking


def test_every_family_is_covered():
    assert {case.architecture for case in tiny.TINY} == set(ARCHITECTURES) - OTHER_NAMES
