"""Logprobs in Triton's interpreter against their reference."""

from __future__ import annotations

import pytest
import torch

from pagoda.backends.torch_cuda.kernels.sampling.logprobs import kernel as module
from pagoda.backends.torch_cuda.kernels.sampling.logprobs import logprobs


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("best", [0, 3, 100])
def test_the_kernel_is_the_reference(monkeypatch: pytest.MonkeyPatch, best: int, normalise: bool) -> None:
    monkeypatch.setattr(module, "BLOCK", 32)
    torch.manual_seed(best)
    room = torch.full((5 * 100 + 64,), torch.nan)
    logits = room[:500].view(5, 100)
    logits[:] = torch.randn(5, 100) * 4
    logits[1, :64] = -torch.inf  # whole blocks
    logits[2] += 1e4
    logits[3, 40:60] = 2.0  # ties share a rank
    targets = torch.tensor([0, 99, 50, 45, 7], dtype=torch.int32)
    actual = logprobs(logits, targets, best, normalise=normalise, use_kernel=True)
    want = logprobs(logits, targets, best, normalise=normalise, use_kernel=False)
    torch.testing.assert_close(actual[1], want[1], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(actual[2], want[2])
    assert actual[0].dtype == want[0].dtype == torch.int32
    untied = [0, 2, 4]
    assert actual[0][untied].tolist() == want[0][untied].tolist()
    assert want[2][3] == 1 + int((logits[3] > 2).sum())


def test_no_targets_give_empty_results() -> None:
    actual = logprobs(torch.zeros(0, 100), torch.zeros(0, dtype=torch.int32), 2, use_kernel=True)
    assert [tuple(x.shape) for x in actual] == [(0, 3), (0, 3), (0,)]


def test_wrong_shapes_are_named() -> None:
    logits, targets = torch.zeros(2, 100), torch.zeros(2, dtype=torch.int32)
    with pytest.raises(ValueError, match="best"):
        logprobs(logits, targets, 101, use_kernel=False)
    with pytest.raises(ValueError, match="targets"):
        logprobs(logits, targets.long(), 1, use_kernel=False)
