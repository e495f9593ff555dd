"""Every parameter of a model, derived from its spec: canonical name, shape and logical axes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from typing import Protocol, TypeVar

from pagoda.common.errors import WeightError
from pagoda.common.models.primitives import Param, linear_params, norm_params
from pagoda.common.models.spec import Layer, Mlp, ModelSpec, Moe, Pooler


class Shaped(Protocol):
    """Values of a parameter."""

    @property
    def shape(self) -> tuple[int, ...]: ...


ShapedT = TypeVar("ShapedT", bound=Shaped)


def _mlp(prefix: str, mlp: Mlp, width: int) -> Iterator[Param]:
    if mlp.gated:
        yield from linear_params(f"{prefix}.gate", mlp.width, width, "FD", mlp.bias)
    yield from linear_params(f"{prefix}.up", mlp.width, width, "FD", mlp.bias)
    yield from linear_params(f"{prefix}.down", width, mlp.width, "DF", mlp.bias)


def _moe(prefix: str, moe: Moe, width: int) -> Iterator[Param]:
    yield Param(f"{prefix}.router", (moe.experts, width), "ED")
    for param in _mlp(f"{prefix}.experts", moe.expert, width):
        yield Param(param.name, (moe.experts, *param.shape), f"E{param.axes}")
    if moe.shared is not None:
        yield Param(f"{prefix}.shared_gate", (1, width), ".D")
        yield from _mlp(f"{prefix}.shared", moe.shared, width)


def _layer(prefix: str, layer: Layer, width: int) -> Iterator[Param]:
    for index, mixer in enumerate(layer.mixers):
        for param in mixer.parameters(width):
            yield replace(param, name=f"{prefix}.mixers.{index}.{param.name}")
    for name in ("before_mixer", "after_mixer", "before_ffn", "after_ffn"):
        yield from norm_params(f"{prefix}.norms.{name}", getattr(layer.norms, name), width)
    match layer.ffn:
        case Mlp():
            yield from _mlp(f"{prefix}.ffn", layer.ffn, width)
        case Moe():
            yield from _moe(f"{prefix}.ffn", layer.ffn, width)


def _pooler(pooler: Pooler, width: int) -> Iterator[Param]:
    for index, dense in enumerate(pooler.dense):
        yield from linear_params(f"pooler.dense.{index}", dense.width, width, "..", dense.bias)
        yield from norm_params(f"pooler.dense.{index}.norm", dense.norm, dense.width, ".")
        width = dense.width
    if pooler.classifier is not None:
        yield from linear_params("pooler.classifier", pooler.classifier.labels, width, "..", pooler.classifier.bias)


def params(spec: ModelSpec) -> dict[str, Param]:
    """Return every parameter by canonical name, in the order of the forward pass."""
    return {param.name: param for param in _params(spec)}


def checked(weights: Iterable[tuple[str, ShapedT]], expected: dict[str, Param]) -> Iterator[tuple[str, ShapedT]]:
    """Yield named values, removing each from `expected`.

    Raise WeightError naming one that is not expected (any more) or has another shape: of a collection before its first
    value is yielded, of a stream as it comes.
    """
    if isinstance(weights, Collection):
        others = dict(expected)
        for name, value in weights:
            _take(others, name, value.shape)
    for name, value in weights:
        _take(expected, name, value.shape)
        yield name, value


def _take(expected: dict[str, Param], name: str, shape: tuple[int, ...]) -> None:
    param = expected.pop(name, None)
    if param is None:
        raise WeightError(f"parameter {name} is unknown or came twice")
    if shape != param.shape:
        raise WeightError(f"parameter {name} has shape {shape}, the model needs {param.shape}")


def lacking(missing: dict[str, Param]) -> WeightError:
    """Return the error of a checkpoint that lacks parameters."""
    return WeightError(f"the checkpoint lacks {len(missing)} parameters, first {next(iter(missing))}")


def _params(spec: ModelSpec) -> Iterator[Param]:
    embedding = spec.embedding
    table = embedding.width or spec.width
    yield Param("embed", (spec.vocab, table), "VD")
    if embedding.positions is not None:
        yield Param("positions", (embedding.positions + embedding.position_offset, spec.width), ".D")
    if embedding.token_types:
        yield Param("token_types", (embedding.token_types, spec.width), ".D")
    yield from norm_params("embed_norm", embedding.norm, spec.width)
    if table != spec.width:
        yield Param("embed_in", (spec.width, table), "D.")
        yield Param("embed_out", (table, spec.width), ".D")
    for index, layer in enumerate(spec.layers):
        yield from _layer(f"layers.{index}", layer, spec.width)
    yield from norm_params("final_norm", spec.final_norm, spec.width)
    if spec.pooler is not None:
        yield from _pooler(spec.pooler, spec.hidden_width)
        return
    if not spec.tied:
        yield Param("head", (spec.vocab, table), "VD")
    if spec.head_bias:
        yield Param("head_bias", (spec.vocab,), "V")
