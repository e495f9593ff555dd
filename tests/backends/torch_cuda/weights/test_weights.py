"""Loading canonical weights into a rank's tensors: strict, in place, packed if configured."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from support.checkpoints.random_stored import STORED, Stored
from support.devices.thread_ranks import on_ranks
from support.devices.torch_cuda_model import Comm, TorchCudaModel, poisoned
from support.engines.reference_driver import random_weights, tiny_spec

from pagoda.backends.torch_cuda.kernels.linear.weight_only import PackedMatrix, pack, unpack
from pagoda.backends.torch_cuda.parallel.tensor_parallel import RankShard
from pagoda.backends.torch_cuda.weights.load import Loader
from pagoda.common.errors import WeightError
from pagoda.common.models.shapes import params
from pagoda.common.models.spec import Mlp
from pagoda.common.weights.dtypes import to_bfloat16
from pagoda.common.weights.gguf.dequantize import BlockType, block_type
from pagoda.common.weights.quantization.on_the_fly import is_matrix
from pagoda.common.weights.quantization.schemes import Blocks, Int4
from pagoda.common.weights.quantization.tensors import QuantizedTensor

SPEC, MIXTURE = tiny_spec(), tiny_spec(moe=True)
TOKENS = [5, 17, 3, 80, 41, 2, 9]
WEIGHTS = dict(random_weights(SPEC))


def loader(**options) -> Loader:
    return Loader(SPEC, RankShard(), torch.float32, poisoned, **options)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"extra": np.zeros(1)}, "parameter extra is unknown or came twice"),
        (
            {"layers.1.ffn.gate": np.zeros((48, 31))},
            r"parameter layers.1.ffn.gate has shape \(48, 31\), the model needs",
        ),
        ({"layers.0.mixers.0.k": None, "head": None}, "the checkpoint lacks 2 parameters, first layers.0.mixers.0.k"),
    ],
)
def test_what_does_not_fit_is_named(change: dict, message: str) -> None:
    changed = [(name, array) for name, array in (WEIGHTS | change).items() if array is not None]
    with pytest.raises(WeightError, match=message):
        loader().fill(changed)


def test_a_parameter_that_comes_twice_is_named() -> None:
    with pytest.raises(WeightError, match=r"parameter embed is unknown or came twice"):
        loader().fill([*WEIGHTS.items(), ("embed", WEIGHTS["embed"])])


def test_fused_parameters_have_their_parts_in_order() -> None:
    filled = loader()
    filled.fill(reversed(WEIGHTS.items()))
    tensors = filled.params.tensors()
    q, k, v = (WEIGHTS[f"layers.1.mixers.0.{part}"] for part in "qkv")
    np.testing.assert_array_equal(tensors["layers.1.mixers.0.qkv"].numpy(), np.concatenate([q, k, v]))
    gate, up = WEIGHTS["layers.0.ffn.gate_bias"], WEIGHTS["layers.0.ffn.up_bias"]
    np.testing.assert_array_equal(tensors["layers.0.ffn.inner_bias"].numpy(), np.concatenate([gate, up]))
    assert not tensors["embed"][SPEC.vocab :].any(), "padding"
    assert filled.params.num_bytes == sum(tensor.nbytes for tensor in tensors.values())
    assert not any(tensor.isnan().any() for tensor in tensors.values())


@pytest.mark.parametrize("rank", [0, 1])
def test_gguf_blocks_that_a_rank_divides(rank: int) -> None:
    """A rank's inputs of the output projection end within a block."""
    name = "layers.0.mixers.0.o"
    kind = BlockType(40, "NVFP4", 64, 36)
    data = np.random.default_rng(0).integers(64, size=(len(WEIGHTS[name]), 36), dtype=np.uint8)
    blocks = QuantizedTensor(Blocks(kind), data, np.empty(0, np.float32), ())
    assert blocks.shape == WEIGHTS[name].shape
    tensors = []
    for value in (blocks, blocks.dequantize()):
        schemes = {name: value.scheme} if isinstance(value, QuantizedTensor) else {}
        filled = Loader(SPEC, RankShard(rank, 2), torch.float32, poisoned, schemes=schemes)
        filled.fill((WEIGHTS | {name: value}).items())
        matrix = filled.params.by_name["layers.0.mixers.0.out"]
        tensors.append((unpack(matrix) if isinstance(matrix, PackedMatrix) else matrix).numpy())
    np.testing.assert_array_equal(*tensors)


@pytest.mark.parametrize("how", [None, "int8"])
def test_the_same_tensors_are_filled_again(how: str | None) -> None:
    """A decoder that was built before answers as it did."""
    model = TorchCudaModel(SPEC, WEIGHTS.items(), 16, pack=how and partial(pack, scheme=how))
    want = model.logits(TOKENS)
    before = {name: tensor.data_ptr() for name, tensor in model.loader.params.tensors().items()}
    for tensor in model.loader.params.tensors().values():
        tensor.zero_()
    assert not torch.equal(model.logits(TOKENS), want)
    model.loader.fill(WEIGHTS.items())
    assert torch.equal(model.logits(TOKENS), want)
    assert {name: tensor.data_ptr() for name, tensor in model.loader.params.tensors().items()} == before


@pytest.mark.parametrize("how", [None, "int8"])
def test_an_update_writes_into_the_same_tensors(how: str | None) -> None:
    """Captured graphs read them."""
    model = TorchCudaModel(SPEC, WEIGHTS.items(), 16, pack=how and partial(pack, scheme=how))
    tensors = model.loader.params.tensors()
    before = {name: (tensor.data_ptr(), tensor.clone()) for name, tensor in tensors.items()}
    model.loader.update(random_weights(SPEC, 1))
    assert model.loader.params.tensors().keys() == tensors.keys()
    for name, tensor in model.loader.params.tensors().items():
        assert tensor.data_ptr() == before[name][0], name
        assert not torch.equal(tensor, before[name][1]), name


@pytest.mark.parametrize("scheme", ["int8", "fp8", "int4"])
@pytest.mark.parametrize("spec", [SPEC, MIXTURE], ids=["mlp", "experts"])
def test_packed_matrices_compute_as_their_unpacked_values(spec, scheme) -> None:
    """Matrices of layers are packed, nothing else is."""
    weights = dict(random_weights(spec))
    packed = TorchCudaModel(spec, weights.items(), 16, pack=partial(pack, scheme=scheme))
    rounded = TorchCudaModel(spec, weights.items(), 16)
    for name, matrix in packed.loader.params.by_name.items():
        assert isinstance(matrix, PackedMatrix) == name.endswith((".qkv", ".out", ".inner", ".down")), name
        if isinstance(matrix, PackedMatrix):
            rounded.loader.params[name].copy_(unpack(matrix))
    actual, want = packed.logits(TOKENS), rounded.logits(TOKENS)
    assert want.std() > 0.1
    torch.testing.assert_close(actual, want, atol=1e-4, rtol=1e-4)


def test_other_types_are_cast_on_the_way() -> None:
    narrow = Loader(SPEC, RankShard(), torch.float16, poisoned)
    narrow.fill((name, to_bfloat16(array)) for name, array in WEIGHTS.items())
    want = torch.from_numpy(WEIGHTS["head"]).to(torch.bfloat16).to(torch.float16)
    assert torch.equal(narrow.params["head"][: SPEC.vocab], want)


WIDE = replace(
    SPEC,
    width=128,
    layers=tuple(
        replace(layer, mixers=(replace(layer.mixers[0], heads=4, kv_heads=2, head_dim=32),), ffn=Mlp(384, "silu", True))
        for layer in SPEC.layers
    ),
)
"""Groups of 128 inputs, half of one for each of two ranks."""


def stored_weights(name: str, gate: str | None = None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Weights of WIDE with all matrices in a scheme, `gate` that of the gates, and their schemes."""
    weights, schemes = dict(random_weights(WIDE)), {}
    for number, param in enumerate(params(WIDE).values()):
        if is_matrix(param):
            stored = STORED[gate if gate and param.name.endswith("gate") else name]
            weights[param.name] = stored.tensor(*param.shape, number)
            schemes[param.name] = stored.scheme
    return weights, schemes


def dense(weights: dict[str, Any]) -> Iterator[tuple[str, np.ndarray]]:
    for name, value in weights.items():
        yield name, value.dequantize() if isinstance(value, QuantizedTensor) else value


@pytest.mark.parametrize("name", STORED)
@pytest.mark.parametrize("ranks", [1, 2])
def test_stored_matrices_compute_as_their_values(name: str, ranks: int, caplog: pytest.LogCaptureFixture) -> None:
    weights, schemes = stored_weights(name)
    kept: list[int] = []

    def logits(comm: Comm) -> torch.Tensor:
        model = TorchCudaModel(WIDE, weights.items(), 16, comm, schemes=schemes)
        kept.append(sum(isinstance(matrix, PackedMatrix) for matrix in model.loader.params.by_name.values()))
        return model.logits(TOKENS)

    want = TorchCudaModel(WIDE, dense(weights), 16).logits(TOKENS)
    assert want.std() > 0.1
    with caplog.at_level("INFO"):
        for actual in on_ranks(ranks, logits):
            torch.testing.assert_close(actual, want, atol=2e-4, rtol=2e-4)
    divided = name == "int4-ordered" and ranks > 1  # the inputs of `out` and `down`
    assert kept == [4 if divided else 8] * ranks
    assert any("torch_cuda: dequantised layers.0" in message for message in caplog.messages) == divided


def test_parts_of_two_schemes_are_dequantised_and_named(caplog: pytest.LogCaptureFixture) -> None:
    weights, schemes = stored_weights("fp8-channel", gate="int4")
    with caplog.at_level("INFO"):
        model = TorchCudaModel(WIDE, weights.items(), 16, schemes=schemes)
    assert sum(isinstance(matrix, PackedMatrix) for matrix in model.loader.params.by_name.values()) == 6
    assert any("torch_cuda: dequantised layers.0.ffn.gate and 3 more" in message for message in caplog.messages)
    torch.testing.assert_close(
        model.logits(TOKENS), TorchCudaModel(WIDE, dense(weights), 16).logits(TOKENS), atol=2e-4, rtol=2e-4
    )


@pytest.mark.parametrize("name", ["int4-zeros", "int4-ordered", "fp8-tensor", "fp8-blocks", "nvfp4"])
def test_stored_matrices_are_replaced_in_place(name: str) -> None:
    weights, schemes = stored_weights(name)
    model = TorchCudaModel(WIDE, weights.items(), 16, schemes=schemes)
    want, tensors = model.logits(TOKENS), model.loader.params.tensors()
    before = {key: tensor.data_ptr() for key, tensor in tensors.items()}
    for key, tensor in tensors.items():
        if not key.endswith(".table"):
            tensor.view(torch.uint8).zero_()
    model.loader.fill(weights.items())
    assert torch.equal(model.logits(TOKENS), want)
    model.loader.update(list(weights.items()))
    assert torch.equal(model.logits(TOKENS), want)
    assert {key: tensor.data_ptr() for key, tensor in model.loader.params.tensors().items()} == before
    parts = [(key, value) for key, value in weights.items() if key.endswith("mixers.0.q")]
    if name in ("int4-ordered", "fp8-tensor"):
        with pytest.raises(WeightError, match=r"mixers.0.qkv are quantised together; send layers.0.mixers.0.k, "):
            model.loader.update(parts)
    else:
        model.loader.update(parts)
        assert torch.equal(model.logits(TOKENS), want)


def test_stored_matrices_in_host_memory() -> None:
    stored, deep = STORED["int4-offsets"], replace(WIDE, layers=WIDE.layers * 2)
    many, matrices = dict(random_weights(deep)), filter(is_matrix, params(deep).values())
    many |= {param.name: stored.tensor(*param.shape, seed) for seed, param in enumerate(matrices)}
    every = {key: value.scheme for key, value in many.items() if isinstance(value, QuantizedTensor)}
    offloaded = TorchCudaModel(deep, many.items(), 16, schemes=every, offload=1.0)
    assert len(offloaded.on_host.layers) == 4
    torch.testing.assert_close(
        offloaded.logits(TOKENS), TorchCudaModel(deep, dense(many), 16).logits(TOKENS), atol=2e-4, rtol=2e-4
    )


def test_groups_that_ranks_divide_too_far_are_dequantised() -> None:
    """A rank begins at input 24 of 48."""
    scheme = Int4((1, 16))
    weights, schemes = dict(random_weights(SPEC)), {}
    for param in params(SPEC).values():
        if param.name.endswith("down"):
            weights[param.name], schemes[param.name] = Stored(scheme).tensor(*param.shape), scheme

    def kept(comm: Comm) -> int:
        model = TorchCudaModel(SPEC, weights.items(), 16, comm, schemes=schemes)
        return sum(isinstance(matrix, PackedMatrix) for matrix in model.loader.params.by_name.values())

    assert list(on_ranks(1, kept)) == [2]
    assert list(on_ranks(2, kept)) == [2, 0]


@pytest.mark.parametrize("kind", [12, 22, 23, 41], ids=["Q4_K", "IQ2_S", "IQ4_XS", "Q1_0"])
def test_ranks_divide_blocks_of_ggml(kind: int) -> None:
    """A rank begins at input 384, inside of a block of 256."""
    wide = replace(SPEC, layers=tuple(replace(layer, ffn=Mlp(768, "silu", True)) for layer in SPEC.layers))
    weights, schemes = dict(random_weights(wide)), {}
    scheme = Blocks(block_type(kind))
    for param in params(wide).values():
        if param.name.endswith("down"):
            weights[param.name], schemes[param.name] = Stored(scheme).tensor(*param.shape), scheme
    want = TorchCudaModel(wide, dense(weights), 16).logits(TOKENS)

    def logits(comm: Comm) -> torch.Tensor:
        model = TorchCudaModel(wide, weights.items(), 16, comm, schemes=schemes)
        assert sum(isinstance(matrix, PackedMatrix) for matrix in model.loader.params.by_name.values()) == 2
        return model.logits(TOKENS)

    for actual in on_ranks(2, logits):
        torch.testing.assert_close(actual, want, atol=1e-3, rtol=1e-3)
