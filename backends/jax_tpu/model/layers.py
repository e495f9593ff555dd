"""The decoder's layers besides attention: projections, norms, feed-forward blocks, pooling head, rotary embeddings.

Modules run inside `shard_map`: every array is a device's local piece, and exchanges between devices are explicit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from statistics import NormalDist
from typing import Final, TypeAlias, assert_never

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from flax import nnx

from pagoda.backends.jax_tpu.model.lora import AdapterOutputs, JaxExpertLora, JaxLora, stacked
from pagoda.backends.jax_tpu.model.parameters import AnyStep, GroupedMatrix, JaxBuildContext, project
from pagoda.backends.jax_tpu.parallel import MODEL
from pagoda.common.engine.steps.contract import FIRST_ROW
from pagoda.common.models import spec as models
from pagoda.common.models.mixers import QueryGrowth
from pagoda.common.models.primitives import Norm
from pagoda.common.models.rope import Rope, inverse_frequencies
from pagoda.common.models.spec import Activation, ExpertGroups, Ffn, Mlp, Moe, Router, SparseMixer
from pagoda.kernels_pallas.grouped_matmul import grouped_matmul

Caches: TypeAlias = tuple[jax.Array, ...]
Rotations: TypeAlias = "Mapping[Rope, JaxRotation]"

ACTIVATIONS: Final[dict[Activation, Callable[[jax.Array], jax.Array]]] = {
    "silu": jax.nn.silu,
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": partial(jax.nn.gelu, approximate=True),
    "relu": jax.nn.relu,
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
}
_POOLER_ACTIVATIONS: Final[dict[models.PoolerActivation, Callable[[jax.Array], jax.Array]]] = {
    "silu": ACTIVATIONS["silu"],
    "gelu": ACTIVATIONS["gelu"],
    "gelu_tanh": ACTIVATIONS["gelu_tanh"],
    "relu": ACTIVATIONS["relu"],
    "relu2": ACTIVATIONS["relu2"],
    "tanh": jnp.tanh,
}


_SMALLEST_SUM: Final = 1e-20
"""Of scores that are renormalised: sigmoids may all be 0."""


def all_reduce(x: jax.Array) -> jax.Array:
    """Sum x over the tensor-parallel devices."""
    return jax.lax.psum(x, MODEL)


def reduced(x: jax.Array, step: AnyStep) -> jax.Array:
    """Sum x [T, D] over the tensor-parallel devices, each of which gets all tokens, or its part of a scattered step.

    In a step of several pieces x is one of them.
    """
    if not step.scattered:
        return all_reduce(x)
    if step.pieces == 1:
        return jax.lax.psum_scatter(x, MODEL, scatter_dimension=0, tiled=True)
    # The parts are an axis of their own, because XLA makes all-reduces, of twice the bytes, of several tiled ones.
    parts = x.reshape(jax.lax.axis_size(MODEL), -1, x.shape[1])
    return jax.lax.psum_scatter(parts, MODEL, scatter_dimension=0)


def gathered(x: jax.Array, step: AnyStep) -> jax.Array:
    """Return all tokens [T, D] of a scattered step's parts, or x as it is."""
    return piecewise(all_tokens, x, step) if step.scattered else x


def all_tokens(x: jax.Array) -> jax.Array:
    """Return all tokens [T, D] of the devices' parts."""
    return jax.lax.all_gather(x, MODEL, axis=0, tiled=True)


def piecewise(function: Callable[[jax.Array], jax.Array], x: jax.Array, step: AnyStep) -> jax.Array:
    """Apply a function to x [T, ...], or to each of the step's pieces, beside which others are exchanged."""
    if step.pieces == 1:
        return function(x)
    return jnp.concatenate([function(piece) for piece in jnp.split(x, step.pieces)])


def own_tokens(x: jax.Array, step: AnyStep, tensor: int) -> jax.Array:
    """Return this device's part [T / tensor, D] of replicated x [T, D]: a part of each piece of a scattered step."""
    if step.pieces == 1:
        return local_part(x, len(x) // tensor)
    pieces = x.reshape(step.pieces, -1, x.shape[1])
    size = pieces.shape[1] // tensor
    own = jax.lax.dynamic_slice_in_dim(pieces, jax.lax.axis_index(MODEL) * size, size, 1)
    return own.reshape(-1, x.shape[1])


def lookup(table: jax.Array, token_ids: jax.Array) -> jax.Array:
    """Return the rows [T, n] of token_ids int32 [T]; the table's rows are sharded over the devices."""
    index = token_ids - jax.lax.axis_index(MODEL) * table.shape[0]
    local = (index >= 0) & (index < table.shape[0])
    return all_reduce(jnp.where(local[:, None], table[jnp.where(local, index, 0)], 0))


def without_rows(token_ids: jax.Array) -> jax.Array:
    """Return token_ids int32 [T] with 0 in place of those that name rows of media or are EMBEDDED."""
    return jnp.where(token_ids < FIRST_ROW, token_ids, 0)


def insert_rows(x: jax.Array, token_ids: jax.Array, rows: jax.Array) -> jax.Array:
    """Return x [T, D] with rows [R, D] of media in place of the embeddings of token_ids int32 [T] that name one."""
    named = token_ids >= FIRST_ROW
    return jnp.where(named[:, None], rows[jnp.where(named, token_ids - FIRST_ROW, 0)].astype(x.dtype), x)


def local_part(values: jax.Array, size: int) -> jax.Array:
    """Return this device's `size` entries of a replicated array."""
    return jax.lax.dynamic_slice_in_dim(values, jax.lax.axis_index(MODEL) * size, size)


class JaxNorm(nnx.Module):
    """RMSNorm or LayerNorm over the last axis D, computed in float32."""

    def __init__(self, spec: Norm, width: int, build: JaxBuildContext) -> None:
        self.spec = spec
        self.weight = build.parameter("D", width) if spec.scale else None
        self.bias = build.parameter("D", width) if spec.bias else None

    def __call__(self, x: jax.Array) -> jax.Array:
        """X [T, D] -> [T, D], in x's dtype."""
        weight = None if self.weight is None else self.weight[...]
        bias = None if self.bias is None else self.bias[...]
        return normalise(x, self.spec, weight, bias)


def make_norm(spec: Norm | None, width: int, build: JaxBuildContext) -> JaxNorm | None:
    """Create the norm's module; None without a spec."""
    return None if spec is None else JaxNorm(spec, width, build)


def apply_norm(norm: JaxNorm | None, x: jax.Array) -> jax.Array:
    """Return the norm of x, or x itself without a norm."""
    return x if norm is None else norm(x)


def normalise(x: jax.Array, spec: Norm, weight: jax.Array | None, bias: jax.Array | None = None) -> jax.Array:
    """Normalise x [..., D] over its last axis; weight and bias [D]. Keeps x's dtype."""
    wide = x.astype(jnp.float32)
    if spec.kind == "layer":
        wide = wide - wide.mean(-1, keepdims=True)
    return scale_norm(wide, jnp.square(wide).mean(-1, keepdims=True), spec, weight, bias).astype(x.dtype)


def scale_norm(
    x: jax.Array, mean_square: jax.Array, spec: Norm, weight: jax.Array | None, bias: jax.Array | None = None
) -> jax.Array:
    """Divide float32 x by its root mean square, multiply by the weight and add the bias."""
    x = x * jax.lax.rsqrt(mean_square + spec.eps)
    if weight is None:
        return x
    factor = weight.astype(jnp.float32)
    x = x * (factor + 1 if spec.unit_offset else factor)
    return x if bias is None else x + bias.astype(jnp.float32)


def split_norm(x: jax.Array, spec: Norm, weight: jax.Array, channels: int) -> jax.Array:
    """Normalise x [T, n], a device's part of `channels` channels; weight [n]. Keeps x's dtype."""
    wide = x.astype(jnp.float32)
    mean = all_reduce(jnp.square(wide).sum(-1, keepdims=True)) / channels
    return scale_norm(wide, mean, spec, weight).astype(x.dtype)


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
    if spec.clamped is not None:
        return clamped_glu(parts[:, 0], parts[:, 1], spec.clamped)
    hidden = ACTIVATIONS[spec.activation](parts[:, 0])
    if spec.clip is not None:
        return jnp.minimum(hidden, spec.clip) * jnp.clip(parts[:, 1], -spec.clip, spec.clip)
    return hidden * parts[:, 1] if spec.gated else hidden


def clamped_glu(gate: jax.Array, up: jax.Array, spec: models.ClampedGlu) -> jax.Array:
    """Return the activation of gate and up [T, F]."""
    gate = jnp.minimum(gate, spec.limit)
    up = jnp.clip(up, -spec.limit, spec.limit)
    return gate * jax.nn.sigmoid(spec.alpha * gate) * (up + 1)


def xielu(x: jax.Array, spec: models.Xielu, curvature_p: jax.Array, curvature_n: jax.Array) -> jax.Array:
    """Return xIELU of x, computed in float32; curvatures [1], before their softplus. Keeps x's dtype."""
    wide = x.astype(jnp.float32)
    above = jax.nn.softplus(curvature_p.astype(jnp.float32)) * jnp.square(wide)
    slope = spec.beta + jax.nn.softplus(curvature_n.astype(jnp.float32))
    below = slope * (jnp.expm1(jnp.minimum(wide, spec.eps)) - wide)
    return (jnp.where(wide > 0, above, below) + spec.beta * wide).astype(x.dtype)


def sparse(gate: jax.Array, spec: Mlp) -> jax.Array:
    """Return relu(gate - cutoff) of a device's part of the gates [T, F], whose cutoff is that of whole rows."""
    wide = gate.astype(jnp.float32)
    size = gate.shape[1]
    real = jax.lax.axis_index(MODEL) * size + jnp.arange(size) < spec.width  # the others are padding

    def mean(x: jax.Array) -> jax.Array:
        return all_reduce(jnp.where(real, x, 0).sum(-1, keepdims=True)) / spec.width

    middle = mean(wide)
    deviation = jnp.sqrt(mean(jnp.square(wide - middle)))
    cutoff = middle + deviation * NormalDist().inv_cdf(spec.sparsity)
    return jnp.where(real, jax.nn.relu(wide - cutoff), 0).astype(gate.dtype)


class MlpFfn(nnx.Module):
    """An MLP, sharded over its width F.

    `inner` [2, F, D]: gate and up if gated, else [1, F, D]; `down` [D, F]. F is padded with zeros.
    """

    def __init__(self, spec: Mlp, width: int, build: JaxBuildContext) -> None:
        inner = build.ffn_width(spec.width)
        parts = 2 if spec.gated else 1
        self.spec = spec
        self.inner = build.matrix("inner", ".FD", parts, inner, width)
        self.inner_bias = build.parameter(".F", parts, inner) if spec.bias else None
        self.down = build.matrix("down", "DF", width, inner)
        self.down_bias = build.parameter("D", width) if spec.bias or spec.down_bias else None
        names = parts * (AdapterOutputs("F", (inner,)),)
        lora = build.lora
        self.lora_in = None if lora is None else JaxLora("D", width, names, build)
        self.lora_out = None if lora is None else JaxLora("F", inner, (AdapterOutputs("D", (width,)),), build)
        self.inner_norm = None if spec.inner_norm is None else build.parameter("F", inner)
        learned = spec.learned is not None
        self.curvature_p = build.parameter(".", 1) if learned else None
        self.curvature_n = build.parameter(".", 1) if learned else None

    def __call__(self, x: jax.Array, step: AnyStep, added: jax.Array | None = None) -> jax.Array:
        """X [T, D] -> [T, D]. `added` [T, 2 or 1, F]: to gate and up."""
        return self.total(self.hidden(x, step, added), step)

    def total(self, hidden: jax.Array, step: AnyStep) -> jax.Array:
        """Activations [T, F] -> [T, D], summed over the devices."""
        out = reduced(self.outward(hidden, step), step)
        return out if self.down_bias is None else out + self.down_bias[...]

    def partial_sum(self, x: jax.Array, step: AnyStep, added: jax.Array | None = None) -> jax.Array:
        """X [T, D] -> this device's addend of the output [T, D] without its bias."""
        return self.outward(self.hidden(x, step, added), step)

    def hidden(self, x: jax.Array, step: AnyStep, added: jax.Array | None = None) -> jax.Array:
        """X [T, D] -> the activations [T, F]."""
        parts = project(x, self.inner, step)
        parts = parts if added is None else parts + added
        if self.lora_in is not None and step.adapter_mask is not None:
            parts = stacked(self.lora_in(x, step.adapter_mask), 1).on(parts)
        if self.inner_bias is not None:
            parts = parts + self.inner_bias[...]
        if self.spec.sparsity:
            parts = parts.at[:, 0].set(sparse(parts[:, 0], self.spec))
        return self._normalised(self._activate(parts))

    def _normalised(self, hidden: jax.Array) -> jax.Array:
        """Apply the norm of the activations [T, F], if any. Padding is zero and adds nothing to the sums of squares."""
        if self.spec.inner_norm is None or self.inner_norm is None:
            return hidden
        return split_norm(hidden, self.spec.inner_norm, self.inner_norm[...], self.spec.width)

    def outward(self, hidden: jax.Array, step: AnyStep) -> jax.Array:
        """Activations [T, F] -> this device's addend of the output [T, D] without its bias."""
        out = project(hidden, self.down, step)
        if self.lora_out is None or step.adapter_mask is None:
            return out
        return self.lora_out(hidden, step.adapter_mask)[0].on(out)

    def _activate(self, parts: jax.Array) -> jax.Array:
        if self.spec.learned is None or self.curvature_p is None or self.curvature_n is None:
            return activate(self.spec, parts)
        return xielu(parts[:, 0], self.spec.learned, self.curvature_p[...], self.curvature_n[...])


class MoeFfn(nnx.Module):
    """A routed mixture of experts: tokens are sorted by expert for one grouped matmul over all experts.

    Every device holds a shard of each expert's width, so tokens stay on their device. The code has no scatters: counts
    are sums of comparisons and results are gathered, which the TPU does in place.

    `router` [E, D]; `inner` [L, E, 2 or 1, F, D], gate and up; `down` [L, E, 1, F, D]: stacked over all repeats. D is
    last in both because it is a multiple of 128, which a device's part of F may not be. Quantised ones are
    `GroupedMatrix`, with F padded. Latent experts have the latent channels in place of D, between `latent_in`
    [latent, D] and `latent_out` [D, latent]; the latter multiplies a device's addend. Rows of identity experts are
    sorted last, as those of padding, and computed by no expert; the first device adds x for them.
    """

    def __init__(self, spec: Moe, width: int, build: JaxBuildContext) -> None:
        expert = spec.expert
        channels = spec.latent or width
        inner = build.ffn_width(spec.expert.width)
        parts = 2 if expert.gated else 1
        self.spec = spec
        self.router = build.parameter("ED", spec.choices, width)
        self.router_bias = build.parameter("E", spec.choices) if spec.router.bias else None
        self.correction = build.float32().parameter("E", spec.choices) if spec.router.correction else None
        self.inner = build.experts("inner", "E.DF", spec.experts, parts, channels, inner, transposed=True)
        self.inner_bias = build.parameter("E.F", spec.experts, parts, inner) if expert.bias else None
        self.down = build.experts("down", "E.FD", spec.experts, 1, inner, channels)
        self.down_bias = build.parameter("ED", spec.experts, channels) if expert.bias else None
        lora = build.lora is not None
        self.lora_in = JaxExpertLora(spec.experts, channels, inner, parts, "outputs", build) if lora else None
        self.lora_out = JaxExpertLora(spec.experts, inner, channels, 1, "inputs", build) if lora else None
        self.latent_in = None if spec.latent is None else build.matrix("latent_in", ".D", channels, width)
        self.latent_out = None if spec.latent is None else build.matrix("latent_out", "D.", width, channels)
        self.shared = None if spec.shared is None else MlpFfn(spec.shared, width, build.at("shared"))
        self.shared_gate = build.parameter(".D", 1, width) if spec.shared_gate else None

    def __call__(
        self,
        x: jax.Array,
        repeat: jax.Array,
        step: AnyStep,
        router_input: jax.Array | None = None,
        expert_scale: jax.Array | None = None,
    ) -> jax.Array:
        """X [T, D] -> [T, D]. `repeat` int32: index into the stacks. Padding tokens are routed to no expert.

        router_input [T, D]: what the router reads, by default x. expert_scale [E]: multiplies the weights.
        """
        tokens = x.shape[0]
        top = self.spec.router.top_k
        correction = None if self.correction is None else self.correction[...]
        logits = project(x if router_input is None else router_input, self.router[...])
        logits = logits if self.router_bias is None else logits + self.router_bias[...]
        weights, chosen = route(logits, self.spec.router, correction)
        weights = weights if expert_scale is None else weights * expert_scale[chosen]
        real = jnp.arange(tokens) < step.query_start[-1]
        if self.spec.identity:
            chosen = jnp.minimum(chosen, self.spec.experts)
        expert = jnp.where(real[:, None], chosen, self.spec.experts).reshape(-1)
        order = jnp.argsort(expert)
        sizes = (expert[:, None] == jnp.arange(self.spec.experts)).sum(0)
        routed = x if self.latent_in is None else project(x, self.latent_in, step)
        if self.spec.weighs_input:
            routed = routed * weights.astype(x.dtype)
            weights = jnp.ones_like(weights)
        rows = routed[order // top]  # of each (token, expert) pair, sorted by expert
        mask = None if step.adapter_mask is None else step.adapter_mask[order // top]
        out = self._experts(rows, expert[order], sizes.astype(jnp.int32), repeat, step, mask)
        out = out[jnp.argsort(order)].reshape(tokens, top, -1).astype(jnp.float32)
        if self.spec.identity:
            returned = jnp.where(jax.lax.axis_index(MODEL) == 0, x, 0).astype(jnp.float32)
            out = jnp.where((chosen < self.spec.experts)[:, :, None], out, returned[:, None])
        mixed = (out * weights[:, :, None]).sum(1)
        if self.latent_out is not None:
            mixed = project(mixed.astype(x.dtype), self.latent_out, step)
        mixed = mixed if self.shared is None else mixed + self._shared(self.shared, x, step)
        return reduced(jnp.where(real[:, None], mixed, 0).astype(x.dtype), step)

    def _shared(self, mlp: MlpFfn, x: jax.Array, step: AnyStep) -> jax.Array:
        """X [T, D] -> this device's addend of the shared Mlp's output [T, D], times its gate."""
        out = mlp.partial_sum(x, step)
        if mlp.down_bias is not None:
            out = out + jnp.where(jax.lax.axis_index(MODEL) == 0, mlp.down_bias[...], 0)
        return out if self.shared_gate is None else jax.nn.sigmoid(project(x, self.shared_gate[...])) * out

    def _experts(
        self,
        rows: jax.Array,
        expert: jax.Array,
        sizes: jax.Array,
        repeat: jax.Array,
        step: AnyStep,
        mask: jax.Array | None,
    ) -> jax.Array:
        """Rows [T*k, D] sorted by expert -> this device's partial sums [T*k, D], undefined for padding.

        `mask` bool [T*k, A]: of the rows' adapters; None: no row has one.
        """
        options = step.kernel.options
        if isinstance(self.inner, GroupedMatrix):
            parts = self.inner(rows, repeat, sizes, step.kernel)
        else:
            parts = grouped_matmul(rows, self.inner[...], repeat, sizes, transposed=True, **options)
        if self.lora_in is not None and mask is not None:
            parts = parts + self.lora_in(rows, mask, repeat, sizes, step.kernel)
        if self.inner_bias is not None:
            parts = parts + self.inner_bias[...][expert].swapaxes(0, 1)
        hidden = activate(self.spec.expert, parts.swapaxes(0, 1))
        if isinstance(self.down, GroupedMatrix):
            out = self.down(hidden, repeat, sizes, step.kernel)[0]
        else:
            out = grouped_matmul(hidden, self.down[...], repeat, sizes, **options)[0]
        if self.lora_out is not None and mask is not None:
            out = out + self.lora_out(hidden, mask, repeat, sizes, step.kernel)[0]
        if self.down_bias is not None:
            first = jax.lax.axis_index(MODEL) == 0
            out = out + jnp.where(first, self.down_bias[...][expert], 0)
        return out


def query_growth(spec: QueryGrowth, positions: jax.Array) -> jax.Array:
    """Return the factor on queries at positions int32 [T], float32 [T, 1, 1]."""
    steps = (positions + spec.offset) // spec.period
    return (1 + spec.rate * jnp.log1p(steps.astype(jnp.float32)))[:, None, None]


def route(
    logits: jax.Array, spec: Router | SparseMixer, correction: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """Return weights float32 [T, k] and expert ids int32 [T, k] from router logits [T, E].

    `correction` float32 [E]: if the router has one.
    """
    logits = logits.astype(jnp.float32)
    if isinstance(spec, SparseMixer):
        return _sparse_mixer(logits, spec)
    scores = jax.nn.softmax(logits) if spec.scores == "softmax" else jax.nn.sigmoid(logits)
    choice = scores if correction is None else scores + correction
    if spec.groups is not None:
        choice = _of_best_groups(choice, spec.groups)
    weights, experts = jax.lax.top_k(choice, spec.top_k)
    if choice is not scores:
        weights = jnp.take_along_axis(scores, experts, -1)
    if spec.renormalise:
        weights = weights / jnp.maximum(weights.sum(-1, keepdims=True), _SMALLEST_SUM)
    return weights * spec.scale, experts


def _of_best_groups(choice: jax.Array, groups: ExpertGroups) -> jax.Array:
    """Return scores [T, E], -inf for experts that are not in the best groups."""
    grouped = choice.reshape(len(choice), groups.count, -1)
    ranked = grouped.max(-1) if groups.rank_by == "best" else jax.lax.top_k(grouped, 2)[0].sum(-1)
    best = jax.lax.top_k(ranked, groups.used)[1]
    included = (best[:, :, None] == jnp.arange(groups.count)).any(1)
    return jnp.where(included[:, :, None], grouped, -jnp.inf).reshape(choice.shape)


def _sparse_mixer(logits: jax.Array, spec: SparseMixer) -> tuple[jax.Array, jax.Array]:
    rest = logits
    weights = []
    experts = []
    for _ in range(spec.top_k):
        largest, expert = jax.lax.top_k(rest, 1)
        near = largest - logits <= 2 * spec.jitter * jnp.maximum(jnp.abs(logits), largest)
        weights.append(1 / jnp.where(near, jnp.exp(rest - largest), 0).sum(-1, keepdims=True))
        experts.append(expert)
        rest = jnp.where(jnp.arange(logits.shape[1]) == expert, -jnp.inf, rest)
    return jnp.concatenate(weights, -1), jnp.concatenate(experts, -1)


class JaxPooler(nnx.Module):
    """The pooling head: dense layers and a classifier over pooled hidden states, in float32."""

    def __init__(self, spec: models.Pooler, width: int, build: JaxBuildContext) -> None:
        widths = [width, *(dense.width for dense in spec.dense)]
        self.kind = spec.kind
        self.dense = nnx.List([JaxDense(dense, before, build) for dense, before in zip(spec.dense, widths)])
        labels = spec.classifier
        self.classifier = None if labels is None else JaxLinear(labels.labels, widths[-1], labels.bias, build)
        self.heads = nnx.List([JaxLinear(head.width, width, True, build) for head in spec.token_heads])

    def __call__(self, rows: jax.Array, of_tokens: bool) -> jax.Array:
        """Float32 [R, D] -> [R, n]. `of_tokens`: rows are tokens; n is then the width of all token heads, if any."""
        if of_tokens and len(self.heads):
            return jnp.concatenate([head(rows) for head in self.heads], -1)
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

    def __call__(self, x: jax.Array, *, columns: bool = False) -> jax.Array:
        """Rotate x [T, ..., H]. `columns`: tokens are its columns in memory (`tokens_are_columns`).

        Halves are swapped by a matmul with a signed permutation: exact, and cheap on the matrix unit. Slicing halves of
        the TPU's 128 lanes would copy x to another layout and back.
        """
        unrotated = x.shape[-1] - self.dim
        cos = jnp.pad(jnp.concatenate([self.cos, self.cos], -1), [(0, 0), (0, 0), (0, unrotated)], constant_values=1)
        sin = jnp.pad(jnp.concatenate([self.sin, self.sin], -1), [(0, 0), (0, 0), (0, unrotated)])
        cos, sin = (each.reshape(len(x), *[1] * (x.ndim - 2), x.shape[-1]) for each in (cos, sin))
        return (x.astype(jnp.float32) * cos + _swapped(x, self.dim, columns=columns) * sin).astype(x.dtype)


def _swapped(x: jax.Array, dim: int, *, columns: bool) -> jax.Array:
    """X [T, ..., H] -> [-second half, first half, 0] of each head, in float32."""
    matrix = _swap_matrix(x, dim)
    if not columns:
        return jnp.einsum("t...h,hg->t...g", x, matrix, preferred_element_type=jnp.float32)
    swapped = jnp.einsum("...ht,hg->...gt", jnp.moveaxis(x, 0, -1), matrix, preferred_element_type=jnp.float32)
    return jnp.moveaxis(swapped, -1, 0)


def _swap_matrix(x: jax.Array, dim: int) -> jax.Array:
    """Return [H, H] of x's dtype that maps [first half, second half, tail] to [-second half, first half, 0]."""
    half = dim // 2
    channel = np.arange(dim // 2)
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
    low = table[positions % SPAN]
    high = table[SPAN + positions // SPAN]
    cos = low[..., 0] * high[..., 0] - low[..., 1] * high[..., 1]
    sin = low[..., 1] * high[..., 0] + low[..., 0] * high[..., 1]
    return JaxRotation(cos[:, None], sin[:, None], 2 * table.shape[1])
