"""How modules create their parameters, dense or quantised, and the products with them.

A matrix with a scale per output channel is multiplied by XLA, which widens its numbers inside the product, or
multiplies numbers by numbers if the input is rounded, too. Experts, and matrices with scales per group of inputs, are
multiplied by `kernels_pallas/grouped_matmul`, which widens their numbers in VMEM; XLA would write them out in 16 bits.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import lcm, prod
from typing import Final, TypeAlias

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from pagoda.backends.jax_tpu.execution.step_input import KernelChoice, PoolInput, StepInput
from pagoda.backends.jax_tpu.model.slots import padded
from pagoda.backends.jax_tpu.weights.arrange import MatrixFormat, Path
from pagoda.kernels_pallas.grouped_matmul import grouped_matmul
from pagoda.kernels_pallas.grouped_matmul.quantized import CODES, PER_WORD, QuantizedWeights

logger = logging.getLogger(__name__)

SHARDED: Final = "KF"
"""Axes of matrices that are divided among the devices."""

_SUBLANES: Final = 8  # 32-bit rows of a register

_MXU_COLUMNS: Final = 256
"""Of the matrix units from v6e on."""

LARGEST: Final = {"int8": 127.0, "float8_e4m3fn": 448.0, "float8_e4m3b11fnuz": 28.0}
"""Largest value of each dtype of quantised numbers."""


class ParameterStack(nnx.Param):
    """A parameter stacked over repeats and passed whole to a kernel, because a slice would be a copy."""


class ChannelMatrix(nnx.Module):
    """A quantised matrix contracted over its last axis, with a scale per output channel.

    `numbers` [..., i] as the dense matrix; `scales` float32 [...].
    """

    def __init__(self, form: MatrixFormat, axes: str, shape: tuple[int, ...], build: JaxBuildContext) -> None:
        self.form = form
        self.numbers = replace(build, dtype=jnp.dtype(form.numbers)).parameter(axes, *shape)
        self.scales = build.float32().parameter(axes[:-1], *shape[:-1])

    def __call__(self, x: jax.Array) -> jax.Array:
        """X [T, i] -> [T, ...]."""
        numbers = self.numbers[...]
        if not self.form.rounds_inputs:
            return (_product(x, numbers.astype(x.dtype), jnp.float32) * self.scales[...]).astype(x.dtype)
        rounded, row_scales = quantize(x, numbers.dtype.name)
        whole = jnp.issubdtype(numbers.dtype, jnp.integer)
        sums = _product(rounded, numbers, jnp.int32 if whole else jnp.float32).astype(jnp.float32)
        row_scales = row_scales.reshape(-1, *[1] * (numbers.ndim - 1))
        return (sums * row_scales * self.scales[...]).astype(x.dtype)


class GroupedMatrix(nnx.Module):
    """A stack of quantised matrices in the layout of `kernels_pallas.grouped_matmul`: inputs before outputs.

    `numbers` [E, parts, I, O], of 4 bits words of eight [E, parts, I / 8, O]; `scales`, `shifts` float32
    [E, parts, groups of inputs, O]. All are passed whole to the kernel. A matrix that is not of experts is one of one.
    """

    def __init__(self, form: MatrixFormat, axes: str, shape: tuple[int, ...], build: JaxBuildContext) -> None:
        *stack, inputs, outputs = shape
        self.form = form  # without padding
        self.outputs = None if axes[3] in SHARDED else outputs
        outputs = outputs if axes[3] in SHARDED else padded(outputs, build.lanes)
        per_row, dtype = (PER_WORD, "uint32") if form.numbers in CODES else (1, form.numbers)
        numbers = replace(build, dtype=jnp.dtype(dtype))
        wide = build.float32()
        groups = inputs // (form.group or inputs)
        if axes[2] not in SHARDED and groups > _SUBLANES and build.lanes > 1:
            groups = padded(groups, _SUBLANES)  # else XLA copies them for the kernel
        self.numbers = numbers.parameter(axes, *stack, inputs // per_row, outputs, kind=ParameterStack)
        of_groups = axes if form.group is not None else f"{axes[:2]}.{axes[3]}"
        self.scales = wide.parameter(of_groups, *stack, groups, outputs, kind=ParameterStack)
        self.shifts = wide.parameter(of_groups, *stack, groups, outputs, kind=ParameterStack) if form.shifted else None

    def __call__(self, rows: jax.Array, repeat: jax.Array | int, sizes: jax.Array, kernel: KernelChoice) -> jax.Array:
        """Multiply rows [M, I], sorted by expert, `sizes` int32 [E] of each -> [parts, M, O]."""
        shifts = None if self.shifts is None else self.shifts[...]
        weights = QuantizedWeights(
            self.numbers[...], self.scales[...], shifts, self.form.numbers, self.form.group or rows.shape[1]
        )
        if not self.form.rounds_inputs:
            return grouped_matmul(rows, weights, repeat, sizes, **kernel.options)[..., : self.outputs]
        rounded, row_scales = quantize(rows, self.form.numbers)
        product = grouped_matmul(rounded, weights, repeat, sizes, out_dtype=jnp.float32, **kernel.options)
        return (product[..., : self.outputs] * row_scales[:, None]).astype(rows.dtype)


class OneGroupedMatrix(GroupedMatrix):
    """A GroupedMatrix of one expert, in place of a matrix [..., i] of the current layer."""

    def __init__(self, form: MatrixFormat, axes: str, shape: tuple[int, ...], build: JaxBuildContext) -> None:
        *outs, inputs = shape
        self.has_parts = has_parts(axes)
        parts = outs.pop(0) if self.has_parts else 1
        self.inner_shape = tuple(outs[1:])
        super().__init__(form, f"..{axes[-1]}{axes[self.has_parts]}", (1, parts, inputs, prod(outs)), build)

    def project(self, x: jax.Array, step: AnyStep) -> jax.Array:
        """X [T, i] -> [T, ...]."""
        product = self(x, step.repeat, jnp.full(1, len(x), jnp.int32), step.kernel)
        if self.has_parts:
            return product.swapaxes(0, 1)
        return product[0].reshape(len(x), -1, *self.inner_shape) if self.inner_shape else product[0]


def has_parts(axes: str) -> bool:
    """Whether the first axis of a matrix is that of several with the same inputs."""
    return len(axes) == 3 and axes[0] == "."


AnyStep: TypeAlias = StepInput | PoolInput
"""The batch a layer runs on: a generation step over the paged cache, or whole prompts to pool."""

Matrix: TypeAlias = nnx.Param | ChannelMatrix | OneGroupedMatrix
Experts: TypeAlias = nnx.Param | GroupedMatrix


@dataclass(frozen=True, slots=True)
class LoraForm:
    """The slots for LoRA adapters."""

    slots: int
    rank: int  # of every slot
    dtype: str  # of the matrices
    copies: tuple[str, ...] = ()  # matrices of which a slot has room for a whole copy: `embed`, `head` or both
    fully_sharded: bool = False  # both matrices are sharded over the devices, where their sizes divide

    @property
    def columns(self) -> int:
        """Return the ranks of all slots."""
        return self.slots * self.rank


@dataclass(frozen=True, slots=True)
class JaxBuildContext:
    """How modules create their parameters. Parameters of repeated layers are stacked over the repeats."""

    dtype: jnp.dtype  # of weights and activations
    tensor: int  # devices each layer is sharded over
    repeats: int | None = None  # None: outside repeated layers
    scaled_cache: bool = False  # K and V are stored divided by a scale
    formats: Mapping[Path, MatrixFormat] = field(default_factory=dict)  # of quantised matrices, by path in the decoder
    path: Path = ()  # of the module in the decoder
    lanes: int = 1  # of a register, which a kernel's matrices fill; 1 for the kernels' references
    lora: LoraForm | None = None  # slots for adapters; None: without

    def at(self, *path: str | int) -> JaxBuildContext:
        """Return the context of a module at this path inside the current one."""
        return replace(self, path=(*self.path, *path))

    def parameter(self, axes: str, *shape: int, kind: type[nnx.Param] = nnx.Param) -> nnx.Param:
        """Create a parameter of global `shape`; `axes` has one logical axis letter per dimension (see `sharding`)."""
        assert len(axes) == len(shape), f"{axes} does not name the dimensions of {shape}"
        if self.repeats is not None:
            axes = f"L{axes}"
            shape = (self.repeats, *shape)
        return kind(jnp.zeros(shape, self.dtype), axes=axes)

    def matrix(self, name: str, axes: str, *shape: int) -> Matrix:
        """Create the matrix `name` of the current module, contracted over its last axis, in its format."""
        form = self.formats.get((*self.path, name))
        if form is None:
            return self.parameter(axes, *shape)
        if not form.for_kernel:
            return ChannelMatrix(form, axes, shape, self)
        first = int(has_parts(axes))
        outputs = prod(shape[first:-1])
        if not self._fits(form, (axes[-1], shape[-1]), (axes[first], outputs), name):
            return self.parameter(axes, *shape)
        return OneGroupedMatrix(form, axes, shape, self)

    def experts(self, name: str, axes: str, *shape: int, transposed: bool = False) -> Experts:
        """Create the matrices [E, parts, I, O] of experts in their format; dense ones `transposed` if so."""
        form = self.formats.get((*self.path, name))
        if form is None or not self._fits(form, (axes[2], shape[2]), (axes[3], shape[3]), name):
            order = (0, 1, 3, 2) if transposed else (0, 1, 2, 3)
            dense = "".join(axes[axis] for axis in order), [shape[axis] for axis in order]
            return self.parameter(dense[0], *dense[1], kind=ParameterStack)
        return GroupedMatrix(form, axes, shape, self)

    def ffn_width(self, width: int) -> int:
        """Return the width of a feed-forward block, padded so that each device has whole groups and registers."""
        forms = [self.formats.get((*self.path, name)) for name in ("inner", "down")]
        for_kernel = [form for form in forms if form is not None and form.for_kernel]
        group = lcm(*(form.group or 1 for form in for_kernel))
        least = padded(width, self.tensor * lcm(self.lanes if for_kernel else 1, group))
        whole = padded(width, self.tensor * lcm(self.lanes, _SUBLANES * group))
        # XLA would copy scales of more than 8 groups if they are no multiple
        return whole if for_kernel and self.lanes > 1 and group > 1 and whole < 1.1 * least else least

    def _fits(self, form: MatrixFormat, inputs: tuple[str, int], outputs: tuple[str, int], name: str) -> bool:
        """Return whether each device has whole groups and registers of inputs and outputs; log it if not."""
        of_inputs, of_outputs = (size // self.tensor if axis in SHARDED else size for axis, size in (inputs, outputs))
        rows = 1 if self.lanes == 1 else _SUBLANES if form.numbers in CODES else 4 * _SUBLANES
        step = lcm(form.group or 1, rows * (PER_WORD if form.numbers in CODES else 1))
        lanes = self.lanes if outputs[0] in SHARDED else 1  # others are padded
        fits = of_inputs % step == 0 and of_outputs % lanes == 0
        if not fits:
            path = ".".join(map(str, (*self.path, name)))
            logger.info(
                "jax_tpu: %s is dequantised: a device's %d inputs and %d outputs are not multiples of %d and %d; use "
                "another --tensor-parallel-size",
                *(path, of_inputs, of_outputs, step, lanes),
            )
        return fits

    def float32(self) -> JaxBuildContext:
        """Return the context for float32 parameters."""
        return replace(self, dtype=jnp.dtype(jnp.float32))


def project(
    x: jax.Array, weight: Matrix | jax.Array, step: AnyStep | None = None, dtype: DTypeLike | None = None
) -> jax.Array:
    """Multiply x [T, i] by weight [..., i] -> [T, ...] in `dtype`, by default x's. `step`: for matrices of a layer.

    The weight is not flattened: XLA would copy a flattened 8-bit weight first.
    """
    if isinstance(weight, ChannelMatrix):
        return weight(x)
    if isinstance(weight, OneGroupedMatrix):
        assert step is not None, "a matrix of a layer"
        return weight.project(x, step)
    return _product(x, weight[...], dtype)


def _product(x: jax.Array, weight: jax.Array, dtype: DTypeLike | None) -> jax.Array:
    if tokens_are_columns(len(x)) and weight.ndim == 3 and weight.shape[1] < _MXU_COLUMNS:
        columns = jax.lax.dot_general(weight, x, (((2,), (1,)), ((), ())), preferred_element_type=dtype)
        return jnp.moveaxis(jax.lax.optimization_barrier(columns), -1, 0)  # else XLA may exchange the factors again
    contract_last = (((1,), (weight.ndim - 1,)), ((), ()))
    return jax.lax.dot_general(x, weight, contract_last, preferred_element_type=dtype)


def tokens_are_columns(tokens: int) -> bool:
    """Whether heads [T, n, H] of a step are kept in the order [n, H, T], as the attention kernel reads prompts.

    XLA multiplies by each head apart, and heads are narrower than the matrix unit: half of it would idle. With tokens
    as columns it is full, and nothing is moved between the projection and the kernel.
    """
    return tokens > _MXU_COLUMNS


def quantize(x: jax.Array, dtype: str) -> tuple[jax.Array, jax.Array]:
    """Quantise x [..., D] to `dtype`; return the values and float32 scales [...], with value * scale = x."""
    wide = x.astype(jnp.float32)
    largest = jnp.abs(wide).max(-1)
    scale = jnp.where(largest > 0, largest / LARGEST[dtype], 1)
    wide = jnp.clip(wide / scale[..., None], -LARGEST[dtype], LARGEST[dtype])
    return (jnp.round(wide) if dtype == "int8" else wide).astype(dtype), scale
