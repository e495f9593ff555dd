"""RMSNorm and LayerNorm, computed in float32."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, TypeAlias

import jax
import jax.numpy as jnp
from flax import nnx

from pagoda.backends.jax_tpu.execution.packed_input import PackedInput
from pagoda.backends.jax_tpu.execution.step_input import StepInput
from pagoda.backends.jax_tpu.model.layout import padded
from pagoda.backends.jax_tpu.parallel.sharding import MODEL
from pagoda.common.models import spec as models
from pagoda.common.models.spec import Activation, Mlp, Moe, Router
from pagoda.kernels_pallas.grouped_matmul import grouped_matmul

# One parameter of an NNX module, and what the parts of the decoder need to know when they are built.


class ParameterStack(nnx.Param):
    """A parameter of all repeats of a layer, of which a kernel reads its own: a slice made for it would be a copy."""


@dataclass(frozen=True, slots=True)
class JaxBuildContext:
    """How the decoder is built: `dtype` of weights and activations, `tensor` devices per layer, `repeats` of a layer.

    Parameters of a layer are stacked over its repeats. `scaled_cache`: K and V are stored divided by a scale.
    `quantized`: the 8-bit type of the layers' matrices, None where they have `dtype`.
    """

    dtype: jnp.dtype
    tensor: int
    repeats: int | None = None
    scaled_cache: bool = False
    quantized: str | None = None

    def parameter(self, axes: str, *shape: int, kind: type[nnx.Param] = nnx.Param) -> nnx.Param:
        """A parameter of this global shape; `axes` has one logical letter per dimension (see `sharding`)."""
        assert len(axes) == len(shape), f"{axes} does not name the dimensions of {shape}"
        if self.repeats is not None:
            axes, shape = f"L{axes}", (self.repeats, *shape)
        return kind(jnp.zeros(shape, self.dtype), axes=axes)

    def matrix(self, axes: str, *shape: int) -> tuple[nnx.Param, nnx.Param | None]:
        """A parameter whose last axis is multiplied away, and the float32 scales of its other axes when quantised."""
        if self.quantized is None:
            return self.parameter(axes, *shape), None
        exact = replace(self, dtype=jnp.dtype(jnp.float32))
        return replace(self, dtype=jnp.dtype(self.quantized)).parameter(axes, *shape), exact.parameter(
            axes[:-1], *shape[:-1]
        )


def project(x: jax.Array, weight: jax.Array, scale: nnx.Param | None = None) -> jax.Array:
    """X [T, i] times weight [..., i] -> [T, ...]; `scale` [...]: of a quantised weight.

    The weight keeps its axes and is read as it lies: flattened, XLA would copy one of 8 bits first.
    """
    last = (((1,), (weight.ndim - 1,)), ((), ()))
    if scale is None:
        return jax.lax.dot_general(x, weight, last)
    wide = jax.lax.dot_general(x, weight.astype(x.dtype), last, preferred_element_type=jnp.float32)
    return (wide * scale[...]).astype(x.dtype)


def total(x: jax.Array) -> jax.Array:
    """The sum of every device's part."""
    return jax.lax.psum(x, MODEL)


def local_part(values: jax.Array, size: int) -> jax.Array:
    """This device's `size` of values that are whole everywhere."""
    return jax.lax.dynamic_slice_in_dim(values, jax.lax.axis_index(MODEL) * size, size)


class JaxNorm(nnx.Module):
    """A norm over the last axis D."""

    def __init__(self, spec: models.Norm, width: int, build: JaxBuildContext) -> None:
        self.spec = spec
        self.weight = build.parameter("D", width)
        self.bias = build.parameter("D", width) if spec.bias else None

    def __call__(self, x: jax.Array) -> jax.Array:
        """X [T, D] -> [T, D], in x's dtype."""
        bias = None if self.bias is None else self.bias[...]
        return normalise(x, self.spec, self.weight[...], bias)


def normalise(x: jax.Array, spec: models.Norm, weight: jax.Array, bias: jax.Array | None = None) -> jax.Array:
    """Norm of x [..., D] over its last axis; weight and bias [D]. Keeps x's dtype."""
    wide = x.astype(jnp.float32)
    if spec.kind == "layer":
        wide = wide - wide.mean(-1, keepdims=True)
    return scaled(wide, jnp.square(wide).mean(-1, keepdims=True), spec, weight, bias).astype(x.dtype)


def scaled(
    wide: jax.Array, mean_square: jax.Array, spec: models.Norm, weight: jax.Array, bias: jax.Array | None = None
) -> jax.Array:
    """float32 x divided by its root mean square, times the weight, plus the bias."""
    wide = wide * jax.lax.rsqrt(mean_square + spec.eps)
    factor = weight.astype(jnp.float32)
    wide = wide * (factor + 1 if spec.unit_offset else factor)
    return wide if bias is None else wide + bias.astype(jnp.float32)


def make_norm(spec: models.Norm | None, width: int, build: JaxBuildContext) -> JaxNorm | None:
    """The norm's module, or None."""
    return None if spec is None else JaxNorm(spec, width, build)


def apply(norm: JaxNorm | None, x: jax.Array) -> jax.Array:
    """The norm of x, or x where there is none."""
    return x if norm is None else norm(x)


# Feed-forward blocks: one MLP, split over the devices along its width.

ACTIVATIONS: Final[dict[Activation, Callable[[jax.Array], jax.Array]]] = {
    "silu": jax.nn.silu,
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": partial(jax.nn.gelu, approximate=True),
    "relu": jax.nn.relu,
}


class MlpFfn(nnx.Module):
    """`inner` [2, F, D]: gate and up when gated, else [1, F, D]; `down` [D, F]. F is padded with zeros."""

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
        both = project(x, self.inner[...], self.inner_scale)
        if self.inner_bias is not None:
            both = both + self.inner_bias[...]
        out = total(project(activate(self.spec, both), self.down[...], self.down_scale))
        return out if self.down_bias is None else out + self.down_bias[...]


def activate(spec: Mlp, parts: jax.Array) -> jax.Array:
    """Parts [T, 2 or 1, F] -> [T, F]."""
    hidden = ACTIVATIONS[spec.activation](parts[:, 0])
    return hidden * parts[:, 1] if spec.gated else hidden


# From pooled hidden states to raw answers: dense layers and a classifier, in float32.

_ACTIVATIONS: Final[dict[models.PoolerActivation, Callable[[jax.Array], jax.Array]]] = {
    "silu": ACTIVATIONS["silu"],
    "gelu": ACTIVATIONS["gelu"],
    "gelu_tanh": ACTIVATIONS["gelu_tanh"],
    "relu": ACTIVATIONS["relu"],
    "tanh": jnp.tanh,
}


class JaxPooler(nnx.Module):
    """`build`: of float32 parameters."""

    def __init__(self, spec: models.Pooler, width: int, build: JaxBuildContext) -> None:
        widths = [width, *(dense.width for dense in spec.dense)]
        self.kind = spec.kind
        self.dense = nnx.List([JaxDense(dense, before, build) for dense, before in zip(spec.dense, widths)])
        labels = spec.classifier
        self.classifier = None if labels is None else Product(labels.labels, widths[-1], labels.bias, build)

    def __call__(self, rows: jax.Array) -> jax.Array:
        """Float32 [R, D] -> [R, n]."""
        for dense in self.dense:
            rows = dense(rows)
        return rows if self.classifier is None else self.classifier(rows)


class Product(nnx.Module):
    """`weight` [n, D] and `bias` [n]."""

    def __init__(self, out: int, width: int, bias: bool, build: JaxBuildContext) -> None:
        self.weight = build.parameter("..", out, width)
        self.bias = build.parameter(".", out) if bias else None

    def __call__(self, rows: jax.Array) -> jax.Array:
        """[R, D] -> [R, n]."""
        out = jnp.matmul(rows, self.weight[...].T, precision="highest")
        return out if self.bias is None else out + self.bias[...]


class JaxDense(nnx.Module):
    """A product, an activation and a norm."""

    def __init__(self, spec: models.Dense, width: int, build: JaxBuildContext) -> None:
        self.spec = spec
        self.product = Product(spec.width, width, spec.bias, build)
        self.norm = make_norm(spec.norm, spec.width, build)

    def __call__(self, rows: jax.Array) -> jax.Array:
        """[R, D] -> [R, n]."""
        rows = self.product(rows)
        if self.spec.activation is not None:
            rows = _ACTIVATIONS[self.spec.activation](rows)
        return apply(self.norm, rows)


# What the layers may be given as a step: one over the paged cache, or whole prompts to be pooled.

AnyStep: TypeAlias = StepInput | PackedInput
"""Both have token_ids, positions, token_types, query_start, kernel and attend."""


# A routed mixture of experts: tokens sorted by expert, one grouped product over all of them.
#
# Every device holds a share of each expert's width, so that no token has to travel. Nothing is scattered: counts are
# sums of comparisons and results are gathered back, which the TPU does in place, where it sends scatters elsewhere.


class MoeFfn(nnx.Module):
    """`router` [E, D]; `inner` [L, E, 2 or 1, F, D], gate and up; `down` [L, E, 1, F, D]: the stacks of all repeats.

    D lies last in both: it is a multiple of 128, which a device's share of F need not be.
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

    def __call__(self, x: jax.Array, layer: jax.Array, step: AnyStep) -> jax.Array:
        """X [T, D] -> [T, D]. `layer` int32: which of the stack's; the tokens of padding go to no expert."""
        tokens, top = x.shape[0], self.spec.router.top_k
        weights, chosen = route(project(x, self.router[...]), self.spec.router)
        real = jnp.arange(tokens) < step.query_start[-1]
        expert = jnp.where(real[:, None], chosen, self.spec.experts).reshape(-1)
        order = jnp.argsort(expert)
        sizes = (expert[:, None] == jnp.arange(self.spec.experts)).sum(0)
        rows = x[order // top]  # of each (token, expert) pair, sorted by expert
        out = self._experts(rows, expert[order], sizes.astype(jnp.int32), layer, step)
        out = out[jnp.argsort(order)].reshape(tokens, top, -1).astype(jnp.float32) * weights[:, :, None]
        return total(jnp.where(real[:, None], out.sum(1), 0).astype(x.dtype))

    def _experts(
        self, rows: jax.Array, expert: jax.Array, sizes: jax.Array, layer: jax.Array, step: AnyStep
    ) -> jax.Array:
        """Rows [T*k, D] sorted by expert -> [T*k, D], this device's part of the sum; anything where padding is."""
        options = step.kernel.options
        both = grouped_matmul(rows, self.inner[...], layer, sizes, transposed=True, **options)
        if self.inner_bias is not None:
            both = both + self.inner_bias[...][expert].swapaxes(0, 1)
        hidden = activate(self.spec.expert, both.swapaxes(0, 1))
        out = grouped_matmul(hidden, self.down[...], layer, sizes, **options)[0]
        if self.down_bias is not None:
            first = jax.lax.axis_index("model") == 0
            out = out + jnp.where(first, self.down_bias[...][expert], 0)
        return out


def route(logits: jax.Array, spec: Router) -> tuple[jax.Array, jax.Array]:
    """Weights float32 [T, k] and expert numbers int32 [T, k] from router logits [T, E]."""
    weights, experts = jax.lax.top_k(jax.nn.softmax(logits.astype(jnp.float32)), spec.top_k)
    if spec.renormalise:
        weights = weights / weights.sum(-1, keepdims=True)
    return weights, experts
