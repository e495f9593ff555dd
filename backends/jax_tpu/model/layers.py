"""The decoder's layers besides attention: projections, norms, feed-forward blocks, pooling head, rotary embeddings.

Modules run inside `shard_map`: every array is a device's local piece, and exchanges between devices are explicit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, TypeAlias, assert_never

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from flax import nnx

from pagoda.backends.jax_tpu.execution.step_input import PoolInput, StepInput
from pagoda.backends.jax_tpu.model.layout import padded
from pagoda.backends.jax_tpu.parallel import MODEL
from pagoda.common.models import spec as models
from pagoda.common.models.primitives import Norm
from pagoda.common.models.rope import Rope, inverse_frequencies
from pagoda.common.models.spec import Activation, Ffn, Mlp, Moe, Router
from pagoda.kernels_pallas.grouped_matmul import grouped_matmul

AnyStep: TypeAlias = StepInput | PoolInput
"""The batch a layer runs on: a generation step over the paged cache, or whole prompts to pool."""

ACTIVATIONS: Final[dict[Activation, Callable[[jax.Array], jax.Array]]] = {
    "silu": jax.nn.silu,
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": partial(jax.nn.gelu, approximate=True),
    "relu": jax.nn.relu,
}
_POOLER_ACTIVATIONS: Final[dict[models.PoolerActivation, Callable[[jax.Array], jax.Array]]] = {
    "silu": ACTIVATIONS["silu"],
    "gelu": ACTIVATIONS["gelu"],
    "gelu_tanh": ACTIVATIONS["gelu_tanh"],
    "relu": ACTIVATIONS["relu"],
    "tanh": jnp.tanh,
}


class ParameterStack(nnx.Param):
    """A parameter stacked over repeats and passed whole to a kernel, because a slice would be a copy."""


@dataclass(frozen=True, slots=True)
class JaxBuildContext:
    """How modules create their parameters. Parameters of repeated layers are stacked over the repeats."""

    dtype: jnp.dtype  # of weights and activations
    tensor: int  # devices each layer is sharded over
    repeats: int | None = None  # None: outside repeated layers
    scaled_cache: bool = False  # K and V are stored divided by a scale
    quantized: str | None = None  # 8-bit dtype of the layers' matrices; None: `dtype`

    def parameter(self, axes: str, *shape: int, kind: type[nnx.Param] = nnx.Param) -> nnx.Param:
        """Create a parameter of global `shape`; `axes` has one logical axis letter per dimension (see `sharding`)."""
        assert len(axes) == len(shape), f"{axes} does not name the dimensions of {shape}"
        if self.repeats is not None:
            axes, shape = f"L{axes}", (self.repeats, *shape)
        return kind(jnp.zeros(shape, self.dtype), axes=axes)

    def matrix(self, axes: str, *shape: int) -> tuple[nnx.Param, nnx.Param | None]:
        """Create a matrix contracted over its last axis, and, if quantised, float32 scales over its other axes."""
        if self.quantized is None:
            return self.parameter(axes, *shape), None
        values = replace(self, dtype=jnp.dtype(self.quantized)).parameter(axes, *shape)
        return values, self.float32().parameter(axes[:-1], *shape[:-1])

    def float32(self) -> JaxBuildContext:
        """Return the context for float32 parameters."""
        return replace(self, dtype=jnp.dtype(jnp.float32))


def project(x: jax.Array, weight: jax.Array, scale: nnx.Param | None = None) -> jax.Array:
    """Multiply x [T, i] by weight [..., i] -> [T, ...]; `scale` [...]: of a quantised weight.

    The weight is not flattened: XLA would copy a flattened 8-bit weight first.
    """
    contract_last = (((1,), (weight.ndim - 1,)), ((), ()))
    if scale is None:
        return jax.lax.dot_general(x, weight, contract_last)
    product = jax.lax.dot_general(x, weight.astype(x.dtype), contract_last, preferred_element_type=jnp.float32)
    return (product * scale[...]).astype(x.dtype)


def all_reduce(x: jax.Array) -> jax.Array:
    """Sum x over the tensor-parallel devices."""
    return jax.lax.psum(x, MODEL)


def local_part(values: jax.Array, size: int) -> jax.Array:
    """Return this device's `size` entries of a replicated array."""
    return jax.lax.dynamic_slice_in_dim(values, jax.lax.axis_index(MODEL) * size, size)


class JaxNorm(nnx.Module):
    """RMSNorm or LayerNorm over the last axis D, computed in float32."""

    def __init__(self, spec: Norm, width: int, build: JaxBuildContext) -> None:
        self.spec = spec
        self.weight = build.parameter("D", width)
        self.bias = build.parameter("D", width) if spec.bias else None

    def __call__(self, x: jax.Array) -> jax.Array:
        """X [T, D] -> [T, D], in x's dtype."""
        bias = None if self.bias is None else self.bias[...]
        return normalise(x, self.spec, self.weight[...], bias)


def make_norm(spec: Norm | None, width: int, build: JaxBuildContext) -> JaxNorm | None:
    """Create the norm's module; None without a spec."""
    return None if spec is None else JaxNorm(spec, width, build)


def apply_norm(norm: JaxNorm | None, x: jax.Array) -> jax.Array:
    """Return the norm of x, or x itself without a norm."""
    return x if norm is None else norm(x)


def normalise(x: jax.Array, spec: Norm, weight: jax.Array, bias: jax.Array | None = None) -> jax.Array:
    """Normalise x [..., D] over its last axis; weight and bias [D]. Keeps x's dtype."""
    wide = x.astype(jnp.float32)
    if spec.kind == "layer":
        wide = wide - wide.mean(-1, keepdims=True)
    return scale_norm(wide, jnp.square(wide).mean(-1, keepdims=True), spec, weight, bias).astype(x.dtype)


def scale_norm(
    x: jax.Array, mean_square: jax.Array, spec: Norm, weight: jax.Array, bias: jax.Array | None = None
) -> jax.Array:
    """Divide float32 x by its root mean square, multiply by the weight and add the bias."""
    x = x * jax.lax.rsqrt(mean_square + spec.eps)
    factor = weight.astype(jnp.float32)
    x = x * (factor + 1 if spec.unit_offset else factor)
    return x if bias is None else x + bias.astype(jnp.float32)


def make_ffn(spec: Ffn, width: int, build: JaxBuildContext) -> MlpFfn | MoeFfn:
    """Create the module of a feed-forward block."""
    match spec:
        case Mlp():
            return MlpFfn(spec, width, build)
        case Moe():
            return MoeFfn(spec, width, build)
        case _:
            assert_never(spec)


def activate(spec: Mlp, parts: jax.Array) -> jax.Array:
    """Apply the activation: parts [T, 2 or 1, F] (gate and up, or up) -> [T, F]."""
    hidden = ACTIVATIONS[spec.activation](parts[:, 0])
    return hidden * parts[:, 1] if spec.gated else hidden


class MlpFfn(nnx.Module):
    """An MLP, sharded over its width F.

    `inner` [2, F, D]: gate and up if gated, else [1, F, D]; `down` [D, F]. F is padded with zeros.
    """

    def __init__(self, spec: Mlp, width: int, build: JaxBuildContext) -> None:
        inner = padded(spec.width, build.tensor)
        parts = 2 if spec.gated else 1
        self.spec = spec
        self.inner, self.inner_scale = build.matrix(".FD", parts, inner, width)
        self.inner_bias = build.parameter(".F", parts, inner) if spec.bias else None
        self.down, self.down_scale = build.matrix("DF", width, inner)
        self.down_bias = build.parameter("D", width) if spec.bias else None

    def __call__(self, x: jax.Array) -> jax.Array:
        """X [T, D] -> [T, D]."""
        parts = project(x, self.inner[...], self.inner_scale)
        if self.inner_bias is not None:
            parts = parts + self.inner_bias[...]
        out = all_reduce(project(activate(self.spec, parts), self.down[...], self.down_scale))
        return out if self.down_bias is None else out + self.down_bias[...]


class MoeFfn(nnx.Module):
    """A routed mixture of experts: tokens are sorted by expert for one grouped matmul over all experts.

    Every device holds a shard of each expert's width, so tokens stay on their device. The code has no scatters: counts
    are sums of comparisons and results are gathered, which the TPU does in place.

    `router` [E, D]; `inner` [L, E, 2 or 1, F, D], gate and up; `down` [L, E, 1, F, D]: stacked over all repeats. D is
    last in both because it is a multiple of 128, which a device's part of F may not be.
    """

    def __init__(self, spec: Moe, width: int, build: JaxBuildContext) -> None:
        expert, inner = spec.expert, padded(spec.expert.width, build.tensor)
        parts = 2 if expert.gated else 1
        self.spec = spec
        self.router = build.parameter("ED", spec.experts, width)
        self.inner = build.parameter("E.FD", spec.experts, parts, inner, width, kind=ParameterStack)
        self.inner_bias = build.parameter("E.F", spec.experts, parts, inner) if expert.bias else None
        self.down = build.parameter("E.FD", spec.experts, 1, inner, width, kind=ParameterStack)
        self.down_bias = build.parameter("ED", spec.experts, width) if expert.bias else None

    def __call__(self, x: jax.Array, repeat: jax.Array, step: AnyStep) -> jax.Array:
        """X [T, D] -> [T, D]. `repeat` int32: index into the stacks. Padding tokens are routed to no expert."""
        tokens, top = x.shape[0], self.spec.router.top_k
        weights, chosen = route(project(x, self.router[...]), self.spec.router)
        real = jnp.arange(tokens) < step.query_start[-1]
        expert = jnp.where(real[:, None], chosen, self.spec.experts).reshape(-1)
        order = jnp.argsort(expert)
        sizes = (expert[:, None] == jnp.arange(self.spec.experts)).sum(0)
        rows = x[order // top]  # of each (token, expert) pair, sorted by expert
        out = self._experts(rows, expert[order], sizes.astype(jnp.int32), repeat, step)
        out = out[jnp.argsort(order)].reshape(tokens, top, -1).astype(jnp.float32) * weights[:, :, None]
        return all_reduce(jnp.where(real[:, None], out.sum(1), 0).astype(x.dtype))

    def _experts(
        self, rows: jax.Array, expert: jax.Array, sizes: jax.Array, repeat: jax.Array, step: AnyStep
    ) -> jax.Array:
        """Rows [T*k, D] sorted by expert -> this device's partial sums [T*k, D], undefined for padding."""
        options = step.kernel.options
        parts = grouped_matmul(rows, self.inner[...], repeat, sizes, transposed=True, **options)
        if self.inner_bias is not None:
            parts = parts + self.inner_bias[...][expert].swapaxes(0, 1)
        hidden = activate(self.spec.expert, parts.swapaxes(0, 1))
        out = grouped_matmul(hidden, self.down[...], repeat, sizes, **options)[0]
        if self.down_bias is not None:
            first = jax.lax.axis_index(MODEL) == 0
            out = out + jnp.where(first, self.down_bias[...][expert], 0)
        return out


def route(logits: jax.Array, spec: Router) -> tuple[jax.Array, jax.Array]:
    """Return weights float32 [T, k] and expert ids int32 [T, k] from router logits [T, E]."""
    weights, experts = jax.lax.top_k(jax.nn.softmax(logits.astype(jnp.float32)), spec.top_k)
    if spec.renormalise:
        weights = weights / weights.sum(-1, keepdims=True)
    return weights, experts


class JaxPooler(nnx.Module):
    """The pooling head: dense layers and a classifier over pooled hidden states, in float32."""

    def __init__(self, spec: models.Pooler, width: int, build: JaxBuildContext) -> None:
        widths = [width, *(dense.width for dense in spec.dense)]
        self.kind = spec.kind
        self.dense = nnx.List([JaxDense(dense, before, build) for dense, before in zip(spec.dense, widths)])
        labels = spec.classifier
        self.classifier = None if labels is None else JaxLinear(labels.labels, widths[-1], labels.bias, build)

    def __call__(self, rows: jax.Array) -> jax.Array:
        """Float32 [R, D] -> [R, n]."""
        for dense in self.dense:
            rows = dense(rows)
        return rows if self.classifier is None else self.classifier(rows)


class JaxDense(nnx.Module):
    """A linear layer, an activation and a norm."""

    def __init__(self, spec: models.Dense, width: int, build: JaxBuildContext) -> None:
        self.spec = spec
        self.product = JaxLinear(spec.width, width, spec.bias, build)
        self.norm = make_norm(spec.norm, spec.width, build)

    def __call__(self, rows: jax.Array) -> jax.Array:
        """[R, D] -> [R, n]."""
        rows = self.product(rows)
        if self.spec.activation is not None:
            rows = _POOLER_ACTIVATIONS[self.spec.activation](rows)
        return apply_norm(self.norm, rows)


class JaxLinear(nnx.Module):
    """`weight` [n, D] and `bias` [n], replicated."""

    def __init__(self, out: int, width: int, bias: bool, build: JaxBuildContext) -> None:
        self.weight = build.parameter("..", out, width)
        self.bias = build.parameter(".", out) if bias else None

    def __call__(self, rows: jax.Array) -> jax.Array:
        """[R, D] -> [R, n]."""
        out = jnp.matmul(rows, self.weight[...].T, precision="highest")
        return out if self.bias is None else out + self.bias[...]


SPAN: Final = 512
"""Rotary embeddings have two small tables instead of one long one: a position is high * SPAN + low, and cos(a + b) =
cos a cos b - sin a sin b. The tables are computed in float64, so angles are accurate at any length; float32 position
times frequency would be off by 1e-2 at 100k tokens.
"""


@dataclass(frozen=True, slots=True)
class JaxRotation:
    """The rotation of one step's tokens. Channel i of the first `dim` is paired with channel i + dim/2."""

    cos: jax.Array  # float32 [T, 1, dim/2]
    sin: jax.Array  # float32 [T, 1, dim/2]
    dim: int

    def __call__(self, x: jax.Array) -> jax.Array:
        """Rotate x [T, n, H].

        Halves are swapped by a matmul with a signed permutation: exact, and cheap on the matrix unit. Slicing halves of
        the TPU's 128 lanes would copy x to another layout and back.
        """
        unrotated = x.shape[-1] - self.dim
        cos = jnp.pad(jnp.concatenate([self.cos, self.cos], -1), [(0, 0), (0, 0), (0, unrotated)], constant_values=1)
        sin = jnp.pad(jnp.concatenate([self.sin, self.sin], -1), [(0, 0), (0, 0), (0, unrotated)])
        swapped = jnp.einsum("tnh,hg->tng", x, _swap_matrix(x, self.dim), preferred_element_type=jnp.float32)
        return (x.astype(jnp.float32) * cos + swapped * sin).astype(x.dtype)


def _swap_matrix(x: jax.Array, dim: int) -> jax.Array:
    """Return [H, H] of x's dtype that maps [first half, second half, tail] to [-second half, first half, 0]."""
    half, channel = dim // 2, np.arange(dim // 2)
    matrix = np.zeros((x.shape[-1], x.shape[-1]), np.float32)
    matrix[channel + half, channel] = -1
    matrix[channel, channel + half] = 1
    return jnp.asarray(matrix, x.dtype)


def table_shape(rope: Rope, max_len: int) -> tuple[int, int, int]:
    """Return the table's shape (rows, dim/2, 2): SPAN rows of low angles, then the high angles; cos and sin."""
    return SPAN + -(-max_len // SPAN), rope.dim // 2, 2


def table(rope: Rope, max_len: int) -> npt.NDArray[np.float32]:
    """Return the table of `table_shape`. The attention factor is multiplied into the low rows."""
    frequencies, factor = inverse_frequencies(rope, max_len)
    low = np.arange(SPAN)[:, None] * frequencies
    high = np.arange(-(-max_len // SPAN))[:, None] * (SPAN * frequencies)
    pairs = [np.stack([np.cos(angle), np.sin(angle)], -1) for angle in (low, high)]
    return np.concatenate([pairs[0] * factor, pairs[1]]).astype(np.float32)


def rotation(table: jax.Array, positions: jax.Array) -> JaxRotation:
    """Return the rotation at positions int32 [T], from a table."""
    low, high = table[positions % SPAN], table[SPAN + positions // SPAN]
    cos = low[..., 0] * high[..., 0] - low[..., 1] * high[..., 1]
    sin = low[..., 1] * high[..., 0] + low[..., 0] * high[..., 1]
    return JaxRotation(cos[:, None], sin[:, None], 2 * table.shape[1])
