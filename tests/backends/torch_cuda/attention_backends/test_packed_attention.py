"""Attention of whole prompts in one launch: stand-ins for torch's function, old and new, against the definition."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from pagoda.backends.torch_cuda.device import CPU, Device
from pagoda.backends.torch_cuda.kernels.frame.launch import CHIPS
from pagoda.backends.torch_cuda.model.mixers.attention import packed
from pagoda.backends.torch_cuda.model.mixers.attention.packed import VarlenAttention
from pagoda.backends.torch_decoder.mixers.packed_attention import attend
from pagoda.backends.torch_decoder.packed import make_packed
from pagoda.common.engine.pooling.values import PoolingRules, PoolPlan
from pagoda.common.models.mixers import Attention
from pagoda.common.models.rope import Rope

SPEC = Attention(4, 2, 16, 0.25, Rope(1e4, 16))
GPU = Device(torch.device("cuda", 0), CHIPS["sm_90"], "NVIDIA H100")
LENGTHS = (7, 1, 30, 7)


def visible(length: int, left: int, right: int) -> Tensor:
    ahead = torch.arange(length)[None] - torch.arange(length)[:, None]
    return (ahead <= (right if right >= 0 else length)) & (ahead >= -(left if left >= 0 else length))


def computed(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, seen: Callable[[int], Tensor], scale: float) -> Tensor:
    out = torch.empty_like(q)
    for begin, end in zip(starts.tolist(), starts.tolist()[1:]):
        scores = torch.einsum("tnh,snh->nts", q[begin:end], k[begin:end]) * scale
        weights = scores.masked_fill(~seen(end - begin), float("-inf")).softmax(-1)
        out[begin:end] = torch.einsum("nts,snh->tnh", weights, v[begin:end])
    return out


CALLS: list[int] = []


def new(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, window_size=(-1, -1), enable_gqa=False):
    """As of torch 2.12."""
    CALLS.append(max_q)
    assert enable_gqa == (query.shape[1] != key.shape[1])
    assert cu_seq_q.dtype == torch.int32
    key, value = (each.repeat_interleave(query.shape[1] // key.shape[1], 1) for each in (key, value))
    return computed(query, key, value, cu_seq_q, lambda length: visible(length, *window_size), scale)


def old(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, is_causal=False, scale=None):
    """As of torch 2.10."""
    CALLS.append(max_q)
    return computed(query, key, value, cu_seq_q, lambda length: visible(length, -1, 0 if is_causal else -1), scale)


@pytest.mark.parametrize("function", [new, old])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("kv_heads", [2, 4])
def test_one_call_is_the_attention_of_each_prompt(function, causal: bool, window: int | None, kv_heads: int) -> None:
    spec = replace(SPEC, causal=causal, window=window, kv_heads=kv_heads)
    varlen = VarlenAttention.with_function(spec, function)
    if window is not None and function is old:
        assert varlen is None, "it has no windows"
        return
    assert varlen is not None
    starts = np.concatenate([[0], np.cumsum(LENGTHS)]).astype(np.int32)
    rules = (PoolingRules(task="token_embed", use_activation=True),) * len(LENGTHS)
    batch = make_packed(PoolPlan(np.zeros(starts[-1], np.int32), starts, None, rules))
    torch.manual_seed(0)
    queries, keys, values = (torch.randn(int(starts[-1]), heads, 16) for heads in (4, kv_heads, kv_heads))
    CALLS.clear()
    out = varlen(queries, keys, values, batch)
    assert CALLS == [30], "one launch, of the longest prompt's size"
    torch.testing.assert_close(out, attend(queries, keys, values, batch, spec), rtol=0, atol=2e-6)


def test_what_it_lacks_is_computed_by_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "find_varlen_attn", lambda: new)
    assert VarlenAttention.of(SPEC, torch.bfloat16, GPU) is not None
    for change in ({"softcap": 2.0}, {"sinks": True}, {"chunk": 4}, {"head_dim": 264}, {"value_dim": 8}):
        assert VarlenAttention.of(replace(SPEC, **change), torch.bfloat16, GPU) is None, change
    assert VarlenAttention.of(SPEC, torch.float32, GPU) is None
    assert VarlenAttention.of(SPEC, torch.bfloat16, CPU) is None
    monkeypatch.setattr(packed, "find_varlen_attn", lambda: None)
    assert VarlenAttention.of(SPEC, torch.bfloat16, GPU) is None


def test_torch_has_it() -> None:
    function = packed.find_varlen_attn()
    assert function is not None
    assert VarlenAttention.with_function(SPEC, function) is not None
