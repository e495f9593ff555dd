"""Layers with several mixers, without ffn, with mixer and ffn in parallel, with scaled updates."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from support.engines.backend_options import make_options
from support.engines.reference_driver import random_weights, tiny_spec
from support.kernels.paged_model import PagedModel
from support.suite.slow_matrix import thinned

from pagoda.backends.reference.model.naive.model import NaiveModel
from pagoda.backends.reference.model.numerics import numerics
from pagoda.backends.reference.pooling import Encoder
from pagoda.backends.reference.weights.load import Packer
from pagoda.backends.registry import load_backend
from pagoda.backends.torch_decoder.layers import only_readers
from pagoda.backends.torch_decoder.ops import BlockMakers
from pagoda.backends.torch_decoder.packed import make_packed
from pagoda.common.config.engine import Limits
from pagoda.common.engine.pooling.values import PoolPlan
from pagoda.common.errors import ModelError
from pagoda.common.models.mixers import Attention, BlockIndexer, ShortConvolution
from pagoda.common.models.primitives import Norm
from pagoda.common.models.rope import Rope
from pagoda.common.models.spec import Blend, Layer, Mlp, ModelSpec, Moe, Norms, Router, SecondHalf, Shortcut

PROMPT = [5, 17, 3, 80, 41, 2, 9, 60, 33, 21, 7, 8]
NORM = Norm(1e-5)
LIMITS = Limits(max_model_len=64, max_num_batched_tokens=32, max_num_seqs=2, block_size=16)
FULL, WINDOWED = tiny_spec(window=6).layers
BEFORE = Norms(before_mixer=NORM, before_ffn=NORM)

_BLOCKS = BlockIndexer(8, tokens=3, top_k=2, local=1, rope=Rope(1e3, 4), norm=NORM)
_EXPERTS = Moe(4, Mlp(24, "silu", gated=True, clip=0.3), Router(2, renormalise=True))

FED = Mlp(24, "gelu", gated=True)
IDENTITY = Moe(3, FED, Router(4, renormalise=False, correction=True, scale=1.7), identity=3)


def _attending(**changes: Any) -> Layer:
    return replace(FULL, mixers=(replace(FULL.attention, **changes),))


FORMS = {
    "ffn alone": replace(FULL, mixers=()),
    "side by side": replace(FULL, mixers=(*FULL.mixers, *WINDOWED.mixers)),
    "no ffn": replace(FULL, ffn=None),
    "ALiBi": replace(FULL, mixers=(replace(FULL.attention, rope=None, alibi_slopes=(0.5, 0.25, 0.1, 0.7)),)),
    "sinks": replace(FULL, mixers=(replace(FULL.attention, sinks=True),)),
    "parallel": replace(FULL, parallel=True),
    "parallel, one norm": replace(FULL, norms=Norms(before_mixer=NORM), parallel=True),
    "scaled": replace(FULL, residual_scale=0.3),
    "scaled, norm after": replace(
        FULL, norms=Norms(after_mixer=NORM, after_ffn=NORM), norm_after_add=True, residual_scale=0.3
    ),
    "gate per head": _attending(output_gate=True, gate_per_head=True),
    "clipped": replace(FULL, ffn=Mlp(48, "silu", gated=True, clip=0.3)),
    "shortcut": replace(FULL, shortcut=Shortcut(_EXPERTS, NORM)),
    "second half": replace(FULL, mixers=(*FULL.mixers, *WINDOWED.mixers), second=SecondHalf(FED, IDENTITY, NORM)),
    "second half, identity experts first": replace(
        FULL, mixers=FULL.mixers * 2, ffn=IDENTITY, norms=BEFORE, second=SecondHalf(FED, _EXPERTS, NORM)
    ),
    "norms before the projections out": replace(
        FULL,
        mixers=(replace(FULL.attention, out_norm=NORM),),
        ffn=Mlp(48, "relu2", gated=True, bias=True, inner_norm=NORM),
    ),
    "nothing": Layer((), None, Norms()),
    "root of ALiBi": _attending(rope=None, alibi_slopes=(0.5, 0.25, 0.1, 0.7), alibi_root=True),
    "chunks and the one before": _attending(chunk=4, chunk_lookback=1),
    "narrow values": _attending(value_dim=12),
    "narrow values, sinks": _attending(value_dim=12, sinks=True),
    "selected blocks": _attending(blocks=_BLOCKS),
    "blend": replace(FULL, blend=Blend(0, 0.8)),
}
RECURRENT = replace(FULL, mixers=(ShortConvolution(tiny_spec().width, taps=3),))


def model(*layers: Layer) -> ModelSpec:
    return replace(tiny_spec(), layers=layers)


def bare(layer: Layer) -> ModelSpec:
    """One layer and no final norm: the logits are linear in the layer's updates."""
    return replace(tiny_spec(), layers=(layer,), final_norm=None)


def logits(spec: ModelSpec, **changes: float) -> torch.Tensor:
    """Naive logits; `changes`: last part of a parameter's name -> factor."""
    weights = ((name, array * np.float32(changes.get(name.split(".")[-1], 1))) for name, array in random_weights(spec))
    return NaiveModel(spec, weights).logits(PROMPT)


@pytest.mark.parametrize("form", FORMS)
def test_the_paged_decoder_computes_what_the_naive_one_does(form: str) -> None:
    spec = model(WINDOWED, FORMS[form], FULL)
    paged = PagedModel(spec, random_weights(spec), 32).logits(PROMPT)
    torch.testing.assert_close(paged, logits(spec), atol=3e-5, rtol=0)


@pytest.mark.parametrize("form", FORMS)
@torch.inference_mode()
def test_packed_prompts_are_computed_as_the_naive_model_does(form: str) -> None:
    spec, numbers = model(WINDOWED, FORMS[form], FULL), numerics("float32")
    encoder = Encoder(spec, Packer(spec, numbers).pack(random_weights(spec)), numbers, 32)
    starts, ids = np.array([0, 4, 4 + len(PROMPT)], np.int32), np.array([*PROMPT[3:7], *PROMPT], np.int32)
    hidden = encoder.hidden(make_packed(PoolPlan(ids, starts, None, ())))[4:]
    head = torch.from_numpy(dict(random_weights(spec))["head"])
    torch.testing.assert_close(hidden @ head.T, logits(spec), atol=3e-5, rtol=0)


@thinned(
    lambda backend, form: backend == "torch_cuda" or list(FORMS).index(form) % 2 == 1,
    backend=["torch_cuda", "jax_tpu"],
    form=list(FORMS),
)
def test_the_accelerators_compute_what_the_naive_one_does(backend: str, form: str) -> None:
    spec = model(WINDOWED, FORMS[form], FULL)
    ours = accelerated(backend, spec)(PROMPT * 2)
    torch.testing.assert_close(ours, NaiveModel(spec, random_weights(spec)).logits(PROMPT * 2), atol=3e-5, rtol=0)


def accelerated(backend: str, spec: ModelSpec) -> Callable[[list[int]], torch.Tensor]:
    """Logits of a sequence by the decoder of torch_cuda or jax_tpu."""
    if backend == "torch_cuda":
        pytest.importorskip("triton")
        from support.devices.torch_cuda_model import TorchCudaModel

        return TorchCudaModel(spec, random_weights(spec), 32).logits
    pytest.importorskip("flax")
    from support.devices.jax_model import JaxModel

    return JaxModel(spec, random_weights(spec), 32).logits


@pytest.mark.parametrize(
    ("form", "readers"),
    [
        ("scaled", ("l.mixers.0.qkv", "l.ffn.inner")),
        ("side by side", (None, "l.ffn.inner")),
        ("second half", ("l.mixers.0.qkv", None)),
        ("shortcut", (None, None)),
        ("parallel", (None, None)),
    ],
)
def test_a_norm_is_rounded_for_the_only_map_that_reads_it(form: str, readers: tuple[str | None, str | None]) -> None:
    makers = cast(BlockMakers, SimpleNamespace(only_reader=lambda mixer, prefix: f"{prefix}.qkv"))
    assert only_readers(FORMS[form], makers, "l") == readers


def test_outputs_of_mixers_are_added() -> None:
    once = replace(FULL, norms=BEFORE, ffn=None)
    twice = replace(once, mixers=once.mixers * 2)
    weights = dict(random_weights(bare(once)))
    copied = weights | {name.replace("mixers.0", "mixers.1"): array for name, array in weights.items()}
    both = NaiveModel(bare(twice), copied.items()).logits(PROMPT)
    torch.testing.assert_close(both, logits(bare(once), o=2))


def test_parallel_updates_are_computed_from_the_same_input() -> None:
    layer = bare(replace(FULL, norms=BEFORE))
    parallel = logits(bare(replace(FULL, norms=BEFORE, parallel=True)))
    zero = {"down": 0, "down_bias": 0}
    alone = logits(layer, **zero) + logits(layer, o=0) - logits(layer, o=0, **zero)
    torch.testing.assert_close(parallel, alone)
    assert not torch.allclose(parallel, logits(layer))


def test_residual_scale_multiplies_both_updates() -> None:
    scaled = logits(bare(replace(FULL, norms=BEFORE, residual_scale=0.3)))
    torch.testing.assert_close(scaled, logits(bare(replace(FULL, norms=BEFORE)), o=0.3, down=0.3, down_bias=0.3))


@pytest.mark.parametrize(("backend", "place"), [("torch_cuda", "backend"), ("jax_tpu", "model.model")])
def test_a_refused_kind_of_mixer_ends_the_creation_of_a_backend(
    backend: str, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton" if backend == "torch_cuda" else "flax")
    module, spec = load_backend(backend), model(FULL, RECURRENT)
    monkeypatch.setattr(f"pagoda.backends.{backend}.{place}.MIXERS", {Attention})
    with pytest.raises(ModelError, match=f"layer 1 has a mixer of kind ShortConvolution, which {backend} does not"):
        module.create(make_options(spec, limits=LIMITS))
