"""Mixtures of quantised experts on torch_cuda: what is kept, sharding, and the logits of the naive model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from support.devices.thread_ranks import on_ranks
from support.devices.torch_cuda_model import Comm, TorchCudaModel
from support.engines.reference_driver import random_weights
from torch import Tensor

from pagoda.backends.reference.model.naive.model import NaiveModel
from pagoda.backends.reference.model.naive.recurrent import NaiveParts
from pagoda.backends.torch_cuda.kernels.experts.moe_w8a8 import kernel as w8a8
from pagoda.backends.torch_cuda.kernels.linear.quantize_rows import Numbers, quantize_rows_reference
from pagoda.backends.torch_cuda.kernels.linear.weight_only import PackedMatrix
from pagoda.common.backend import Weight
from pagoda.common.models.mixers import Attention
from pagoda.common.models.primitives import Norm
from pagoda.common.models.rope import Rope
from pagoda.common.models.shapes import params
from pagoda.common.models.spec import Layer, Mlp, ModelSpec, Moe, Norms, Router
from pagoda.common.weights.quantization.schemes import Activations, Float8, Int4, Int8, Mxfp4, Nvfp4, Scheme
from pagoda.common.weights.quantization.tensors import QuantizedTensor, Value, random_quantized

SHARDED = ("down", "o")
"""Last parts of the names of matrices whose inputs ranks share, each rounding its own."""


@dataclass(frozen=True)
class Rounding:
    """How a matrix's inputs are rounded."""

    numbers: Numbers
    group: int | None = None
    scale: float | None = None


@dataclass(frozen=True, slots=True)
class RoundedParts(NaiveParts):
    """`roundings`: by parameter; `ranks`: that the model is sharded over."""

    roundings: Mapping[str, Rounding]
    ranks: int

    def linear(self, name: str, x: Tensor, expert: int | None = None) -> Tensor:
        if (rounding := self.roundings.get(name)) is not None:
            scale = None if rounding.scale is None else torch.tensor(rounding.scale)
            parts = x.chunk(self.ranks if name.rpartition(".")[2] in SHARDED else 1, -1)
            rows = [
                quantize_rows_reference(part, rounding.numbers, group=rounding.group, scale=scale) for part in parts
            ]
            x = torch.cat([each.values(rounding.group) for each in rows], -1)
        return NaiveParts.linear(self, name, x, expert)


class RoundedModel(NaiveModel):
    """As NaiveModel; see `RoundedParts`."""

    def __init__(
        self, spec: ModelSpec, weights: Iterable[Weight], roundings: Mapping[str, Rounding], ranks: int = 1
    ) -> None:
        super().__init__(spec, weights)
        self._parts = RoundedParts(self._weights, roundings, ranks)


TOKENS = [5, 17, 3, 80, 41, 2, 9, 60, 33, 21, 7, 8, 90]
FP8, INT8 = Activations("float8", "row"), Activations("int8", "row")
STATIC = 0.01


def spec_of(width: int = 128) -> ModelSpec:
    """One layer with experts and a shared Mlp of this width."""
    norm = Norm(1e-5)
    ffn = Moe(4, Mlp(width, "silu", True), Router(2, True), shared=Mlp(width, "silu", True))
    attention = Attention(4, 2, 16, 0.25, Rope(1e4, 12))
    layer = Layer((attention,), ffn, Norms(norm, None, norm, None))
    return ModelSpec(vocab=96, width=128, layers=(layer,), final_norm=norm, tied=False, max_positions=64)


def is_expert(name: str) -> bool:
    return ".ffn." in name and name.endswith((".gate", ".up", ".down"))


def quantised(spec: ModelSpec, scheme: Scheme) -> list[tuple[str, Value]]:
    """Random weights with the matrices of feed-forward blocks in a scheme, every group with a scale of its own."""
    weights: list[tuple[str, Value]] = []
    rng = np.random.default_rng(0)
    for number, (name, array) in enumerate(random_weights(spec)):
        if not is_expert(name):
            weights.append((name, array))
            continue
        value = random_quantized(scheme, array.shape, number, 0.08)

        def varied(scales: np.ndarray) -> np.ndarray:
            return scales * rng.uniform(0.5, 1.5, scales.shape).astype(np.float32)

        if isinstance(scheme, Mxfp4):
            value = replace(value, scales=np.exp2(rng.integers(-7, -4, value.scales.shape)).astype(np.float32))
        elif isinstance(scheme, Nvfp4):
            steps = 1 + rng.integers(8, size=value.scales.shape).astype(np.float32) / 8
            assert value.row_scales is not None
            value = replace(value, scales=steps, row_scales=varied(value.row_scales))
        else:
            value = replace(value, scales=varied(value.scales).astype(np.float16).astype(np.float32))
        if isinstance(scheme, Int4):
            offsets = value.scales * rng.integers(-4, 5, value.scales.shape).astype(np.float32)
            value = replace(value, offsets=offsets)
        if value.order is not None and ".experts." in name:
            value = replace(value, order=rng.permuted(value.order, axis=-1))  # each expert has one of its own
        if scheme.activations is not None and scheme.activations.static:
            value = replace(value, input_scale=np.full(array.shape[:-2], STATIC, np.float32))
        weights.append((name, value))
    return weights


def roundings(weights: list[tuple[str, Value]]) -> dict[str, Rounding]:
    """How the inputs of routed experts are rounded, as their schemes say."""
    rounded = {}
    for name, value in weights:
        if isinstance(value, QuantizedTensor) and ".experts." in name:
            activations = value.scheme.activations
            assert activations is not None
            group = activations.group if isinstance(activations.group, int) else None
            rounded[name] = Rounding(activations.numbers, group, STATIC if activations.static else None)
    return rounded


CASES = {
    "fp8-channel": Float8("channel", FP8),
    "fp8-tensor-static": Float8("tensor", Activations("float8", "tensor", True)),
    "fp8-blocks": Float8((32, 32), Activations("float8", 32)),
    "int8": Int8("channel", INT8),
    "int8-weights": Int8("channel"),
    "int4": Int4((1, 32)),
    "mxfp4": Mxfp4(),
    "nvfp4": Nvfp4(),
}


@dataclass(frozen=True)
class Ranks:
    """What the ranks of a model give."""

    logits: list[torch.Tensor]
    kept: list[set[str]]  # matrices that stay as they are stored


def on_torch_cuda(spec: ModelSpec, weights: list[tuple[str, Value]], scheme: Scheme, ranks: int) -> Ranks:
    schemes = {name: scheme for name in params(spec) if is_expert(name)}
    kept: list[set[str]] = []

    def logits(comm: Comm) -> torch.Tensor:
        model = TorchCudaModel(spec, weights, 64, comm, schemes=schemes)
        kept.append({name for name, each in model.loader.params.by_name.items() if isinstance(each, PackedMatrix)})
        return model.logits(TOKENS)

    return Ranks(on_ranks(ranks, logits), kept)


BOTH = {f"layers.0.ffn.{part}.{matrix}" for part in ("experts", "shared") for matrix in ("inner", "down")}


@pytest.mark.parametrize("kind", CASES)
@pytest.mark.parametrize("ranks", [1, 2])
def test_experts_stay_as_they_are_stored(kind: str, ranks: int, caplog: pytest.LogCaptureFixture) -> None:
    spec, scheme = spec_of(), CASES[kind]
    weights = quantised(spec, scheme)
    want = NaiveModel(spec, weights).logits(TOKENS)
    caplog.clear()
    with caplog.at_level("INFO", "pagoda"):
        actual = on_torch_cuda(spec, weights, scheme, ranks)
    for logits in actual.logits:
        torch.testing.assert_close(logits, want, atol=1e-4, rtol=1e-4)
    assert actual.kept == [BOTH] * ranks
    assert not caplog.messages


@pytest.mark.parametrize("kind", [kind for kind, scheme in CASES.items() if scheme.activations is not None])
@pytest.mark.parametrize("ranks", [1, 2])
def test_rows_of_experts_are_rounded(kind: str, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the checkpoint says; ranks round their own part of the hidden values."""
    monkeypatch.setattr(w8a8, "FEW", 0)
    spec, scheme = spec_of(), CASES[kind]
    weights = quantised(spec, scheme)
    want = RoundedModel(spec, weights, roundings(weights), ranks).logits(TOKENS)
    exact = NaiveModel(spec, weights).logits(TOKENS)
    for logits in on_torch_cuda(spec, weights, scheme, ranks).logits:
        assert (logits - want).abs().mean() < 0.05 * (exact - want).abs().mean()


@pytest.mark.parametrize(
    ("scheme", "ranks", "width"),
    [
        (Int4((1, 128), ordered=True), 1, 128),
        (Int8((1, 128), ordered=True), 1, 128),
        (Int4((1, 32)), 4, 96),  # the second rank has inputs 24 to 47 of down
    ],
)
def test_what_no_kernel_multiplies_is_dequantised(
    scheme: Scheme, ranks: int, width: int, caplog: pytest.LogCaptureFixture
) -> None:
    spec = spec_of(width)
    weights = quantised(spec, scheme)
    want = NaiveModel(spec, weights).logits(TOKENS)
    caplog.clear()
    with caplog.at_level("INFO", "pagoda"):
        actual = on_torch_cuda(spec, weights, scheme, ranks)
    for logits in actual.logits:
        torch.testing.assert_close(logits, want, atol=1e-4, rtol=1e-4)
    assert any("layers.0.ffn.experts.down" not in kept for kept in actual.kept)
    assert any("torch_cuda: dequantised layers.0.ffn.experts." in message for message in caplog.messages)
