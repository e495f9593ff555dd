"""Gumbel-max in Triton's interpreter: the noise's integers, the kernel against its reference, ties and masks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from support.devices.extreme_noise import extreme_tokens

from pagoda.backends.torch_cuda.kernels.sampling.gumbel_max import gumbel_max, store_history, store_last
from pagoda.backends.torch_cuda.kernels.sampling.gumbel_max import kernel as module
from pagoda.common.engine.sampling.rules import gumbel, mix, noise_keys

VOCAB = 150


@triton.jit
def mix_all(x, out, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    mixed = module.mix(tl.load(x + at).to(tl.uint32, bitcast=True))
    tl.store(out + at, mixed.to(tl.int32, bitcast=True))


@triton.jit
def noise_of(ids, key, out, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out + at, module.gumbel(tl.load(key), tl.load(ids + at)))


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BLOCK", 32)


def signed(x: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(x.view(np.int32))


def test_the_hash_is_the_definitions_bit_by_bit() -> None:
    bits = np.random.default_rng(0).integers(0, 2**32, 4096, dtype=np.uint32)
    bits[:4] = 0, 1, 2**31, 2**32 - 1
    out = torch.empty(4096, dtype=torch.int32)
    mix_all[(1,)](signed(bits), out, BLOCK=4096)
    np.testing.assert_array_equal(out.numpy().view(np.uint32), mix(bits))


def test_noise_is_the_definitions_and_finite_at_its_ends() -> None:
    for key in (0, 12345, 2**32 - 7):
        ids = np.concatenate([extreme_tokens(key), np.arange(1018, dtype=np.uint32)])
        out = torch.empty(1024)
        noise_of[(1,)](signed(ids), signed(np.array([key], np.uint32)), out, BLOCK=1024)
        assert torch.isfinite(out).all()
        np.testing.assert_allclose(out.numpy(), gumbel(np.array([key], np.uint32), ids)[0], rtol=1e-5, atol=1e-6)


def call(logits: torch.Tensor, temperature: list, floor: list, *, use_kernel: bool) -> list:
    keys = signed(noise_keys(np.arange(len(logits)), np.full(len(logits), 7)))
    return gumbel_max(logits, keys, torch.tensor(temperature), torch.tensor(floor), use_kernel=use_kernel).tolist()


@pytest.mark.parametrize("seed", range(4))
def test_the_kernel_is_the_reference(seed: int) -> None:
    rng = np.random.default_rng(seed)
    room = torch.full((8 * VOCAB + 64,), torch.nan)
    logits = room[: 8 * VOCAB].view(8, VOCAB)
    logits[:] = torch.from_numpy(rng.standard_normal((8, VOCAB)) * 2)
    logits[torch.from_numpy(rng.random((8, VOCAB)) < 0.2)] = -torch.inf
    temperature, floor = [0.0, 1.0, 0.5, 2.0, 1.0, 0.7, 0.0, 1.0], [9.0, -torch.inf, 0.0, -1.0, 3.0, 0.5, 0.0, 1.0]
    want = call(logits, temperature, floor, use_kernel=False)
    assert call(logits, temperature, floor, use_kernel=True) == want
    assert [want[0], want[6]] == logits[[0, 6]].argmax(-1).tolist(), "no floor for greedy rows"


@pytest.mark.parametrize("use_kernel", [True, False])
def test_ties_go_to_the_lowest_token(use_kernel: bool) -> None:
    logits = torch.zeros(3, VOCAB)
    logits[0, [33, 40, 149]] = 5.0
    logits[1] = -torch.inf
    assert call(logits, [0.0, 0.0, 0.0], [0.0] * 3, use_kernel=use_kernel) == [33, 0, 0]
    assert call(logits[1:2], [1.0], [-torch.inf], use_kernel=use_kernel) == [0], "nothing to draw from"


def test_nan_logits_give_a_valid_token() -> None:
    logits = torch.full((2, VOCAB), torch.nan)
    assert all(0 <= token < VOCAB for token in call(logits, [0.0, 1.0], [0.0, torch.nan], use_kernel=True))


@pytest.mark.parametrize("use_kernel", [True, False])
def test_tokens_are_stored_in_last_and_history(use_kernel: bool) -> None:
    history, last = torch.zeros((4, 5), dtype=torch.int32), torch.zeros(4, dtype=torch.int32)
    tokens, rows, positions = (torch.tensor(x, dtype=torch.int32) for x in ([7, 8, 9], [2, 0, 3], [4, 1, 0]))
    store_last(tokens, rows, last, use_kernel=use_kernel)
    store_history(tokens, rows, positions, history, use_kernel=use_kernel)
    assert last.tolist() == [8, 0, 7, 9]
    assert history.nonzero().tolist() == [[0, 1], [2, 4], [3, 0]]
    assert history[2, 4] == 7
    with pytest.raises(ValueError, match="history"):
        store_history(tokens, rows, positions, history[0], use_kernel=use_kernel)
