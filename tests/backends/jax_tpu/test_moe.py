"""One mixture-of-experts layer out of a stack, on two devices: with the kernel, interpreted, and with its reference."""

from __future__ import annotations

import pytest

pytest.importorskip("flax")

import jax
import jax.numpy as jnp
import numpy as np
import support.jax_devices  # noqa: F401
from flax import nnx
from jax.sharding import PartitionSpec

from pagoda.backends.jax_tpu.execution.step_input import KernelChoice, StepInput
from pagoda.backends.jax_tpu.model import layers
from pagoda.backends.jax_tpu.model.layers import JaxBuildContext, MoeFfn
from pagoda.backends.jax_tpu.parallel import make_mesh, partition
from pagoda.common.engine.shapes import StepShape
from pagoda.common.models.spec import Mlp, Moe, Router
from pagoda.kernels_pallas.grouped_matmul import grouped_matmul

TOKENS, REAL, WIDTH, LAYERS, LAYER = 16, 11, 128, 3, 2


def run(spec: Moe, use_kernel: bool) -> np.ndarray:
    """Layer LAYER on two devices: [T, D]."""
    module = MoeFfn(spec, WIDTH, JaxBuildContext(jnp.dtype("float32"), 2, LAYERS))
    graph, state = nnx.split(module)
    rng = np.random.default_rng(0)
    values = jax.tree.map(lambda leaf: jnp.asarray(rng.standard_normal(leaf.shape) / 4, leaf.dtype), state)
    axes = jax.tree.map(
        lambda v: partition(v.get_metadata("axes")), state, is_leaf=lambda v: isinstance(v, nnx.Variable)
    )
    x = jnp.asarray(rng.standard_normal((TOKENS, WIDTH)), jnp.float32)
    kernel = KernelChoice(8, "float32", use_kernel=use_kernel, interpret=True)
    ends = jnp.asarray([0, REAL], jnp.int32)

    def layer(values, x):
        ffn = nnx.merge(graph, values)
        for name in ("router", "inner_bias", "down_bias"):  # the scan of the decoder cuts these
            if getattr(ffn, name) is not None:
                getattr(ffn, name).set_value(getattr(ffn, name)[...][LAYER])
        step = StepInput(*[ends] * 7, kernel, StepShape(TOKENS, 1, 1, 1, False))
        return ffn(x, jnp.int32(LAYER), step)

    everywhere = PartitionSpec()
    mapped = jax.shard_map(layer, mesh=make_mesh(2), in_specs=(axes, everywhere), out_specs=everywhere, check_vma=False)
    return np.asarray(jax.jit(mapped)(values, x))


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
