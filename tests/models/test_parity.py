"""Every family on the reference backend, read by its reader and name rules, against logits that transformers gave.

With `slow_matrix` on the other backends, too: `make test` runs their model code on the models of `test_stacks.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext

import pytest
import torch
from models.oracles.implementations import ACCELERATED, IMPLEMENTATIONS
from models.oracles.kept_logits import GREEDY, POSITIONS, TOKENS, Kept, read_cases, read_logits

from pagoda.common.errors import ModelError
from pagoda.common.models.mixers import Attention, LatentAttention
from pagoda.common.models.registry import ARCHITECTURES, spec_from_config

TOLERANCE = 3e-5
"""Rounding to float32 on both sides."""
TOLERANCE_OF_ACCELERATED = 5e-5
"""The same where sums have another order, and exponentials another implementation on each kind of processor."""
OTHER_NAMES = {
    *("AquilaForCausalLM", "ChatGLMForConditionalGeneration", "Ernie4_5_ForCausalLM", "GritLM", "InternLMForCausalLM"),
    *("LLaMAForCausalLM", "MPTForCausalLM", "PhiMoEForCausalLM", "RWForCausalLM", "StableLMEpochForCausalLM"),
    *("TeleChat3ForCausalLM", "XverseForCausalLM", "DotsOCRForCausalLM", "Param2MoEForCausalLM"),
    *("SarvamMoEForCausalLM", "TeleChatForCausalLM", "MiniMaxText01ForCausalLM"),
    *("MistralLarge3ForCausalLM", "MiMoV2ForCausalLM", "MiniMaxM3ForCausalLM", "ExaoneMoEForCausalLM"),
}
"""Architectures of the same families as others among the cases."""
CASES = read_cases()


@pytest.fixture(scope="module")
def kept() -> Mapping[str, torch.Tensor]:
    return read_logits()


@pytest.mark.parametrize(
    ("case", "implementation"),
    [
        pytest.param(case, name, id=f"{case.name}-{name}", marks=pytest.mark.slow_matrix if name in ACCELERATED else ())
        for case in CASES.values()
        for name in IMPLEMENTATIONS
        if not (case.names_only and name in ACCELERATED)  # their maths are those of another case
    ],
)
def test_logits_and_greedy_tokens(case: Kept, implementation: str, kept: Mapping[str, torch.Tensor]) -> None:
    """Half of the sequence as one prompt, the rest token by token, where the implementation has a cache."""
    expected = kept[case.name]
    ours = IMPLEMENTATIONS[implementation](case.spec, case.weights(), len(case.token_ids))(case.token_ids)
    assert expected.std() > 0.1, "a flat answer proves nothing"
    tolerance = TOLERANCE_OF_ACCELERATED if implementation in ACCELERATED else TOLERANCE
    torch.testing.assert_close(ours[list(POSITIONS)], expected, atol=tolerance, rtol=0)
    assert ours[TOKENS - 1 : -1].argmax(1).tolist() == case.token_ids[TOKENS:]


MLP_ALONE = {"Zamba2ForCausalLM", "BailingMoeV3ForCausalLM", "BailingMoeV2_5ForCausalLM"}
"""Recurrent families whose `hidden_act` is the activation of the MLP alone: their convolutions have SiLU, or none."""


def test_an_activation_that_mixers_have_too_is_refused() -> None:
    """In transformers that of the convolution, or of queries, keys and values, is `hidden_act`; here it is SiLU."""
    recurrent = [case for case in CASES.values() if not all(isinstance(each, _ATTENTION) for each in case.spec.mixers)]
    assert len(recurrent) > 20
    for case in recurrent:
        refused = pytest.raises(ModelError, match="hidden_act")
        with nullcontext() if case.architecture in MLP_ALONE else refused:
            spec_from_config({**case.config, "hidden_act": "gelu"})


_ATTENTION = Attention | LatentAttention


def test_every_family_is_covered() -> None:
    assert {case.architecture for case in CASES.values()} == set(ARCHITECTURES) - OTHER_NAMES
    assert all(len(case.token_ids) == TOKENS + GREEDY for case in CASES.values())
