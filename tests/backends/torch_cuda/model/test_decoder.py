"""The decoder beyond the parity of all families: 8-bit caches, narrow types, decodes of several tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
import torch
from support.devices.torch_cuda_model import Chunk, TorchCudaModel, poisoned
from support.engines.reference_driver import random_weights, tiny_spec

from pagoda.backends.reference.model.naive.model import NaiveModel
from pagoda.backends.torch_cuda.device import CPU, Device
from pagoda.backends.torch_cuda.execution.step_input import CudaStepBatch, GroupBatch
from pagoda.backends.torch_cuda.kernels.attention import decode_attention
from pagoda.backends.torch_cuda.kernels.attention.work_list import cut_evenly
from pagoda.backends.torch_cuda.kernels.frame.launch import CHIPS
from pagoda.backends.torch_cuda.kernels.linear.weight_only import FEW
from pagoda.backends.torch_cuda.memory import cache
from pagoda.backends.torch_cuda.model.decoder import CudaDecoder
from pagoda.backends.torch_cuda.model.feed_forward import block_makers
from pagoda.backends.torch_cuda.model.parts import CudaBuildContext
from pagoda.backends.torch_cuda.parallel.tensor_parallel import SINGLE_RANK, Comm, RankShard
from pagoda.backends.torch_cuda.weights.load import Loader
from pagoda.common.engine.kv_cache.spec import kv_layout
from pagoda.common.errors import ModelError
from pagoda.common.models.primitives import Norm
from pagoda.common.models.spec import Mlp, ModelSpec


def mixed_layers() -> ModelSpec:
    """Two mixers side by side, one gated; a layer without ffn; a layer that reads the K and V of another."""
    spec = tiny_spec(window=6)
    full, windowed = spec.layers
    gated = replace(full.attention, output_gate=True)
    both = replace(full, mixers=(gated, windowed.attention))
    bare = replace(windowed, ffn=None, norms=replace(windowed.norms, before_ffn=None, after_ffn=None))
    reader = replace(full, mixers=(replace(full.attention, shares_cache_of=2, output_gate=True),))
    return replace(spec, layers=(both, bare, full, reader))


SPECS = {
    "mixed layers": mixed_layers(),
    "window": tiny_spec(window=6, softcap=2.0),
    "experts": tiny_spec(moe=True),
}
TOKENS, OTHER = [5, 17, 3, 80, 41, 2, 9, 60, 33, 21, 7, 8], [12, 8, 95, 5, 17, 3, 44, 0, 71, 26, 1, 13, 77, 30, 50]


def model(kind: str, **options) -> TorchCudaModel:
    return TorchCudaModel(SPECS[kind], random_weights(SPECS[kind]), 32, **options)


@pytest.mark.parametrize("kind", SPECS)
def test_two_sequences_answer_as_each_alone(kind: str) -> None:
    naive = NaiveModel(SPECS[kind], random_weights(SPECS[kind]), max_len=32)
    for ids, actual in zip((TOKENS, OTHER), model(kind).both(TOKENS, OTHER)):
        torch.testing.assert_close(actual, naive.logits(ids), atol=3e-5, rtol=0)


def test_hidden_values_with_a_norm_are_not_rounded_before_it() -> None:
    """The product after the norm takes rounded rows, as of float8 matrices on a GPU."""
    device = SimpleNamespace(use_kernels=False, chip=CHIPS["sm_90"])
    build = cast(CudaBuildContext, SimpleNamespace(device=device, rounds=lambda name: True))
    makers = block_makers(build, lambda mixer, prefix, numbers: lambda x: x)
    x = torch.randn(FEW + 1, 8, generator=torch.Generator().manual_seed(0))
    mlp = makers.mlp(Mlp(4, "relu2", gated=True, inner_norm=Norm(1e-5)), "ffn", lambda x: x, lambda x: x)
    torch.testing.assert_close(mlp(x), x[:, :4].relu().square() * x[:, 4:])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", SPECS)
def test_narrow_types_stay_near(kind: str, dtype: torch.dtype) -> None:
    want, actual = model(kind).logits(TOKENS), model(kind, dtype=dtype).logits(TOKENS)
    assert actual.dtype == torch.float32
    near = 0.15 if dtype == torch.bfloat16 else 0.02
    assert 0 < (actual - want).abs().mean() < near * want.std()


@pytest.mark.parametrize("kind", SPECS)
def test_an_eight_bit_cache_stays_near(kind: str) -> None:
    want, actual = model(kind).logits(TOKENS), model(kind, cache_dtype=torch.float8_e4m3fn).logits(TOKENS)
    assert 0 < (actual - want).abs().mean() < 0.15 * want.std()


def test_scales_of_an_eight_bit_cache_are_used_both_ways() -> None:
    """Scales that are powers of two change nothing that is stored, as long as nothing leaves the range."""
    layout, actual, stored = kv_layout(SPECS["experts"], 4), [], []
    for scale in (1.0, 0.25):
        one = model("experts", cache_dtype=torch.float8_e4m3fn)
        caches = cache.allocate(layout, (8,), torch.float8_e4m3fn, RankShard(), poisoned)
        for layer in caches.values():
            assert layer.k_scale is not None
            assert layer.v_scale is not None
            layer.k_scale.fill_(scale)
            layer.v_scale.fill_(2 * scale)
        chunk = Chunk(TOKENS, 0, len(TOKENS), np.array([[3, 1, 6]]))
        actual.append(one.decoder.hidden(one.batch([chunk]), caches)[: len(TOKENS)])
        stored.append([part[3].float() for part in (caches[0].keys, caches[0].values)])
    torch.testing.assert_close(actual[0], actual[1], atol=2e-2, rtol=2e-2)
    for of_one, of_less in zip(*stored):
        torch.testing.assert_close(4 * of_one, of_less, atol=2e-2, rtol=0)


def test_several_tokens_a_sequence_decode_as_a_prefill() -> None:
    """What verifying drafts asks for: the last three tokens of two sequences at once."""
    one = model("window")
    caches = cache.allocate(one.layout, (32,), torch.float32, RankShard(), poisoned)
    pages = 1 + np.arange(12).reshape(2, 2, 3)
    others = TOKENS[::-1]
    whole = [Chunk(ids, 0, len(TOKENS), pages[n]) for n, ids in enumerate((TOKENS, others))]
    want = one.decoder.hidden(one.batch(whole), caches)[: 2 * len(TOKENS)].view(2, len(TOKENS), -1)[:, -3:]
    caches = cache.allocate(one.layout, (32,), torch.float32, RankShard(), poisoned)
    one.decoder.hidden(one.batch([replace(chunk, end=len(TOKENS) - 3) for chunk in whole]), caches)
    drafts = one.batch([replace(chunk, begin=len(TOKENS) - 3) for chunk in whole])
    keep = drafts.query_start[-1].item()
    drafts = replace(
        drafts,
        token_ids=drafts.token_ids[:keep],
        positions=drafts.positions[:keep],
        groups=tuple(replace(group, slots=group.slots[:keep]) for group in drafts.groups),
        tiles=None,
        num_decodes=2,
        query_len=3,
        work=cut_evenly(drafts.kv_lens[:2], 2),
    )
    actual = one.decoder.hidden(drafts, caches).view(2, 3, -1)
    torch.testing.assert_close(actual, want, atol=1e-5, rtol=1e-5)


@dataclass
class Half:
    """One of two ranks, whose other one is not there."""

    rank: int = 1
    size: int = 2

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x + x

    def gather_last(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, x], -1)


@pytest.mark.parametrize("comm", [SINGLE_RANK, Half()])
@pytest.mark.parametrize("kind", [*SPECS, "full norm"])
def test_a_decode_step_does_not_synchronize(kind: str, comm: Comm, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device without memory, where any look at a value is an error: so the step can be captured in a graph."""
    spec = SPECS.get(kind) or with_full_norm(SPECS["window"])
    monkeypatch.setattr(decode_attention, "decode_attention_reference", lambda q, *_: q)
    monkeypatch.setattr("pagoda.backends.torch_cuda.model.feed_forward.moe", lambda x, *_, **__: x)
    meta, shard, layout = torch.device("meta"), RankShard(comm.rank, comm.size), kv_layout(spec, 4)

    def empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=meta)

    params = Loader(spec, shard, torch.float32, empty).params
    decoder = CudaDecoder(spec, params, Device(meta, CPU.chip, "meta"), 16, comm)
    caches = cache.allocate(layout, (8,), torch.float32, shard, empty)
    seqs = empty((5,), torch.int32)
    group = GroupBatch(empty((5, 4), torch.int32), seqs)
    batch = CudaStepBatch(seqs, seqs, empty((6,), torch.int32), seqs, (group,) * len(layout.groups), 5, None)
    hidden = decoder.hidden(batch, caches)
    assert hidden.shape == (5, 32)
    assert decoder.logits(hidden).shape == (5, 96)
    with pytest.raises(RuntimeError, match="meta"):
        hidden[0, 0].item()


def with_full_norm(spec: ModelSpec) -> ModelSpec:
    layers = [replace(layer, mixers=(replace(layer.attention, qk_norm_over="full"),)) for layer in spec.layers]
    return replace(spec, layers=tuple(layers), tied=True)


def test_groups_share_arrays() -> None:
    """A block id costs the same whichever group owns it."""
    layout = kv_layout(SPECS["window"], 4)
    caches = cache.allocate(layout, (5,), torch.float16, RankShard(1, 2), poisoned)
    assert caches[0].keys.shape == (5, 1, 4, 16)
    assert caches[0].keys.data_ptr() == caches[1].keys.data_ptr()
    assert caches[0].keys.data_ptr() != caches[0].values.data_ptr()
    assert (caches[0].group, caches[1].group) == (0, 1)
    assert caches[0].k_scale is None


def test_an_unsupported_cache_kind_is_named() -> None:
    with pytest.raises(ModelError, match="the torch_cuda backend has no cache for SimpleNamespace"):
        cache.array_shapes(SimpleNamespace(elements=8), 2, 16, RankShard())
