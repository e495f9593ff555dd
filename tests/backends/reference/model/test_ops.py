"""The shared torch maths, in the dtypes that parity in float32 does not reach."""

from __future__ import annotations

import importlib
import math
from typing import Literal

import ml_dtypes
import numpy as np
import pytest
import torch

from pagoda.backends.reference.model import ops
from pagoda.backends.torch_decoder import functions
from pagoda.common.models.primitives import Norm
from pagoda.common.models.spec import ExpertGroups, Router, SparseMixer
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


@pytest.mark.parametrize(("family", "name"), [("llama", "LlamaRMSNorm"), ("gemma3", "Gemma3RMSNorm")])
def test_rms_norm_rounds_like_transformers(family: str, name: str):
    theirs = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    torch.manual_seed(0)
    module = getattr(theirs, name)(64).bfloat16()
    with torch.no_grad():
        module.weight.normal_()
        x = (torch.randn(9, 64) * 3).bfloat16()
        ours = functions.norm(x, Norm(1e-6, unit_offset=family == "gemma3"), module.weight)
        assert torch.equal(ours, module(x))


def test_layer_norm_and_its_unit_offset():
    x, weight, bias = torch.randn(3, 8), torch.randn(8), torch.randn(8)
    plain = functions.norm(x, Norm(1e-5, kind="layer"), 1 + weight, bias)
    torch.testing.assert_close(plain, torch.nn.functional.layer_norm(x, (8,), 1 + weight, bias, 1e-5))
    torch.testing.assert_close(functions.norm(x, Norm(1e-5, kind="layer", unit_offset=True), weight, bias), plain)


def test_rope_turns_pairs_and_leaves_the_rest():
    x = torch.zeros(1, 1, 6)
    x[..., 0], x[..., 4] = 1.0, 7.0
    turned = functions.apply_rope(x, torch.zeros(1, 2), torch.ones(1, 2), 4)  # a quarter turn
    assert turned.flatten().tolist() == [0, 0, 1, 0, 7, 0]


def test_softcap_bounds():
    assert functions.softcap(torch.tensor([-1e9, 0.0, 1e-3, 1e9]), 5.0).tolist() == pytest.approx(
        [-5.0, 0.0, 1e-3, 5.0]
    )


def test_routing_weights():
    logits = torch.tensor([[0.0, 2.0, 1.0, -9.0]])
    weights, experts = ops.route(logits, Router(2, renormalise=True))
    assert experts.tolist() == [[1, 2]]
    assert weights.sum().item() == pytest.approx(1.0)
    plain, _ = ops.route(logits, Router(2, renormalise=False))
    torch.testing.assert_close(plain, logits.softmax(-1)[:, 1:3])


def sigmoids(*scores: float) -> torch.Tensor:
    """Logits of one token whose sigmoids are `scores`."""
    return torch.tensor([scores]).logit()


def test_sigmoid_scores_are_scaled_after_renormalisation():
    logits = sigmoids(0.1, 0.6, 0.2)
    weights, experts = ops.route(logits, Router(2, renormalise=False, scores="sigmoid"))
    assert experts.tolist() == [[1, 2]]
    assert weights.tolist() == [pytest.approx([0.6, 0.2])]
    weights, _ = ops.route(logits, Router(2, renormalise=True, scores="sigmoid", scale=2.5))
    assert weights.tolist() == [pytest.approx([2.5 * 0.75, 2.5 * 0.25])]
    weights, _ = ops.route(torch.full((1, 3), -200.0), Router(2, renormalise=True, scores="sigmoid"))
    assert weights.tolist() == [[0, 0]]


@pytest.mark.parametrize("kind", ["softmax", "sigmoid"])
def test_a_score_correction_changes_the_choice_and_no_weight(kind: Literal["softmax", "sigmoid"]):
    logits = torch.tensor([[1.0, 0.5, 0.0]])
    scores = logits.softmax(-1) if kind == "softmax" else logits.sigmoid()
    weights, experts = ops.route(logits, Router(1, False, kind, correction=True), torch.tensor([0.0, 0.0, 5.0]))
    assert experts.tolist() == [[2]]
    assert weights.item() == pytest.approx(scores[0, 2].item())


@pytest.mark.parametrize(
    ("rank_by", "used", "top_k", "expected"),
    [
        ("best", 1, 2, [4, 5]),  # groups of 0.6, 0.5 and 0.8
        ("best_two", 1, 2, [2, 3]),  # 0.7, 1.0 and 0.9
        ("best_two", 2, 3, [4, 2, 3]),
        ("best", 3, 2, [4, 0]),
    ],
)
def test_only_experts_of_the_best_groups_are_chosen(
    rank_by: Literal["best", "best_two"], used: int, top_k: int, expected: list[int]
):
    logits = sigmoids(0.6, 0.1, 0.5, 0.5, 0.8, 0.1)
    router = Router(top_k, False, "sigmoid", groups=ExpertGroups(3, used, rank_by))
    assert sorted(ops.route(logits, router)[1][0].tolist()) == sorted(expected)


def test_a_correction_counts_for_the_groups_too():
    router = Router(1, False, "sigmoid", correction=True, groups=ExpertGroups(2, 1, "best_two"))
    weights, experts = ops.route(sigmoids(0.6, 0.5, 0.3, 0.2), router, torch.tensor([0.0, 0.0, 0.0, 0.9]))
    assert experts.tolist() == [[3]]
    assert weights.tolist() == [[pytest.approx(0.2)]]


def test_sparse_mixer():
    """Experts whose logits differ from the largest by more than a fifth of the larger magnitude get no share."""
    weights, experts = ops.route(torch.tensor([[2.0, 1.9, 1.5, -4.0]]), SparseMixer(2, jitter=0.1))
    assert experts.tolist() == [[0, 1]]
    assert weights.tolist() == [pytest.approx([1 / (1 + math.exp(-0.1)), 1.0])]
    weights, _ = ops.route(torch.tensor([[2.0, 1.9, 1.7, -4.0]]), SparseMixer(2, jitter=0.1))
    assert weights.tolist() == [pytest.approx([1 / (1 + math.exp(-0.1) + math.exp(-0.3)), 1 / (1 + math.exp(-0.2))])]
    weights, _ = ops.route(torch.tensor([[0.5, -0.6]]), SparseMixer(1, jitter=0.95))
    assert weights.tolist() == [[pytest.approx(1 / (1 + math.exp(-1.1)))]], "1.1 is less than 1.9 * 0.6"
    weights, _ = ops.route(torch.tensor([[0.5, 0.1]]), SparseMixer(1, jitter=0.45))
    assert weights.tolist() == [[pytest.approx(1 / (1 + math.exp(-0.4)))]], "0.4 is less than 0.9 * 0.5"


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
    assert functions.select(scores, None, 3).int().tolist() == [[0, 1, 1, 0, 1], [0, 0, 1, 1, 1]]
    seen = torch.tensor([[1, 1, 1, 1, 0], [1, 1, 0, 0, 0]]).bool()
    assert functions.select(scores, seen, 3).int().tolist() == [[0, 1, 1, 1, 0], [1, 1, 0, 0, 0]]
    assert functions.select(scores, seen, 1).int().tolist() == [[0, 1, 0, 0, 0], [1, 0, 0, 0, 0]]
    assert functions.select(torch.zeros(1, 5000), None, 2000)[0].nonzero().flatten().tolist() == list(range(2000))
