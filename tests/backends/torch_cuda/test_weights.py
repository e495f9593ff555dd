"""Loading canonical weights into a rank's tensors: strict, in place, packed if configured."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from support.reference_driver import random_weights, tiny_spec
from support.torch_cuda_model import TorchCudaModel, poisoned

from pagoda.backends.torch_cuda.kernels.weight_only import PackedMatrix, pack, unpack
from pagoda.backends.torch_cuda.parallel import RankShard
from pagoda.backends.torch_cuda.weights import Loader
from pagoda.common.errors import WeightError
from pagoda.common.weights.dtypes import to_bfloat16

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
