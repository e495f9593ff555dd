"""Logical parameters -> physical ones: fused q, k, v, fused gate and up, everything prepacked.

A layer is packed as soon as its last parameter has arrived, so that few layers are in memory unpacked. An update packs
whole layers again: of packed parameters no part can be replaced.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from typing import Final, TypeVar

import torch
from torch import Tensor

from pagoda.backends.reference.memory import held_bytes
from pagoda.backends.reference.model.adapters import AdapterMatrices
from pagoda.backends.reference.model.linear import InvariantLinear, Linear, PlainLinear, float32_linear, linear
from pagoda.backends.reference.model.linear import Weight as PackWeight
from pagoda.backends.reference.model.numerics import Numerics, thread_count
from pagoda.backends.reference.model.ops import to_numpy, to_torch
from pagoda.backends.reference.model.quantized.blocks import BlockMatrix, BlockTable, Table, keeps
from pagoda.backends.reference.model.quantized.compiled import lanes
from pagoda.backends.reference.model.quantized.layer import computes
from pagoda.common.backend import Weight
from pagoda.common.errors import WeightError
from pagoda.common.models.mixers import (
    Attention,
    GatedDelta,
    KimiDelta,
    LatentAttention,
    LightningAttention,
    Mamba,
    Mamba2,
    Mixer,
    ShortConvolution,
)
from pagoda.common.models.shapes import checked, lacking, params
from pagoda.common.models.spec import Ffn, InputBlock, Layer, Mlp, ModelSpec, Moe
from pagoda.common.weights.quantization.on_the_fly import quantize
from pagoda.common.weights.quantization.tensors import (
    QuantizedTensor,
    Scheme,
    dequantized,
    log_dequantized,
    take_matrix,
)


@dataclass(frozen=True, slots=True)
class BlockIndexerParams:
    """`q`: [D] -> [K*H]; `k`: [D] -> [H]; norms [H]."""

    q: Linear
    k: Linear
    q_norm: Tensor
    k_norm: Tensor


@dataclass(frozen=True, slots=True)
class AttentionParams:
    """`qkv`: [D] -> [(N+K)*H + K*V], or [N*H] without K and V of its own; `out`: [N*V] -> [D].

    `gate`: [D] -> [N*V] or [N], None without an output gate. `sinks` [N].
    """

    qkv: Linear
    out: Linear
    gate: Linear | None
    q_norm: NormParams | None
    k_norm: NormParams | None
    sinks: Tensor | None
    blocks: BlockIndexerParams | None


@dataclass(frozen=True, slots=True)
class NormParams:
    """Weight and bias [D]."""

    weight: Tensor
    bias: Tensor | None


@dataclass(frozen=True, slots=True)
class IndexerParams:
    """`q`: low-rank queries -> [N*H]; `k`: [D] -> [H]; `weights`: [D] -> [N]."""

    q: Linear
    k: Linear
    k_norm: NormParams
    weights: Linear


@dataclass(frozen=True, slots=True)
class LatentAttentionParams:
    """R latent channels. `kv_b` and its parts `key_up`, `value_up` serve prefill and decode."""

    q_a: Linear | None  # [D] -> low-rank queries, None if `q` reads x
    q_a_norm: Tensor | None
    q: Linear  # -> [N*H]
    kv_a: Linear  # [D] -> latent, rotary key
    kv_a_norm: Tensor
    kv_b: Linear  # [R] -> [N * (keys without RoPE, values)]
    key_up: Tensor  # [N, keys without RoPE, R]
    value_up: Tensor  # [N, V, R]
    out: Linear  # [N*V] -> [D]
    gate: Linear | None  # [D] -> [N], None without an output gate
    indexer: IndexerParams | None


@dataclass(frozen=True, slots=True)
class ConvolutionParams:
    """A convolution of each of C channels by itself, in float32."""

    taps: Tensor  # [taps, C, 1]
    bias: Tensor | None  # [C, 1]


@dataclass(frozen=True, slots=True)
class GatedDeltaParams:
    """N value heads of V channels, C channels of the convolution. All but the linear layers and the norm in float32."""

    inner: Linear  # [D] -> q, k and v [C], gate [N*V], beta [N], decay [N]
    conv: ConvolutionParams
    decay_rate: Tensor  # [N] -exp of the parameter
    decay_offset: Tensor  # [N]
    norm: Tensor  # [V]
    out: Linear  # [N*V] -> [D]


@dataclass(frozen=True, slots=True)
class Mamba2Params:
    """N heads of H channels, C channels of the convolution. All but the linear layers and the norm in float32."""

    inner: Linear  # [D] -> v, b and c [C], gate [N*H], step [N]
    conv: ConvolutionParams
    decay_rate: Tensor  # [N] -exp of the parameter
    step_offset: Tensor  # [N]
    skip: Tensor  # [N]
    norm: Tensor | None  # [N*H]
    out: Linear  # [N*H] -> [D]


@dataclass(frozen=True, slots=True)
class KimiDeltaParams:
    """N heads of H channels. All but the linear layers and the norm in float32."""

    inner: Linear  # [D] -> q, k and v [3*N*H], beta [N], low-rank decay, low-rank gate; or decay and gate
    decay: Linear | None  # low-rank -> [N*H]
    gate: Linear | None  # low-rank -> [N*H]
    conv: ConvolutionParams
    decay_rate: Tensor  # [N] -exp of the parameter
    decay_offset: Tensor  # [N*H]
    norm: Tensor  # [H]
    out: Linear  # [N*H] -> [D]


@dataclass(frozen=True, slots=True)
class LightningParams:
    """N heads of H channels."""

    inner: Linear  # [D] -> q, k, v and gate, each [N*H]
    q_norm: Tensor | None  # [H]
    k_norm: Tensor | None  # [H]
    norm: Tensor  # [N*H]
    out: Linear  # [N*H] -> [D]


@dataclass(frozen=True, slots=True)
class MambaParams:
    """C channels of K states. All but `inner` and `out` in float32."""

    inner: Linear  # [D] -> v [C], gate [C]
    conv: ConvolutionParams
    selection: Linear  # [C] -> low-rank step, b [K], c [K]
    step: Linear  # low-rank -> [C]
    norms: tuple[Tensor | None, Tensor | None, Tensor | None]  # of the low-rank step, b and c
    step_offset: Tensor  # [C]
    decay_rate: Tensor  # [C, K] -exp of the parameter
    skip: Tensor  # [C]
    out: Linear  # [C] -> [D]


@dataclass(frozen=True, slots=True)
class ShortConvolutionParams:
    """C channels."""

    inner: Linear  # [D] -> b, c and v, each [C]
    conv: ConvolutionParams
    out: Linear  # [C] -> [D]


MixerParams = (
    AttentionParams
    | LatentAttentionParams
    | GatedDeltaParams
    | KimiDeltaParams
    | LightningParams
    | MambaParams
    | Mamba2Params
    | ShortConvolutionParams
)


@dataclass(frozen=True, slots=True)
class MlpParams:
    """`inner`: [D] -> [2F] (gate then up) when gated, else [F]; `down`: [F] -> [D]."""

    inner: Linear
    down: Linear
    curvatures: tuple[Tensor, Tensor] | None = None  # of a learned activation


@dataclass(frozen=True, slots=True)
class MoeParams:
    """`router` [D] -> [E] and `correction` [E] in float32, one MLP per expert, and the MLP that runs on every token."""

    router: Linear
    correction: Tensor | None
    experts: tuple[MlpParams, ...]
    shared: MlpParams | None
    shared_gate: Linear | None


@dataclass(frozen=True, slots=True)
class InputBlockParams:
    """A layer's input block. Attention, ffn and norms of a block that has an earlier layer's weights are that layer's.

    Adapters: [D] or [2D] -> what they add to the output of `qkv` or `inner`; None without.
    """

    attention: AttentionParams | None
    ffn: MlpParams | None
    norms: dict[str, NormParams]  # norm, ffn_norm
    qkv_adapter: Linear | None
    inner_adapter: Linear | None
    out: Linear  # [D] -> [D]

    def adapted(self, first: InputBlockParams) -> tuple[AttentionParams, MlpParams]:
        """Return attention and ffn with the adapters. `first`: the block with the weights, itself or an earlier one."""
        assert first.attention is not None
        assert first.ffn is not None
        qkv = _sum(first.attention.qkv, self.qkv_adapter)
        inner = _sum(first.ffn.inner, self.inner_adapter)
        return replace(first.attention, qkv=qkv), replace(first.ffn, inner=inner)


def _sum(layer: Linear, adapter: Linear | None) -> Linear:
    return layer if adapter is None else lambda x: layer(x) + adapter(x)


@dataclass(frozen=True, slots=True)
class LayerParams:
    """One layer. `mixers`: all but that of an input block. `norms`: by their field in Norms."""

    mixers: tuple[MixerParams, ...]
    ffn: MlpParams | MoeParams | None
    norms: dict[str, NormParams]
    side_moe: MoeParams | None
    shortcut: MoeParams | None
    block: InputBlockParams | None
    extras: dict[str, Tensor]  # what few models have, by name, in the compute dtype


@dataclass(frozen=True, slots=True)
class ModelParams:
    """The whole model."""

    embed: Table  # [V, D'], rows in the weights' dtype
    layer_table: Table | None  # of per-layer embeddings, as `embed`
    positions: Tensor | None
    token_types: Tensor | None
    embed_norm: NormParams | None
    embed_in: Linear | None
    embed_out: Linear | None
    layers: tuple[LayerParams, ...]
    final_norm: NormParams | None
    head: Linear | None  # None for pooling models
    pooler: dict[str, Tensor]  # by canonical name, float32
    extras: dict[str, Tensor]  # what few models have, by canonical name
    num_bytes: int


PartT = TypeVar("PartT")


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
        layers: dict[str, Future[LayerParams]] = {}
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
                bias = LayerParts(self._tensors, self.numerics).get("head_bias")
                head = pool.submit(self._packed_head, self._tensors[self._head], bias)
            if not unit.startswith("layers."):
                continue
            pending = [layer for layer in layers.values() if not layer.done()]
            if len(pending) >= max_pending:
                wait(pending, return_when=FIRST_COMPLETED)
            parts = LayerParts(
                {key: self._tensors.pop(key) for key in list(self._tensors) if key.startswith(f"{unit}.")},
                self.numerics,
                self._adapters,
            )
            number = int(unit.removeprefix("layers."))
            layers[unit] = pool.submit(parts.layer, unit, self.spec.layers[number], number in self.spec.shared_blocks)
        log_dequantized(dequantised, "reference")
        if self._expected:
            self._check_missing(old)
        units = [f"layers.{index}" for index in range(len(self.spec.layers))]
        kept = {} if old is None else dict(zip(units, old.layers))
        for unit, layer in zip(units, self.spec.layers):
            if unit not in layers and unit not in kept:  # a layer without parameters
                layers[unit] = pool.submit(LayerParts({}, self.numerics).layer, unit, layer)
        ready = tuple(layers[unit].result() if unit in layers else kept[unit] for unit in units)
        return self._model(ready, None if head is None else head.result(), old)

    def _packed_head(self, weight: PackWeight, bias: Tensor | None) -> Linear:
        if self._head_scheme is not None and isinstance(weight, Tensor):
            weight = quantize(to_numpy(weight), self._head_scheme)
        layer = float32_linear(weight, bias, self.numerics)
        return layer if self._adapters is None else self._adapters.adapted(layer, ("head",), *_sizes([weight]))

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

    def _model(self, layers: tuple[LayerParams, ...], head: Linear | None, old: ModelParams | None) -> ModelParams:
        if old is None:
            old = ModelParams(torch.empty(0), None, None, None, None, None, None, (), None, None, {}, {}, 0)
        top = LayerParts(self._tensors, self.numerics)
        pooler = {name: top.take(name).float() for name in list(self._tensors) if name.startswith("pooler.")}
        embed = top.table("embed")
        layer_table = top.table(_LAYER_TABLE)
        extras = {
            name: top.take(name).to(self.numerics.compute) for name in list(self._tensors) if name.startswith(_EXTRAS)
        }
        model = ModelParams(
            embed=_new(embed, old.embed),
            layer_table=_new(layer_table, old.layer_table),
            positions=_new(top.wide("positions"), old.positions),
            token_types=_new(top.wide("token_types"), old.token_types),
            embed_norm=_new(top.norm("embed_norm"), old.embed_norm),
            embed_in=top.linear("embed_in") if "embed_in" in self._tensors else old.embed_in,
            embed_out=top.linear("embed_out") if "embed_out" in self._tensors else old.embed_out,
            layers=layers,
            final_norm=_new(top.norm("final_norm"), old.final_norm),
            head=_new(head, old.head),
            pooler=pooler,
            extras=old.extras | extras,
            num_bytes=0,
        )
        return replace(model, num_bytes=held_bytes(model))


def _new(part: PartT | None, old: PartT) -> PartT:
    return old if part is None else part


class LayerParts:
    """Named tensors, taken one by one and prepared."""

    def __init__(
        self, tensors: dict[str, PackWeight], numerics: Numerics, adapters: AdapterMatrices | None = None
    ) -> None:
        self._tensors = tensors
        self._numerics = numerics
        self._adapters = adapters
        self._expert: int | None = None  # whose layers are made

    def take(self, name: str) -> Tensor:
        """Remove and return a parameter."""
        return self._values(self._tensors.pop(name))

    def get(self, name: str) -> Tensor | None:
        """Remove and return a parameter, or None."""
        return self.take(name) if name in self._tensors else None

    def _values(self, weight: PackWeight) -> Tensor:
        if isinstance(weight, Tensor):
            return weight
        return torch.from_numpy(weight.dequantize()).to(self._numerics.weights)

    def wide(self, name: str) -> Tensor | None:
        """Remove and return a small parameter in the compute dtype, or None."""
        tensor = self.get(name)
        return None if tensor is None else tensor.to(self._numerics.compute)

    def table(self, name: str) -> Table | None:
        """Remove and return an embedding table, or None."""
        weight = self._tensors.pop(name, None)
        if isinstance(weight, QuantizedTensor):
            return BlockTable(BlockMatrix.of(weight), self._numerics.weights)
        return weight

    def _wide(self, name: str) -> Tensor:
        return self.take(name).to(self._numerics.compute)

    def linear(self, *names: str, precise: bool = False) -> Linear:
        """Return one fused layer of several parameters with the same input. `precise`: as of `linear`."""
        weights = [self._tensors.pop(name) for name in names]
        if len(weights) == 1 and isinstance(weights[0], Tensor):
            weights = [weights[0].clone()]
        biases = [self.get(f"{name}_bias") for name in names]
        present = [bias for bias in biases if bias is not None]
        layer = linear(weights, torch.cat(present) if present else None, self._numerics, precise=precise)
        return layer if self._adapters is None else self._adapters.adapted(layer, names, *_sizes(weights), self._expert)

    def convolution(self, *names: str) -> ConvolutionParams:
        """Return one convolution of the channels of several."""
        taps = torch.cat([self.take(name).float() for name in names])
        biases = [self.get(f"{name}_bias") for name in names]
        present = [bias.float() for bias in biases if bias is not None]
        bias = torch.cat(present)[:, None] if present else None
        return ConvolutionParams(taps.permute(2, 0, 1).contiguous(), bias)

    def norm(self, name: str) -> NormParams | None:
        """Return a norm's parameters, or None."""
        weight = self.wide(name)
        return None if weight is None else NormParams(weight, self.wide(f"{name}_bias"))

    @torch.inference_mode()
    def layer(self, prefix: str, layer: Layer, shares_block: bool = False) -> LayerParams:
        """Return one layer. Runs in a thread of the pool. `shares_block`: an earlier layer has its block's weights."""
        norms = {field: self.norm(f"{prefix}.norms.{field}") for field in NORM_FIELDS}
        mixers = [(f"{prefix}.mixers.{index}", mixer) for index, mixer in enumerate(layer.mixers)]
        return LayerParams(
            block=None if layer.block is None else self._block(prefix, layer, layer.block, shares_block),
            mixers=tuple(self._mixer(*mixer) for mixer in mixers[layer.block is not None :]),
            ffn=self._ffn(f"{prefix}.ffn", layer.ffn),
            norms={field: norm for field, norm in norms.items() if norm is not None},
            side_moe=None if layer.side_moe is None else self._moe(f"{prefix}.side.moe", layer.side_moe.moe),
            shortcut=None if layer.shortcut is None else self._moe(f"{prefix}.shortcut.moe", layer.shortcut.moe),
            extras={name.removeprefix(f"{prefix}."): self._wide(name) for name in list(self._tensors)},
        )

    def _block(self, prefix: str, layer: Layer, block: InputBlock, shared: bool) -> InputBlockParams:
        attention = f"{prefix}.mixers.0"
        name = f"{prefix}.block"
        norms = {part: self.norm(f"{name}.{part}") for part in ("norm", "ffn_norm")}
        qkv = [(f"{attention}.{part}_adapter", f"{attention}.{part}_adapter_out") for part in "qkv"]
        inner = (f"{name}.ffn_adapter", f"{name}.ffn.gate_adapter_out", f"{name}.ffn.up_adapter_out")
        return InputBlockParams(
            attention=None if shared else self.attention(attention, layer.attends_before),
            ffn=None if shared else self._mlp(f"{name}.ffn", block.ffn),
            norms={part: norm for part, norm in norms.items() if norm is not None},
            qkv_adapter=None if layer.attends_before.adapter_rank is None else self._adapter(*qkv),
            inner_adapter=None if block.adapter_rank is None else self._adapter(inner),
            out=self.linear(f"{name}.out"),
        )

    def _adapter(self, *parts: tuple[str, ...]) -> Linear:
        """Return low-rank layers side by side. `parts`: of each the first factor, and second ones of its outputs."""
        pairs = [(self.linear(first), self.linear(*seconds)) for first, *seconds in parts]
        return lambda x: torch.cat([second(first(x)) for first, second in pairs], -1)

    def _mixer(self, prefix: str, mixer: Mixer) -> MixerParams:
        match mixer:
            case Attention():
                return self.attention(prefix, mixer)
            case LatentAttention():
                return self._latent_attention(prefix, mixer)
            case GatedDelta():
                return self._gated_delta(prefix)
            case KimiDelta():
                return self._kimi_delta(prefix, mixer)
            case LightningAttention():
                inner = self.linear(*(f"{prefix}.{part}" for part in ("q", "k", "v", "gate")))
                q_norm, k_norm, norm = (self.wide(f"{prefix}.{part}") for part in ("q_norm", "k_norm", "norm"))
                assert norm is not None
                return LightningParams(inner, q_norm, k_norm, norm, out=self.linear(f"{prefix}.o"))
            case Mamba():
                return self._mamba(prefix)
            case Mamba2():
                return self._mamba2(prefix)
            case ShortConvolution():
                inner = self.linear(*(f"{prefix}.{part}" for part in "bcv"))
                conv = self.convolution(f"{prefix}.conv")
                return ShortConvolutionParams(inner, conv, out=self.linear(f"{prefix}.o"))

    def _gated_delta(self, prefix: str) -> GatedDeltaParams:
        norm = self.wide(f"{prefix}.norm")
        assert norm is not None
        return GatedDeltaParams(
            inner=self.linear(*(f"{prefix}.{part}" for part in ("q", "k", "v", "gate", "beta", "decay"))),
            conv=self.convolution(*(f"{prefix}.{part}_conv" for part in "qkv")),
            decay_rate=-self.take(f"{prefix}.decay_rate").float().exp(),
            decay_offset=self.take(f"{prefix}.decay_offset").float(),
            norm=norm,
            out=self.linear(f"{prefix}.o"),
        )

    def _kimi_delta(self, prefix: str, mixer: KimiDelta) -> KimiDeltaParams:
        low_rank = mixer.rank is not None
        last = ("decay_a", "gate_a") if low_rank else ("decay", "gate")
        norm = self.wide(f"{prefix}.norm")
        assert norm is not None
        return KimiDeltaParams(
            inner=self.linear(*(f"{prefix}.{part}" for part in ("q", "k", "v", "beta", *last))),
            decay=self.linear(f"{prefix}.decay_b") if low_rank else None,
            gate=self.linear(f"{prefix}.gate_b") if low_rank else None,
            conv=self.convolution(*(f"{prefix}.{part}_conv" for part in "qkv")),
            decay_rate=-self.take(f"{prefix}.decay_rate").exp(),
            decay_offset=self.take(f"{prefix}.decay_offset"),
            norm=norm,
            out=self.linear(f"{prefix}.o"),
        )

    def _mamba(self, prefix: str) -> MambaParams:
        parts = ("step_a", "b", "c")
        step, b, c = (self.get(f"{prefix}.{part}_norm") for part in parts)
        return MambaParams(
            inner=self.linear(f"{prefix}.v", f"{prefix}.gate"),
            conv=self.convolution(f"{prefix}.v_conv"),
            selection=PlainLinear(torch.cat([self.take(f"{prefix}.{part}").float() for part in parts]), None),
            step=PlainLinear(self.take(f"{prefix}.step").float(), None),
            norms=(_wide(step), _wide(b), _wide(c)),
            step_offset=self.take(f"{prefix}.step_offset"),
            decay_rate=-self.take(f"{prefix}.decay_rate").exp(),
            skip=self.take(f"{prefix}.skip"),
            out=self.linear(f"{prefix}.o"),
        )

    def _mamba2(self, prefix: str) -> Mamba2Params:
        return Mamba2Params(
            inner=self.linear(*(f"{prefix}.{part}" for part in ("v", "b", "c", "gate", "step"))),
            conv=self.convolution(*(f"{prefix}.{part}_conv" for part in "vbc")),
            decay_rate=-self.take(f"{prefix}.decay_rate").exp(),
            step_offset=self.take(f"{prefix}.step_offset"),
            skip=self.take(f"{prefix}.skip"),
            norm=self.wide(f"{prefix}.norm"),
            out=self.linear(f"{prefix}.o"),
        )

    def _latent_attention(self, prefix: str, mixer: LatentAttention) -> LatentAttentionParams:
        low_rank = mixer.query_rank is not None
        up = self._values(self._tensors[f"{prefix}.kv_b"]).to(self._numerics.compute).unflatten(0, (mixer.heads, -1))
        kv_a_norm = self.wide(f"{prefix}.kv_a_norm")
        assert kv_a_norm is not None
        return LatentAttentionParams(
            q_a=self.linear(f"{prefix}.q_a") if low_rank else None,
            q_a_norm=self.wide(f"{prefix}.q_a_norm"),
            q=self.linear(f"{prefix}.q_b" if low_rank else f"{prefix}.q"),
            kv_a=self.linear(f"{prefix}.kv_a"),
            kv_a_norm=kv_a_norm,
            kv_b=self.linear(f"{prefix}.kv_b"),
            key_up=up[:, : mixer.nope_dim].contiguous(),
            value_up=up[:, mixer.nope_dim :].contiguous(),
            out=self.linear(f"{prefix}.o"),
            gate=self.linear(f"{prefix}.gate") if mixer.gate_per_head else None,
            indexer=None if mixer.indexer is None else self._indexer(f"{prefix}.indexer"),
        )

    def _indexer(self, prefix: str) -> IndexerParams:
        k_norm = self.norm(f"{prefix}.k_norm")
        assert k_norm is not None
        q, k, weights = (self.linear(f"{prefix}.{part}") for part in ("q", "k", "weights"))
        return IndexerParams(q, k, k_norm, weights)

    def attention(self, prefix: str, mixer: Attention) -> AttentionParams:
        if mixer.values_are_keys:
            for suffix in ("", "_bias"):
                if (keys := self._tensors.get(f"{prefix}.k{suffix}")) is not None:
                    self._tensors[f"{prefix}.v{suffix}"] = keys
        return AttentionParams(
            qkv=self.linear(
                *(f"{prefix}.{part}" for part in ("qkv" if mixer.shares_cache_of is None else "q")), precise=True
            ),
            out=self.linear(f"{prefix}.o"),
            gate=self.linear(f"{prefix}.gate") if mixer.output_gate else None,
            q_norm=self.norm(f"{prefix}.q_norm"),
            k_norm=self.norm(f"{prefix}.k_norm"),
            sinks=self.wide(f"{prefix}.sinks"),
            blocks=None if mixer.blocks is None else self._blocks(f"{prefix}.blocks"),
        )

    def _blocks(self, prefix: str) -> BlockIndexerParams:
        q, k = (self.linear(f"{prefix}.{part}") for part in "qk")
        return BlockIndexerParams(q, k, self._wide(f"{prefix}.q_norm"), self._wide(f"{prefix}.k_norm"))

    def _ffn(self, prefix: str, ffn: Ffn | None) -> MlpParams | MoeParams | None:
        match ffn:
            case None:
                return None
            case Mlp():
                return self._mlp(prefix, ffn)
            case Moe():
                return self._moe(prefix, ffn)

    def _mlp(self, prefix: str, mlp: Mlp) -> MlpParams:
        inner = (f"{prefix}.gate", f"{prefix}.up") if mlp.gated else (f"{prefix}.up",)
        curvatures = None
        if mlp.learned is not None:
            curvatures = self.take(f"{prefix}.curvature_p"), self.take(f"{prefix}.curvature_n")
        return MlpParams(self.linear(*inner), self.linear(f"{prefix}.down"), curvatures)

    def _moe(self, prefix: str, moe: Moe) -> MoeParams:
        names = [name for name in self._tensors if name.startswith(f"{prefix}.experts.")]
        stacked = {name: self._tensors.pop(name) for name in names}
        experts = []
        for index in range(moe.experts):
            self._tensors.update({name: _expert(weight, index) for name, weight in stacked.items()})
            self._expert = index
            experts.append(self._mlp(f"{prefix}.experts", moe.expert))
        self._expert = None
        router = PlainLinear(
            self.take(f"{prefix}.router").to(self._numerics.compute), self.wide(f"{prefix}.router_bias")
        )
        return MoeParams(
            InvariantLinear(router) if self._numerics.batch_invariant else router,
            correction=self.get(f"{prefix}.router_correction"),
            experts=tuple(experts),
            shared=None if moe.shared is None else self._mlp(f"{prefix}.shared", moe.shared),
            shared_gate=self.linear(f"{prefix}.shared_gate") if moe.shared_gate else None,
        )


_EXTRAS: Final = ("per_layer.", "alt_up.")
_LAYER_TABLE: Final = "per_layer.table"


def _expert(weight: PackWeight, index: int) -> PackWeight:
    return take_matrix(weight, index) if isinstance(weight, QuantizedTensor) else weight[index]


def _wide(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.float()


def _sizes(weights: Sequence[PackWeight]) -> tuple[list[int], int]:
    """Return the outputs of each matrix [F, D], and D."""
    return [weight.shape[0] for weight in weights], weights[0].shape[-1]


NORM_FIELDS = ("before_mixer", "after_mixer", "before_ffn", "after_ffn")


def rounded_weights(weights: Iterable[Weight], numerics: Numerics) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a model that transformers computes, rounded to the weights' dtype."""
    for name, array in dequantized(weights, "reference"):
        tensor = to_torch(array)
        rounds = numerics.widened and tensor.is_floating_point()
        yield name, tensor.to(numerics.weights).to(numerics.compute) if rounds else tensor
