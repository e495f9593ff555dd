"""Every way a linear map is computed, against torch's own product in float32, for few tokens and for many."""

from __future__ import annotations

import pytest
import torch

from pagoda.backends.reference.model.linear import FEW_TOKENS, WidenedLinear, float32_linear, linear
from pagoda.backends.reference.model.numerics import Numerics

WIDENED = Numerics(torch.bfloat16, torch.float32)
PLAIN = Numerics(torch.float32, torch.float32)


@pytest.mark.parametrize("tokens", [1, FEW_TOKENS, FEW_TOKENS + 1, 64])
@pytest.mark.parametrize("numerics", [WIDENED, PLAIN], ids=["widened", "plain"])
@pytest.mark.parametrize("biased", [True, False])
def test_products_are_right(tokens: int, numerics: Numerics, biased: bool) -> None:
    torch.manual_seed(0)
    weight, x = (torch.randn(96, 64) * 0.1).to(numerics.weights), torch.randn(tokens, 64)
    bias = torch.randn(96).to(numerics.weights) if biased else None
    want = torch.nn.functional.linear(x, weight.float(), None if bias is None else bias.float())
    torch.testing.assert_close(linear(weight, bias, numerics)(x), want, atol=3e-5, rtol=0)


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("scale", [0.1, 1e6])
def test_results_in_float32_of_16_bit_activations(scale: float, batch_invariant: bool) -> None:
    torch.manual_seed(0)
    weight, x, bias = ((torch.randn(*shape) * scale).bfloat16() for shape in ((96, 64), (40, 64), (96,)))
    got = float32_linear(weight, bias, Numerics(torch.bfloat16, torch.bfloat16, batch_invariant))(x)
    want = torch.nn.functional.linear(x.double(), weight.double(), bias.double())
    torch.testing.assert_close(got, want.float(), atol=1e-5 * scale**2, rtol=1e-5)


def test_a_weight_beyond_float16_is_served_wide() -> None:
    weight = torch.full((8, 8), 1e6, dtype=torch.bfloat16)
    layer = WidenedLinear(weight, None, WIDENED)
    assert layer.few is None
    torch.testing.assert_close(layer(torch.ones(1, 8)), torch.ones(1, 8) @ weight.float().t())
