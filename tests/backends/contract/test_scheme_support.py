"""Each backend's declaration of what it does with quantised matrices, against what loading them does."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module, util
from typing import Any, get_args

import pytest
from support.engines.reference_driver import Driver, tiny_spec
from support.suite.slow_matrix import thinned

from pagoda.backends.reference.model.quantized.compiled import lanes
from pagoda.common.errors import ConfigError, ModelError
from pagoda.common.models.mixers import Attention
from pagoda.common.models.primitives import Param
from pagoda.common.models.rope import Rope
from pagoda.common.models.shapes import params
from pagoda.common.models.spec import Layer, Mlp, ModelSpec, Moe, Router
from pagoda.common.weights.gguf.dequantize import block_type
from pagoda.common.weights.quantization.on_the_fly import is_matrix
from pagoda.common.weights.quantization.schemes import SCHEME_ROWS, Blocks, ScaledScheme, Scheme
from pagoda.common.weights.quantization.support import SchemeSupport
from pagoda.common.weights.quantization.tensors import QuantizedTensor
from pagoda.server.startup.parameters import dummy_weights

BACKENDS = ["reference", "torch_cuda", "jax_tpu"]
NEEDS = {"torch_cuda": "triton", "jax_tpu": "flax"}
SIZE = 256
OF_BLOCKS = ("GGUF Q4_0", "GGUF Q4_K", "GGUF IQ4_XS")
"""ggml's types that are loaded even where they are declared dequantised; each takes a moment."""


def spec_of(experts: bool) -> ModelSpec:
    """One layer, all matrices of which have SIZE inputs."""
    base = tiny_spec()
    expert = Mlp(SIZE, "silu", True)
    ffn = Moe(2, expert, Router(1, True)) if experts else expert
    layer = Layer((Attention(4, 4, SIZE // 4, 0.25, Rope(1e4, SIZE // 4)),), ffn, base.layers[0].norms)
    return replace(base, width=SIZE, layers=(layer,))


def load(backend: str, matrices: dict[str, Any], spec: ModelSpec) -> None:
    device: dict[str, Any] = {}
    if backend == "torch_cuda":
        device = {"device": import_module("pagoda.backends.torch_cuda.device").CPU}
    weights = dummy_weights(params(spec), schemes=matrices, dtype="float32")
    if backend == "reference":
        device = {"dtype": "bfloat16"}  # float32 keeps the activations' precision
    driver = Driver(spec, rows=1, block_size=8, backend=backend, weights=weights, schemes=matrices, **device)
    driver.backend.close()


@thinned(  # jax_tpu's take longest
    lambda backend, experts: backend != "jax_tpu" or not experts,
    backend=BACKENDS,
    experts=[False, True],
)
def test_the_declaration_is_what_loading_does(
    backend: str, experts: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if backend in NEEDS and util.find_spec(NEEDS[backend]) is None:
        pytest.skip(f"needs {NEEDS[backend]}")
    if backend == "jax_tpu":
        import_module("support.devices.jax_devices")
    declared = import_module(f"pagoda.backends.{backend}.schemes").scheme_support
    dequantised: list[tuple[int, ...]] = []
    original = QuantizedTensor.dequantize
    monkeypatch.setattr(
        QuantizedTensor, "dequantize", lambda self: [dequantised.append(self.shape), original(self)][-1]
    )
    spec = spec_of(experts)
    matrices: list[Param] = [param for param in params(spec).values() if is_matrix(param)]
    stacks = sum(".experts." in param.name for param in matrices)
    wrong = {}
    for name, scheme in SCHEME_ROWS.items():
        support: SchemeSupport = declared(scheme, experts)
        assert support.how
        if backend == "reference" and "elsewhere dequantises" in support.how and not lanes():
            support = SchemeSupport("dequantises", "the model's type")
        if isinstance(scheme, Blocks) and name not in OF_BLOCKS and support.kind == "dequantises":
            continue
        dequantised.clear()
        caplog.clear()
        try:
            with caplog.at_level("INFO"):
                load(backend, dict.fromkeys((param.name for param in matrices), scheme), spec)
        except (ConfigError, ModelError):
            done = "refused"
        else:
            count = sum(len(shape) == 3 for shape in dequantised) if experts else len(dequantised)
            done = "dequantises" if count == (stacks or len(matrices)) else "computes" if not count else "in part"
            logged = any(f"{backend}: dequantised" in message for message in caplog.messages)
            assert logged == bool(dequantised), name
        if done != support.kind:
            wrong[name] = f"declared {support.kind}, is {done}"
    assert not wrong


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_scheme_has_a_row(backend: str) -> None:
    schemes = set(get_args(ScaledScheme if backend == "torch_cuda" else Scheme))  # torch_cuda multiplies no blocks
    assert set(import_module(f"pagoda.backends.{backend}.schemes").SCHEMES) == schemes


@pytest.mark.parametrize("name", [name for name, scheme in SCHEME_ROWS.items() if isinstance(scheme, Blocks)])
def test_block_types_are_those_of_the_library(name: str) -> None:
    pytest.importorskip("gguf")
    scheme = SCHEME_ROWS[name]
    assert isinstance(scheme, Blocks)
    assert block_type(scheme.kind.number) == scheme.kind
