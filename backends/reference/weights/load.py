"""Logical parameters -> physical ones: fused q, k, v, fused gate and up, everything prepacked.

A layer is packed as soon as its last parameter has arrived, so that few layers are in memory unpacked. An update packs
whole layers again: of packed parameters no part can be replaced.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from pagoda.backends.reference.memory import held_bytes
from pagoda.backends.reference.model.adapters import AdapterMatrices
from pagoda.backends.reference.model.linear import Linear, float32_linear
from pagoda.backends.reference.model.linear import Weight as PackWeight
from pagoda.backends.reference.model.numerics import Numerics, thread_count
from pagoda.backends.reference.model.ops import to_numpy, to_torch
from pagoda.backends.reference.model.params import ModelParams
from pagoda.backends.reference.model.quantized.blocks import keeps
from pagoda.backends.reference.model.quantized.compiled import lanes
from pagoda.backends.reference.model.quantized.layer import computes
from pagoda.backends.reference.weights.arrange import NamedWeights
from pagoda.backends.reference.weights.layers import load_beside_layers, load_layer
from pagoda.common.backend import Weight
from pagoda.common.errors import WeightError
from pagoda.common.models.shapes import checked, lacking, params
from pagoda.common.models.spec import ModelSpec
from pagoda.common.weights.quantization.on_the_fly import quantize
from pagoda.common.weights.quantization.schemes import Scheme
from pagoda.common.weights.quantization.tensors import QuantizedTensor, dequantized, log_dequantized


class Packer:
    """Builds ModelParams from a stream of canonical weights; threads pack while the next weights are read.

    A unit is what is packed together: a layer, the head with its bias, or a parameter of its own with its bias.
    """

    def __init__(
        self,
        spec: ModelSpec,
        numerics: Numerics,
        head_scheme: Scheme | None = None,
        adapters: AdapterMatrices | None = None,
    ) -> None:
        """`head_scheme`: of an output head that arrives dense; an embedding table of the same weight stays dense.

        `adapters`: slots of LoRA adapters for the layers.
        """
        self._adapters = adapters
        self.spec = spec
        self.numerics = numerics
        self._head_scheme = head_scheme
        self._expected = params(spec)
        self._float32 = {param.name for param in self._expected.values() if param.float32}
        self._tensors: dict[str, PackWeight] = {}
        self._head = "embed" if spec.tied else "head"
        self._missing = Counter(self._unit(name) for name in self._expected)

    def pack(self, weights: Iterable[Weight], old: ModelParams | None = None) -> ModelParams:
        """Consume the stream. `old`: the model to update, which stays as it is; units that do not come are shared.

        Raises WeightError naming a parameter that is unknown, repeated or misshapen, or missing: at load any, in an
        update one of a unit that came in part.
        """
        threads = thread_count()
        try:
            with ThreadPoolExecutor(threads, "pagoda-pack", initializer=torch.set_num_threads, initargs=(1,)) as pool:
                return self._pack(weights, pool, 2 * threads, old)
        finally:
            torch.set_num_threads(threads)  # part of that setting is per process, not per thread

    def _pack(
        self, weights: Iterable[Weight], pool: ThreadPoolExecutor, max_pending: int, old: ModelParams | None
    ) -> ModelParams:
        """`max_pending`: layers being packed at a time, so that a fast reader does not fill the memory."""
        head: Future[Linear] | None = None
        layers: dict[str, Future[dict[str, Any]]] = {}
        dequantised: list[str] = []
        for name, value in checked(weights, self._expected):
            if isinstance(value, QuantizedTensor) and self._keeps(name, value):
                self._tensors[name] = replace(value, data=value.data.copy()) if old is not None else value
            else:
                if isinstance(value, QuantizedTensor):
                    dequantised.append(name)
                    value = value.dequantize()
                dtype = torch.float32 if name in self._float32 else self.numerics.weights
                # A vector over the mapped file would keep all of the file mapped, matrices that are packed do not.
                self._tensors[name] = to_torch(value).to(dtype, copy=old is not None or value.ndim == 1)
            unit = self._unit(name)
            self._missing[unit] -= 1
            if self._missing[unit]:
                continue
            if unit == "head":
                bias = NamedWeights(self._tensors, self.numerics).get("head_bias")
                head = pool.submit(self._packed_head, self._tensors[self._head], bias)
            if not unit.startswith("layers."):
                continue
            pending = [layer for layer in layers.values() if not layer.done()]
            if len(pending) >= max_pending:
                wait(pending, return_when=FIRST_COMPLETED)
            of_layer = NamedWeights(
                {key: self._tensors.pop(key) for key in list(self._tensors) if key.startswith(f"{unit}.")},
                self.numerics,
                self._adapters,
            )
            number = int(unit.removeprefix("layers."))
            layer_spec = self.spec.layers[number]
            layers[unit] = pool.submit(load_layer, of_layer, unit, layer_spec, number in self.spec.shared_blocks)
        log_dequantized(dequantised, "reference")
        if self._expected:
            self._check_missing(old)
        parts = {} if old is None else dict(old.parts)
        for layer in layers.values():
            parts |= layer.result()
        if head is not None:
            parts["head"] = head.result()
        parts |= load_beside_layers(NamedWeights(self._tensors, self.numerics))
        return ModelParams(parts, held_bytes(parts))

    def _packed_head(self, weight: PackWeight, bias: Tensor | None) -> Linear:
        if self._head_scheme is not None and isinstance(weight, Tensor):
            weight = quantize(to_numpy(weight), self._head_scheme)
        layer = float32_linear(weight, bias, self.numerics)
        if self._adapters is None:
            return layer
        vocab, width = weight.shape

        def with_weight(copy: Tensor) -> Linear:
            return float32_linear(copy, bias, self.numerics)

        return self._adapters.head(layer, vocab, width, bias, with_weight)

    def _keeps(self, name: str, value: QuantizedTensor) -> bool:
        """Return whether a parameter stays quantised: matrices of layers or the head that compute so, and blocks.

        Blocks only where most types have kernels: products that dequantise them take many times as long.
        """
        if name in self._float32:
            return False
        matrix = name.startswith("layers.") or (name == self._head and not self.spec.tied)
        blocks = bool(lanes()) and self.numerics.weights != torch.float32 and keeps(value)
        return blocks or (matrix and computes(value.scheme, value.shape[-1], self.numerics))

    def _unit(self, name: str) -> str:
        if name.startswith("layers."):
            return ".".join(name.split(".")[:2])
        is_head = name in (self._head, "head_bias") and self.spec.pooler is None
        return "head" if is_head else name.removesuffix("_bias")

    def _check_missing(self, old: ModelParams | None) -> None:
        """Raise WeightError for missing parameters of the model, in an update for those of units that came in part."""
        if old is None:
            raise lacking(self._expected)
        sizes = Counter(self._unit(name) for name in params(self.spec))
        missing = [name for name in self._expected if self._missing[self._unit(name)] < sizes[self._unit(name)]]
        if missing:
            unit = self._unit(missing[0])
            raise WeightError(f"parameters of {unit} are packed together; send {', '.join(missing)} too")


def rounded_weights(weights: Iterable[Weight], numerics: Numerics) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a model that transformers computes, rounded to the weights' dtype."""
    for name, array in dequantized(weights, "reference"):
        tensor = to_torch(array)
        rounds = numerics.widened and tensor.is_floating_point()
        yield name, tensor.to(numerics.weights).to(numerics.compute) if rounds else tensor
