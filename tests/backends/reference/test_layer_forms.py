"""Layers with several mixers, without ffn, with mixer and ffn in parallel, with scaled updates."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from support.backend_options import make_options
from support.paged_model import PagedModel
from support.reference_driver import random_weights, tiny_spec

from pagoda.backends.reference.model.naive import NaiveModel
from pagoda.backends.registry import load_backend
from pagoda.common.config.engine import Limits
from pagoda.common.errors import ModelError
from pagoda.common.models.primitives import Norm
from pagoda.common.models.spec import Layer, ModelSpec, Norms

PROMPT = [5, 17, 3, 80, 41, 2, 9, 60, 33, 21, 7, 8]
NORM = Norm(1e-5)
LIMITS = Limits(max_model_len=64, max_num_batched_tokens=32, max_num_seqs=2, block_size=16)
FULL, WINDOWED = tiny_spec(window=6).layers
BEFORE = Norms(before_mixer=NORM, before_ffn=NORM)

FORMS = {
    "side by side": replace(FULL, mixers=(*FULL.mixers, *WINDOWED.mixers)),
    "no ffn": replace(FULL, ffn=None),
    "parallel": replace(FULL, parallel=True),
    "parallel, one norm": replace(FULL, norms=Norms(before_mixer=NORM), parallel=True),
    "scaled": replace(FULL, residual_scale=0.3),
    "scaled, norm after": replace(
        FULL, norms=Norms(after_mixer=NORM, after_ffn=NORM), norm_after_add=True, residual_scale=0.3
    ),
}


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


@pytest.mark.parametrize("backend", ["torch_cuda", "jax_tpu"])
@pytest.mark.parametrize(
    ("form", "problem"),
    [
        ("side by side", "2 mixers side by side"),
        ("no ffn", "no feed-forward block"),
        ("parallel", "mixer and feed-forward block in parallel"),
        ("scaled", "a residual scale of 0.3"),
    ],
)
def test_other_backends_refuse_them_by_name(backend: str, form: str, problem: str) -> None:
    pytest.importorskip("triton" if backend == "torch_cuda" else "flax")
    spec = model(FULL, FORMS[form])
    with pytest.raises(ModelError, match=f"layer 1 has {problem}, which {backend} does not support"):
        load_backend(backend).create(make_options(spec, limits=LIMITS))
