"""A decoder whose layers are transformers' code (--model-impl transformers), which torchax traces as jax functions."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import torch
from jax.sharding import Mesh
from torch import Tensor

from pagoda.backends.fallback.model import TransformersModel
from pagoda.backends.jax_tpu.execution.step_input import KernelChoice, packed_size
from pagoda.backends.jax_tpu.model.layers import Caches, insert_rows, without_rows
from pagoda.backends.jax_tpu.model.layout import CacheIndex, build_cache_index
from pagoda.backends.jax_tpu.model.mixers import attention
from pagoda.backends.jax_tpu.model.mixers.attention import JaxHeadTerms
from pagoda.backends.jax_tpu.model.model import Leaves, StepModel
from pagoda.backends.jax_tpu.model.parameters import AnyStep
from pagoda.backends.jax_tpu.parallel import named_sharding
from pagoda.backends.jax_tpu.weights.arrange import NO_FORMATS
from pagoda.backends.jax_tpu.weights.loading import as_jax
from pagoda.common.backend import Weight
from pagoda.common.engine.kv_cache.spec import KvLayout
from pagoda.common.engine.steps.shapes import StepShape
from pagoda.common.errors import ModelError, WeightError
from pagoda.common.models.drafters import DrafterSpec, mixers_of
from pagoda.common.models.transformers_spec import TransformersSpec
from pagoda.common.weights.quantization.tensors import dequantized

_REMOVED_OVERLOADS: Final = {
    "all": ("dimname", "dimname_out"),
    "index_add": ("dimname",),
    "index_copy": ("dimname",),
    "index_copy_": ("dimname",),
    "index_fill": ("Dimname_Scalar", "Dimname_Tensor"),
    "index_fill_": ("Dimname_Scalar", "Dimname_Tensor"),
    "norm": ("names_ScalarOpt_dim", "names_ScalarOpt_dim_dtype", "names_dtype_out", "names_out"),
    "prod": ("dim_Dimname",),
    "std": ("correction_names", "correction_names_out", "names_dim", "names_out"),
    "std_mean": ("correction_names", "names_dim"),
    "unbind": ("Dimname",),
}
"""Overloads for named tensors, which torch 2.13 removed. torchax 0.0.13 lists them when it is imported."""

_ATEN: Final = torch.library.Library("aten", "FRAGMENT")
for _name, _overloads in _REMOVED_OVERLOADS.items():
    for _overload in set(_overloads) - set(getattr(torch.ops.aten, _name).overloads()):
        _ATEN.define(f"{_name}.{_overload}(Tensor self) -> Tensor")

import torchax  # noqa: E402 (after the overloads)
from torchax.interop import jax_view, torch_view  # noqa: E402


def _type_as(tensor: Tensor, other: Tensor) -> Tensor:
    return tensor.to(other.dtype)


torchax.tensor.Tensor.type_as = _type_as  # its own changes the tensor in place, and takes no views

_TRACED_TOKENS: Final = 8
_MESSAGE_LENGTH: Final = 300


class TorchaxSource:
    """A model without weights, and what its calls of attention and of experts need while programs are traced."""

    def __init__(
        self, spec: TransformersSpec, cache_index: CacheIndex, dtype: jnp.dtype, max_len: int, *, scaled_cache: bool
    ) -> None:
        self.spec = spec
        self.cache_index = cache_index
        self.scaled_cache = scaled_cache
        self.dtype = dtype
        self.model = TransformersModel.without_weights(spec, getattr(torch, dtype.name), max_len)
        self.model.set_head(_head)
        self.tensors = self.model.tensors()
        table = self.model.embedding_table  # comes first: Model.dtype is that of the first array
        named = sorted(_named_tensors(self.tensors), key=lambda each: each[1] is not table)
        self.shapes = {name: _shape(tensor) for name, tensor in named}
        self.environment = torchax.default_env()
        self.environment.override_op_definition(torch.ops.aten._grouped_mm.default, self._grouped_product)

    def kernel_precision(self) -> Any:
        """Return the context of kernels, which multiply bfloat16 at their own precision."""
        return jax.default_matmul_precision("highest" if self.dtype == jnp.float32 else "default")

    def _grouped_product(self, rows: Tensor, matrices: Tensor, offs: Tensor, *_: object) -> Tensor:
        """Rows [S, I] sorted by group, matrices [E, I, O], ends of the groups [E] -> [S, O]."""
        x, weights, ends = jax_view((rows, matrices, offs))
        sizes = jnp.diff(ends, prepend=0).astype(jnp.int32)
        with self.kernel_precision():
            product = jax.lax.ragged_dot(x, weights, sizes, preferred_element_type=jnp.float32)
        return torch_view(product.astype(x.dtype))


def _head(head: torch.nn.Linear) -> Callable[[Tensor], Tensor]:
    """Return the product of the head with hidden states [R, D], with results in float32."""

    def product(hidden: Tensor) -> Tensor:
        x, weight = jax_view((hidden, head.weight))
        logits = torch_view(jnp.einsum("rd,vd->rv", x, weight, preferred_element_type=jnp.float32))
        return logits if head.bias is None else logits + head.bias

    return product


class TorchaxDecoder:
    """Maps token ids and a step to hidden states and logits, as of `JaxDecoder`."""

    def __init__(self, source: TorchaxSource, leaves: Leaves) -> None:
        """`leaves`: in the order of `source.shapes`."""
        self.source = source
        self.leaves = leaves

    def hidden(
        self, token_ids: jax.Array, step: AnyStep, caches: Caches, rows: jax.Array | None = None
    ) -> tuple[jax.Array, Caches]:
        """token_ids int32 [T] -> hidden states [T, D] after the final norm, and the caches with this step's K and V.

        `rows` [R, D]: embeddings that token ids from FIRST_ROW on name; None: none does.
        """
        source = self.source
        stacks = list(caches)
        spec = source.spec
        index = source.cache_index
        scales = jnp.ones(2, jnp.float32) if source.scaled_cache else None

        def attend(number: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, _: object) -> Tensor:
            (array,) = index.arrays[number]
            place = jnp.asarray((index.group[number], index.index[number]), jnp.int32)
            mixer = spec.attention[number]
            terms = JaxHeadTerms(mixer.kv_heads, None if sinks is None else jax_view(sinks))
            with source.kernel_precision():
                queries, keys, values = jax_view((q, k, v))
                out, stacks[array] = attention.attend(
                    step, queries, keys, values, stacks[array], place, mixer, terms, scales
                )
            return torch_view(out)

        def insert(embedded: Tensor) -> Tensor:
            assert rows is not None, "token ids name rows"
            return torch_view(insert_rows(jax_view(embedded), token_ids, rows))

        ids, positions = torch_view((jnp.maximum(without_rows(token_ids), 0), step.positions))
        given = None if rows is None else insert
        return self._run(lambda: source.model.hidden(ids, positions, attend, given)), tuple(stacks)

    def logits(self, hidden: jax.Array, adapter_slots: jax.Array | None = None) -> jax.Array:
        """Hidden [R, D] -> float32 logits [R, V], by the model's own code after the layers."""
        return self._run(lambda: self.source.model.logits(torch_view(hidden)))

    def _run(self, function: Callable[[], Tensor]) -> jax.Array:
        """Run torch code over the arrays.

        float32 products have full precision on every platform: angles of RoPE are products of positions.
        """
        state = dict(zip(self.source.shapes, torch_view(self.leaves)))
        with torch.no_grad(), self.source.environment, jax.default_matmul_precision("highest"):
            result: jax.Array = jax_view(torch.func.functional_call(self.source.tensors, state, (function,)))
        return result


@dataclass(frozen=True, slots=True)
class TorchaxModel(StepModel):
    """A model of transformers. Its parameters are replicated, one leaf each."""

    spec: TransformersSpec
    source: TorchaxSource

    def decoder(self, leaves: Leaves) -> TorchaxDecoder:
        """Return the decoder over these arrays, while tracing."""
        return TorchaxDecoder(self.source, leaves)


def build_transformers_model(
    spec: TransformersSpec,
    layout: KvLayout,
    mesh: Mesh,
    dtype: jnp.dtype,
    max_len: int,
    kernel: KernelChoice,
    drafter: DrafterSpec | None = None,
) -> TorchaxModel:
    """Build a model without weights or arrays, and trace a step. Raise ModelError if torchax cannot.

    `drafter`: whose caches are in the layout, too.
    """
    cache_index = build_cache_index(spec, layout, 1, mixers_of(drafter))
    source = TorchaxSource(spec, cache_index, jnp.dtype(dtype), max_len, scaled_cache=kernel.scaled)
    axes = tuple("." * len(shape.shape) for shape in source.shapes.values())
    leaves = tuple(
        jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=named_sharding(mesh, each))
        for shape, each in zip(source.shapes.values(), axes)
    )
    paths = tuple((name,) for name in source.shapes)
    model = TorchaxModel(spec, mesh, layout, cache_index, kernel, max_len, leaves, paths, axes, NO_FORMATS, source)
    _check_traceable(model)
    return model


def _check_traceable(model: TorchaxModel) -> None:
    """Trace a step of few tokens. Raise ModelError if torchax cannot."""
    shape = StepShape(_TRACED_TOKENS, 1, 1, len(model.layout.groups), decode_only=False)
    history = jax.ShapeDtypeStruct((2, model.max_len + 1), jnp.int32)
    packed = jax.ShapeDtypeStruct((model.shards, packed_size(shape)), jnp.int32)
    caches = model.caches((2,) * len(model.layout.pools))
    try:
        jax.eval_shape(lambda *arrays: model.forward(shape, *arrays), model.leaves, caches, history, packed)
    except Exception as error:  # of transformers' code, or of torchax
        words = " ".join(f"{type(error).__name__}: {error}".split())
        (architecture,) = model.spec.source.config["architectures"]
        raise ModelError(
            f"{architecture} cannot be compiled: torchax cannot trace it ({words[:_MESSAGE_LENGTH]}); use --backend "
            "reference or torch_cuda"
        ) from error


def load_transformers(model: TorchaxModel, weights: Iterable[Weight]) -> Leaves:
    """Return every array of the model.

    Raise WeightError for a missing, unknown or misshapen tensor, ModelError as of TransformersModel.
    """
    tensors = ((name, _to_torch(array)) for name, array in dequantized(weights, "jax_tpu"))
    loaded = TransformersModel.load(model.spec, tensors, getattr(torch, model.dtype.name), model.max_len)
    loaded.place(torch.device("cpu"))
    state = dict(_named_tensors(loaded.tensors()))
    leaves = []
    for (name,), leaf in zip(model.paths, model.leaves):
        if name not in state or _shape(state[name]) != jax.ShapeDtypeStruct(leaf.shape, leaf.dtype):
            raise WeightError(f"tensor {name} is {_shape(state[name]) if name in state else 'missing'}, not {leaf}")
        leaves.append(jax.device_put(_to_numpy(state.pop(name)), leaf.sharding))
    if state:
        raise WeightError(f"tensor {next(iter(state))} is not a parameter of the model")
    return tuple(jax.block_until_ready(leaves))


def _named_tensors(module: torch.nn.Module) -> list[tuple[str, Tensor]]:
    return [*module.named_parameters(), *module.named_buffers()]


def _shape(tensor: Tensor) -> jax.ShapeDtypeStruct:
    name = str(tensor.dtype).removeprefix("torch.")
    return jax.ShapeDtypeStruct(tuple(tensor.shape), jax.dtypes.canonicalize_dtype(jnp.dtype(name)))


def _to_torch(array: npt.NDArray[np.generic]) -> Tensor:
    """Return a tensor of an array of the checkpoint; narrow floats are exact in bfloat16."""
    values = as_jax(array)
    if values.dtype == array.dtype:
        return torch.from_numpy(np.require(values, requirements="W"))
    return torch.from_numpy(values.astype(np.float32)).bfloat16()


def _to_numpy(tensor: Tensor) -> npt.NDArray[np.generic]:
    wide = tensor.detach().float() if tensor.dtype == torch.bfloat16 else tensor.detach()
    array: npt.NDArray[np.generic] = wide.numpy().astype(_shape(tensor).dtype)
    return array
