"""Every parameter of a model, derived from its spec: canonical name, shape and logical axes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from fnmatch import fnmatchcase
from math import prod
from typing import Protocol, TypeVar

from pagoda.common.errors import WeightError
from pagoda.common.models.mixers import Mixer
from pagoda.common.models.primitives import Param, adapter_params, linear_params, norm_params
from pagoda.common.models.spec import AltUp, InputBlock, Layer, Mlp, ModelSpec, Moe, PerLayerEmbedding, Pooler, SideMoe


class Shaped(Protocol):
    """Values of a parameter."""

    @property
    def shape(self) -> tuple[int, ...]: ...


ShapedT = TypeVar("ShapedT", bound=Shaped)


def _mlp(prefix: str, mlp: Mlp, width: int) -> Iterator[Param]:
    if mlp.gated:
        yield from linear_params(f"{prefix}.gate", mlp.width, width, "FD", mlp.bias)
    yield from linear_params(f"{prefix}.up", mlp.width, width, "FD", mlp.bias)
    yield from linear_params(f"{prefix}.down", width, mlp.width, "DF", mlp.bias or mlp.down_bias)
    if mlp.learned is not None:
        yield Param(f"{prefix}.curvature_p", (1,), ".")
        yield Param(f"{prefix}.curvature_n", (1,), ".")
    yield from norm_params(f"{prefix}.inner_norm", mlp.inner_norm, mlp.width, "F")


def _moe(prefix: str, moe: Moe, width: int) -> Iterator[Param]:
    yield from linear_params(f"{prefix}.router", moe.choices, width, "ED", moe.router.bias)
    if moe.router.correction:
        yield Param(f"{prefix}.router_correction", (moe.choices,), "E", float32=True)
    if moe.latent is not None:
        yield Param(f"{prefix}.latent_in", (moe.latent, width), ".D")
        yield Param(f"{prefix}.latent_out", (width, moe.latent), "D.")
    for param in _mlp(f"{prefix}.experts", moe.expert, moe.latent or width):
        yield Param(param.name, (moe.experts, *param.shape), f"E{param.axes}")
    if moe.shared is not None:
        yield from _mlp(f"{prefix}.shared", moe.shared, width)
    if moe.shared_gate:
        yield Param(f"{prefix}.shared_gate", (1, width), ".D")


def _layer(prefix: str, layer: Layer, width: int, shares_block: bool = False) -> Iterator[Param]:
    for index, mixer in enumerate(layer.mixers):
        for param in _mixer(mixer, width, shared=shares_block and not index):
            yield replace(param, name=f"{prefix}.mixers.{index}.{param.name}")
    if layer.block is not None:
        yield from _block(f"{prefix}.block", layer.block, width, shares_block)
    for name in ("before_mixer", "after_mixer", "before_ffn", "after_ffn"):
        yield from norm_params(f"{prefix}.norms.{name}", getattr(layer.norms, name), width)
    match layer.ffn:
        case Mlp():
            yield from _mlp(f"{prefix}.ffn", layer.ffn, width)
        case Moe():
            yield from _moe(f"{prefix}.ffn", layer.ffn, width)
    if layer.side_moe is not None:
        yield from _side_moe(f"{prefix}.side", layer.side_moe, width)
    if layer.low_rank is not None:
        yield Param(f"{prefix}.low_rank.left", (layer.low_rank.rank, width), ".D")
        yield Param(f"{prefix}.low_rank.right", (width, layer.low_rank.rank), "D.")
        yield from norm_params(f"{prefix}.low_rank.norm", layer.low_rank.norm, width)
    if layer.output_scale:
        yield Param(f"{prefix}.output_scale", (1,), ".")
    if layer.shortcut is not None:
        yield from norm_params(f"{prefix}.shortcut.norm", layer.shortcut.norm, width)
        yield from _moe(f"{prefix}.shortcut.moe", layer.shortcut.moe, width)
    if layer.second is not None:
        yield from norm_params(f"{prefix}.second.mixer_norm", layer.second.norm, width)
        yield from norm_params(f"{prefix}.second.ffn_norm", layer.second.norm, width)
        yield from _mlp(f"{prefix}.second.ffn", layer.second.ffn, width)
        yield from _moe(f"{prefix}.second.moe", layer.second.moe, width)


def _mixer(mixer: Mixer, width: int, *, shared: bool) -> Iterator[Param]:
    """Yield a mixer's parameters; `shared`: without those that an earlier layer has."""
    if not shared:
        yield from mixer.parameters(width)
    yield from mixer.adapters(width)


def _block(prefix: str, block: InputBlock, width: int, shared: bool) -> Iterator[Param]:
    """Yield an input block's parameters but its attention's. `shared`: without those that an earlier layer has."""
    if not shared:
        yield from norm_params(f"{prefix}.norm", block.norm, 2 * width)
        yield from norm_params(f"{prefix}.ffn_norm", block.norm, width)
        yield from _mlp(f"{prefix}.ffn", block.ffn, width)
    rows = tuple((f"{prefix}.ffn.{part}", block.ffn.width, "F") for part in ("gate", "up"))
    yield from adapter_params(f"{prefix}.ffn", block.adapter_rank, width, rows)
    yield Param(f"{prefix}.out", (width, width), "D.")


def _side_moe(prefix: str, side: SideMoe, width: int) -> Iterator[Param]:
    for name in ("ffn_norm", "input_norm", "output_norm", "router_norm"):
        yield from norm_params(f"{prefix}.{name}", side.norm, width)
    yield from _moe(f"{prefix}.moe", side.moe, width)
    yield Param(f"{prefix}.expert_scale", (side.moe.experts,), "E")


def _per_layer(prefix: str, spec: PerLayerEmbedding, width: int) -> Iterator[Param]:
    yield Param(f"{prefix}.gate", (spec.width, width), ".D")
    yield Param(f"{prefix}.out", (width, spec.width), "D.")
    yield from norm_params(f"{prefix}.norm", spec.norm, width)


def _alt_up(prefix: str, spec: AltUp, width: int) -> Iterator[Param]:
    yield Param(f"{prefix}.router", (spec.streams, width), ".D")
    yield from norm_params(f"{prefix}.norm", spec.norm, width)
    yield Param(f"{prefix}.prediction", (spec.streams**2, spec.streams), "..")
    yield Param(f"{prefix}.correction", (spec.streams, spec.streams), "..")
    if spec.scaled:
        yield Param(f"{prefix}.scale", (width,), "D")


def _streams(spec: ModelSpec) -> Iterator[Param]:
    """Yield the parameters of the model, outside of layers, of per-layer embeddings and further streams."""
    if (per_layer := spec.per_layer) is not None:
        channels = per_layer.width * len(spec.layers)
        yield Param("per_layer.table", (per_layer.vocab, channels), "V.")
        yield Param("per_layer.projection", (channels, spec.width), ".D")
        yield from norm_params("per_layer.norm", per_layer.norm, per_layer.width, ".")
    if spec.alt_up is not None:
        for name in ("in", "out"):
            yield Param(f"alt_up.{name}", (spec.alt_up.streams - 1, spec.width, spec.width), ".D.")


def _pooler(pooler: Pooler, hidden: int) -> Iterator[Param]:
    width = hidden
    for index, dense in enumerate(pooler.dense):
        yield from linear_params(f"pooler.dense.{index}", dense.width, width, "..", dense.bias)
        yield from norm_params(f"pooler.dense.{index}.norm", dense.norm, dense.width, ".")
        width = dense.width
    if pooler.classifier is not None:
        yield from linear_params("pooler.classifier", pooler.classifier.labels, width, "..", pooler.classifier.bias)
    for head in pooler.token_heads:
        yield from linear_params(f"pooler.{head.task}", head.width, hidden, "..", True)


def params(spec: ModelSpec) -> dict[str, Param]:
    """Return every parameter by canonical name, in the order of the forward pass."""
    return {param.name: _scaled(param, spec) for param in _params(spec)}


def _scaled(param: Param, spec: ModelSpec) -> Param:
    scale = prod(factor for pattern, factor in spec.weight_scales if fnmatchcase(param.name, pattern))
    return param if scale == 1 else replace(param, scale=scale)


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
    yield from _streams(spec)
    for index, layer in enumerate(spec.layers):
        yield from _layer(f"layers.{index}", layer, spec.width, index in spec.shared_blocks)
        if spec.per_layer is not None:
            yield from _per_layer(f"layers.{index}.per_layer", spec.per_layer, spec.width)
        if spec.alt_up is not None:
            yield from _alt_up(f"layers.{index}.alt_up", spec.alt_up, spec.width)
    yield from norm_params("final_norm", spec.final_norm, spec.width)
    if spec.pooler is not None:
        yield from _pooler(spec.pooler, spec.hidden_width)
        return
    if not spec.tied:
        yield Param("head", (spec.vocab, table), "VD")
    if spec.head_bias:
        yield Param("head_bias", (spec.vocab,), "V")
