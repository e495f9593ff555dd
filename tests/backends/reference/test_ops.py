"""The shared torch maths, in the dtypes that parity in float32 does not reach."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from pagoda.backends.reference.model import ops
from pagoda.common.models.primitives import Norm
from pagoda.common.models.spec import Router
from pagoda.common.weights import dtypes

KINDS = {
    np.float32: np.float32,
    np.float16: np.float16,
    ml_dtypes.bfloat16: dtypes.BFLOAT16,
    ml_dtypes.float8_e4m3fn: dtypes.FLOAT8_E4M3FN,
    ml_dtypes.float8_e5m2: dtypes.FLOAT8_E5M2,
}


@pytest.mark.parametrize("dtype", KINDS)
def test_to_torch_keeps_values_and_memory(dtype: type):
    array = np.array([[0.5, -2.0], [3.0, 0.0]], dtype=dtype).view(KINDS[dtype])
    tensor = ops.to_torch(array)
    assert tensor.float().tolist() == [[0.5, -2.0], [3.0, 0.0]]
    assert tensor.data_ptr() == array.ctypes.data


def test_to_torch_takes_transposed_and_read_only_arrays():
    array = np.arange(6).astype(ml_dtypes.bfloat16).view(dtypes.BFLOAT16).reshape(2, 3)
    array.flags.writeable = False
    assert ops.to_torch(array.T).float().tolist() == [[0, 3], [1, 4], [2, 5]]


@pytest.mark.parametrize(("theirs", "offset"), [(LlamaRMSNorm, False), (Gemma3RMSNorm, True)])
def test_rms_norm_rounds_like_transformers(theirs: type[torch.nn.Module], offset: bool):
    torch.manual_seed(0)
    module = theirs(64).bfloat16()
    with torch.no_grad():
        module.weight.normal_()
        x = (torch.randn(9, 64) * 3).bfloat16()
        ours = ops.norm(x, Norm(1e-6, unit_offset=offset), module.weight)
        assert torch.equal(ours, module(x))


def test_layer_norm_and_its_unit_offset():
    x, weight, bias = torch.randn(3, 8), torch.randn(8), torch.randn(8)
    plain = ops.norm(x, Norm(1e-5, kind="layer"), 1 + weight, bias)
    torch.testing.assert_close(plain, torch.nn.functional.layer_norm(x, (8,), 1 + weight, bias, 1e-5))
    torch.testing.assert_close(ops.norm(x, Norm(1e-5, kind="layer", unit_offset=True), weight, bias), plain)


def test_rope_turns_pairs_and_leaves_the_rest():
    x = torch.zeros(1, 1, 6)
    x[..., 0], x[..., 4] = 1.0, 7.0
    turned = ops.apply_rope(x, torch.zeros(1, 2), torch.ones(1, 2), 4)  # a quarter turn
    assert turned.flatten().tolist() == [0, 0, 1, 0, 7, 0]


def test_softcap_bounds():
    assert ops.softcap(torch.tensor([-1e9, 0.0, 1e-3, 1e9]), 5.0).tolist() == pytest.approx([-5.0, 0.0, 1e-3, 5.0])


def test_routing_weights():
    logits = torch.tensor([[0.0, 2.0, 1.0, -9.0]])
    weights, experts = ops.route(logits, Router(2, renormalise=True))
    assert experts.tolist() == [[1, 2]]
    assert weights.sum().item() == pytest.approx(1.0)
    plain, _ = ops.route(logits, Router(2, renormalise=False))
    torch.testing.assert_close(plain, logits.softmax(-1)[:, 1:3])


def test_mix_experts_runs_each_on_its_own_rows():
    x = torch.tensor([[1.0], [10.0], [100.0]])
    weights = torch.tensor([[0.5, 0.5], [1.0, 0.0], [0.25, 0.75]])
    experts = torch.tensor([[0, 1], [1, 0], [1, 2]])
    seen: dict[int, list[float]] = {}

    def expert(e: int, rows: torch.Tensor) -> torch.Tensor:
        seen[e] = rows.flatten().tolist()
        return rows * (e + 1)

    assert ops.mix_experts(x, weights, experts, expert).flatten().tolist() == [1.5, 20.0, 275.0]
    assert {e: sorted(rows) for e, rows in seen.items()} == {0: [1, 10], 1: [1, 10, 100], 2: [100]}


def test_select_takes_the_highest_scores_and_of_equal_ones_the_earlier():
    scores = torch.tensor([[1.0, 3.0, 2.0, 2.0, 9.0], [-1.0, -1.0, 0.0, -0.0, 5.0]])
    assert ops.select(scores, None, 3).int().tolist() == [[0, 1, 1, 0, 1], [0, 0, 1, 1, 1]]
    seen = torch.tensor([[1, 1, 1, 1, 0], [1, 1, 0, 0, 0]]).bool()
    assert ops.select(scores, seen, 3).int().tolist() == [[0, 1, 1, 1, 0], [1, 1, 0, 0, 0]]
    assert ops.select(scores, seen, 1).int().tolist() == [[0, 1, 0, 0, 0], [1, 0, 0, 0, 0]]
    assert ops.select(torch.zeros(1, 5000), None, 2000)[0].nonzero().flatten().tolist() == list(range(2000))
