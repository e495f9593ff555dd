"""Every parameter of a model, derived from its spec: canonical name, shape and logical axes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from pagoda.common.models.spec import Attention, Layer, Mlp, ModelSpec, Moe, Norm, Pooler


@dataclass(frozen=True, slots=True)
class Param:
    """One parameter."""

    name: str
    shape: tuple[int, ...]
    axes: str  # one axis letter per dimension (see `spec`), `.` for none

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)


def _norm(name: str, norm: Norm | None, width: int, axis: str = "D") -> Iterator[Param]:
    if norm is None:
        return
    yield Param(name, (width,), axis)
    if norm.bias:
        yield Param(f"{name}_bias", (width,), axis)


def _linear(name: str, rows: int, columns: int, axes: str, bias: bool) -> Iterator[Param]:
    yield Param(name, (rows, columns), axes)
    if bias:
        yield Param(f"{name}_bias", (rows,), axes[0])


def _attention(prefix: str, mixer: Attention, width: int) -> Iterator[Param]:
    q, kv = mixer.heads * mixer.head_dim, mixer.kv_heads * mixer.head_dim
    yield from _linear(f"{prefix}.q", q, width, "ND", mixer.qkv_bias)
    yield from _linear(f"{prefix}.k", kv, width, "KD", mixer.qkv_bias)
    yield from _linear(f"{prefix}.v", kv, width, "KD", mixer.qkv_bias)
    yield from _linear(f"{prefix}.o", width, q, "DN", mixer.out_bias)
    per_head = mixer.qk_norm_over == "per_head"
    yield from _norm(f"{prefix}.q_norm", mixer.qk_norm, mixer.head_dim if per_head else q, "H" if per_head else "N")
    yield from _norm(f"{prefix}.k_norm", mixer.qk_norm, mixer.head_dim if per_head else kv, "H" if per_head else "K")


def _mlp(prefix: str, mlp: Mlp, width: int) -> Iterator[Param]:
    if mlp.gated:
        yield from _linear(f"{prefix}.gate", mlp.width, width, "FD", mlp.bias)
    yield from _linear(f"{prefix}.up", mlp.width, width, "FD", mlp.bias)
    yield from _linear(f"{prefix}.down", width, mlp.width, "DF", mlp.bias)


def _moe(prefix: str, moe: Moe, width: int) -> Iterator[Param]:
    yield Param(f"{prefix}.router", (moe.experts, width), "ED")
    for param in _mlp(f"{prefix}.experts", moe.expert, width):
        yield Param(param.name, (moe.experts, *param.shape), f"E{param.axes}")


def _layer(prefix: str, layer: Layer, width: int) -> Iterator[Param]:
    yield from _attention(f"{prefix}.mixer", layer.mixer, width)
    for name in ("before_mixer", "after_mixer", "before_ffn", "after_ffn"):
        yield from _norm(f"{prefix}.norms.{name}", getattr(layer.norms, name), width)
    match layer.ffn:
        case Mlp():
            yield from _mlp(f"{prefix}.ffn", layer.ffn, width)
        case Moe():
            yield from _moe(f"{prefix}.ffn", layer.ffn, width)


def _pooler(pooler: Pooler, width: int) -> Iterator[Param]:
    for index, dense in enumerate(pooler.dense):
        yield from _linear(f"pooler.dense.{index}", dense.width, width, "..", dense.bias)
        yield from _norm(f"pooler.dense.{index}.norm", dense.norm, dense.width, ".")
        width = dense.width
    if pooler.classifier is not None:
        yield from _linear("pooler.classifier", pooler.classifier.labels, width, "..", pooler.classifier.bias)


def params(spec: ModelSpec) -> dict[str, Param]:
    """Return every parameter by canonical name, in the order of the forward pass."""
    return {param.name: param for param in _params(spec)}


def _params(spec: ModelSpec) -> Iterator[Param]:
    embedding = spec.embedding
    table = embedding.width or spec.width
    yield Param("embed", (spec.vocab, table), "VD")
    if embedding.positions is not None:
        yield Param("positions", (embedding.positions + embedding.position_offset, spec.width), ".D")
    if embedding.token_types:
        yield Param("token_types", (embedding.token_types, spec.width), ".D")
    yield from _norm("embed_norm", embedding.norm, spec.width)
    if table != spec.width:
        yield Param("embed_in", (spec.width, table), "D.")
        yield Param("embed_out", (table, spec.width), ".D")
    for index, layer in enumerate(spec.layers):
        yield from _layer(f"layers.{index}", layer, spec.width)
    yield from _norm("final_norm", spec.final_norm, spec.width)
    if spec.pooler is not None:
        yield from _pooler(spec.pooler, spec.hidden_width)
        return
    if not spec.tied:
        yield Param("head", (spec.vocab, table), "VD")
    if spec.head_bias:
        yield Param("head_bias", (spec.vocab,), "V")
