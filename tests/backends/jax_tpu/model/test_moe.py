"""One mixture-of-experts layer out of a stack, on two devices: with the kernel, interpreted, and with its reference."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

pytest.importorskip("flax")

import jax
import jax.numpy as jnp
import numpy as np
import support.devices.jax_devices  # noqa: F401
import torch
from flax import nnx
from jax.sharding import PartitionSpec

from pagoda.backends.jax_tpu.execution.step_input import KernelChoice
from pagoda.backends.jax_tpu.model import layers
from pagoda.backends.jax_tpu.model.layers import MlpFfn, MoeFfn, route
from pagoda.backends.jax_tpu.model.parameters import GroupedMatrix, JaxBuildContext
from pagoda.backends.jax_tpu.parallel import make_mesh, partition
from pagoda.backends.jax_tpu.weights.arrange import MatrixFormat
from pagoda.backends.reference.model import ops
from pagoda.common.models.spec import ExpertGroups, Mlp, Moe, Router, SparseMixer
from pagoda.kernels_pallas.grouped_matmul import grouped_matmul

TOKENS, REAL, WIDTH, LAYERS, LAYER = 16, 11, 128, 3, 2


def run(spec: Moe, use_kernel: bool, form: MatrixFormat | None = None) -> np.ndarray:
    """Layer LAYER on two devices: [T, D]. `form`: of the experts."""
    formats = {} if form is None else {("inner",): form, ("down",): form}
    module = MoeFfn(spec, WIDTH, JaxBuildContext(jnp.dtype("float32"), 2, LAYERS, formats=formats))
    assert isinstance(module.inner, GroupedMatrix) == isinstance(module.down, GroupedMatrix) == (form is not None)
    graph, state = nnx.split(module)
    rng = np.random.default_rng(0)

    def random(leaf: jax.Array) -> jax.Array:
        if jnp.issubdtype(leaf.dtype, jnp.integer):
            return jnp.asarray(rng.integers(0, 1 << 8 * leaf.dtype.itemsize, leaf.shape).astype(leaf.dtype))
        return jnp.asarray(rng.standard_normal(leaf.shape) / (4 if form is None else 32), leaf.dtype)

    values = jax.tree.map(random, state)
    axes = jax.tree.map(
        lambda v: partition(v.get_metadata("axes")), state, is_leaf=lambda v: isinstance(v, nnx.Variable)
    )
    x = jnp.asarray(rng.standard_normal((TOKENS, WIDTH)), jnp.float32)
    kernel = KernelChoice(8, "float32", use_kernel=use_kernel, interpret=True)
    ends = jnp.asarray([0, REAL], jnp.int32)

    def layer(values, x):
        ffn = nnx.merge(graph, values)
        shared = () if ffn.shared is None else (ffn.shared.inner, ffn.shared.down, *biases(ffn.shared))
        for each in (ffn.router, ffn.correction, *biases(ffn), *shared, ffn.shared_gate):
            if each is not None:
                each.set_value(each[...][LAYER])  # the scan of the decoder cuts these
        step = SimpleNamespace(
            query_start=ends, kernel=kernel, adapter_mask=None, scattered=False
        )  # what a mixture reads of a step
        return ffn(x, jnp.int32(LAYER), step)

    everywhere = PartitionSpec()
    mapped = jax.shard_map(layer, mesh=make_mesh(2), in_specs=(axes, everywhere), out_specs=everywhere, check_vma=False)
    return np.asarray(jax.jit(mapped)(values, x))


def biases(module: MoeFfn | MlpFfn) -> tuple[nnx.Param | None, ...]:
    return module.inner_bias, module.down_bias


@pytest.mark.parametrize("bias", [False, True])
def test_the_kernel_is_its_reference(bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = []

    def counted(*args, **options):
        jax.debug.callback(lambda sizes: rows.append(int(sizes.sum())), args[3])
        return grouped_matmul(*args, **options)

    monkeypatch.setattr(layers, "grouped_matmul", counted)
    spec = Moe(6, Mlp(40, "silu", True, bias=bias), Router(2, True))
    ours, theirs = (run(spec, use_kernel) for use_kernel in (True, False))
    np.testing.assert_allclose(ours[:REAL], theirs[:REAL], rtol=1e-4, atol=1e-4)
    assert np.abs(theirs[:REAL]).max() > 0.1
    assert (ours[REAL:] == 0).all()
    jax.effects_barrier()
    assert set(rows) == {REAL * spec.router.top_k}, "padding goes to no expert"


@pytest.mark.parametrize(
    "form",
    [
        MatrixFormat("int8", for_kernel=True),
        MatrixFormat("int8", rounds_inputs=True, for_kernel=True),
        MatrixFormat("int4", for_kernel=True, group=16),
        MatrixFormat("e2m1", for_kernel=True, group=32),
    ],
)
def test_quantised_experts(form: MatrixFormat) -> None:
    spec = Moe(6, Mlp(40, "silu", True), Router(2, True))
    ours, theirs = (run(spec, use_kernel, form) for use_kernel in (True, False))
    np.testing.assert_allclose(ours[:REAL], theirs[:REAL], rtol=1e-3, atol=1e-3 * np.abs(theirs).max())
    assert np.abs(theirs[:REAL]).max() > 0.01


def test_padding_gets_nothing_from_the_shared_mlp_either() -> None:
    spec = Moe(6, Mlp(40, "silu", True), Router(2, True), shared=Mlp(24, "silu", True, bias=True), shared_gate=True)
    out, routed = run(spec, False), run(replace(spec, shared=None, shared_gate=False), False)
    assert (out[REAL:] == 0).all()
    assert np.abs(out[:REAL] - routed[:REAL]).max() > 0.1


ROUTERS = {
    "softmax": Router(3, True),
    "sigmoid": Router(2, True, "sigmoid", scale=1.5),
    "correction": Router(3, False, correction=True),
    "groups": Router(2, True, "sigmoid", correction=True, groups=ExpertGroups(4, 2, "best_two")),
    "best of groups": Router(2, False, groups=ExpertGroups(2, 1, "best")),
    "sparse mixer": SparseMixer(2, 0.2),
}


@pytest.mark.parametrize("kind", ROUTERS)
def test_routers_choose_and_weight_as_the_reference_does(kind: str) -> None:
    router, rng = ROUTERS[kind], np.random.default_rng(0)
    logits = rng.standard_normal((50, 8), np.float32)
    correction = rng.standard_normal(8, np.float32) if router.correction else None
    want, best = ops.route(
        torch.from_numpy(logits), router, None if correction is None else torch.from_numpy(correction)
    )
    weights, experts = route(jnp.asarray(logits), router, None if correction is None else jnp.asarray(correction))
    order, wanted_order = np.argsort(experts, 1), best.argsort(1)
    np.testing.assert_array_equal(np.take_along_axis(np.asarray(experts), order, 1), best.gather(1, wanted_order))
    ours = np.take_along_axis(np.asarray(weights), order, 1)
    np.testing.assert_allclose(ours, want.gather(1, wanted_order), rtol=1e-5)
