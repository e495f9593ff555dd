"""Logical parameters -> physical ones: fused q, k, v, fused gate and up, everything prepacked.

A layer is packed as soon as its last parameter has arrived, so that few layers are in memory unpacked. An update packs
whole layers again: of packed parameters no part can be replaced.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Final, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from pagoda.backends.reference.model.numerics import Numerics, thread_count
from pagoda.backends.reference.model.ops import to_torch
from pagoda.common.backend import Weight
from pagoda.common.errors import WeightError
from pagoda.common.models.mixers import Attention, GatedDelta, LatentAttention, Mixer
from pagoda.common.models.shapes import checked, lacking, params
from pagoda.common.models.spec import Ffn, Layer, Mlp, ModelSpec, Moe
from pagoda.common.weights.quantization import dequantized

# Linear layers, prepacked by oneDNN at load. Which kernel serves which number of tokens was measured; see
# benchmarks/LOG.md. The plain form is `torch.nn.functional.linear`, the oracle of the tests.

Linear = Callable[[Tensor], Tensor]
"""x [T, in] -> [T, out]"""

FEW_TOKENS: Final = 16
"""Up to this many tokens a product is bound by reading the weights, so half the bytes are faster."""

_FLOAT16_MAX: Final = 65504.0

_PACK_HINT: Final = 64
"""Number of tokens that oneDNN chooses the packed layout for."""


def linear(weight: Tensor, bias: Tensor | None, numerics: Numerics) -> Linear:
    """Return the layer of weight [out, in] and bias [out], both in the weights' dtype."""
    if not torch.backends.mkldnn.is_available():
        return PlainLinear(weight.to(numerics.compute), None if bias is None else bias.to(numerics.compute))
    if numerics.widened:
        return WidenedLinear(weight, bias, numerics)
    return PackedLinear(weight, bias)


class PlainLinear:
    """torch's linear: the definition."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight, self.bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class PackedLinear:
    """A layer whose weight oneDNN has reordered; the plain weight is dropped."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _PACK_HINT)
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")


class WidenedLinear:
    """16-bit weights on a processor that computes in float32: a prepacked float32 copy serves batches.

    Few tokens are bound by reading the weights, so they use a float16 copy of half the bytes, which the processor
    widens as it reads. Activations are float32 in both cases.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, numerics: Numerics) -> None:
        wide, wide_bias = weight.to(numerics.compute), None if bias is None else bias.to(numerics.compute)
        self.many = PackedLinear(wide, wide_bias)
        self.few = torch.ops.quantized.linear_prepack_fp16(wide, wide_bias) if _fits_float16(weight) else None

    def __call__(self, x: Tensor) -> Tensor:
        if self.few is None or x.shape[0] > FEW_TOKENS:
            return self.many(x)
        return torch.ops.quantized.linear_dynamic_fp16(x, self.few)


def _fits_float16(weight: Tensor) -> bool:
    """Return whether float16 changes no weight by more than half its subnormal step, 3e-8.

    bfloat16 has fewer mantissa bits than float16, so only weights out of float16's range differ by more.
    """
    if not {"fbgemm", "x86"} & set(torch.backends.quantized.supported_engines):
        return False
    low, high = weight.aminmax()
    return bool(low >= -_FLOAT16_MAX and high <= _FLOAT16_MAX)


@dataclass(frozen=True, slots=True)
class AttentionParams:
    """`qkv`: [D] -> [(N+2K)*H], or [N*H] without K and V of its own; `out`: [N*H] -> [D].

    `gate`: [D] -> [N*H], None without an output gate.
    """

    qkv: Linear
    out: Linear
    gate: Linear | None
    q_norm: Tensor | None
    k_norm: Tensor | None


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
    indexer: IndexerParams | None


@dataclass(frozen=True, slots=True)
class GatedDeltaParams:
    """N value heads of V channels, C channels of the convolution. All but the linear layers and the norm in float32."""

    inner: Linear  # [D] -> q, k and v [C], gate [N*V], beta [N], decay [N]
    conv: Tensor  # [taps, C, 1]
    decay_rate: Tensor  # [N] -exp of the parameter
    decay_offset: Tensor  # [N]
    norm: Tensor  # [V]
    out: Linear  # [N*V] -> [D]


MixerParams = AttentionParams | LatentAttentionParams | GatedDeltaParams


@dataclass(frozen=True, slots=True)
class MlpParams:
    """`inner`: [D] -> [2F] (gate then up) when gated, else [F]; `down`: [F] -> [D]."""

    inner: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class MoeParams:
    """`router` [E, D] in float32, and one MLP per expert."""

    router: Linear
    experts: tuple[MlpParams, ...]
    shared: MlpParams | None
    shared_gate: Linear | None


@dataclass(frozen=True, slots=True)
class LayerParams:
    """One layer. `norms`: by their field in Norms."""

    mixers: tuple[MixerParams, ...]
    ffn: MlpParams | MoeParams | None
    norms: dict[str, NormParams]


@dataclass(frozen=True, slots=True)
class ModelParams:
    """The whole model."""

    embed: Tensor  # [V, D'] in the weights' dtype
    positions: Tensor | None
    token_types: Tensor | None
    embed_norm: NormParams | None
    embed_in: Linear | None
    embed_out: Linear | None
    layers: tuple[LayerParams, ...]
    final_norm: NormParams | None
    head: Linear | None  # None for pooling models
    pooler: dict[str, Tensor]  # by canonical name, float32
    num_bytes: int


PartT = TypeVar("PartT")


class Packer:
    """Builds ModelParams from a stream of canonical weights; threads pack while the next weights are read.

    A unit is what is packed together: a layer, the head with its bias, or a parameter of its own with its bias.
    """

    def __init__(self, spec: ModelSpec, numerics: Numerics) -> None:
        self.spec, self.numerics = spec, numerics
        self._expected = params(spec)
        self._tensors: dict[str, Tensor] = {}
        self._head = "embed" if spec.tied else "head"
        self._missing = Counter(self._unit(name) for name in self._expected)
        self._num_bytes = sum(param.size for param in self._expected.values()) * numerics.weights.itemsize

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
        for name, array in checked(dequantized(weights, "reference"), self._expected):
            self._tensors[name] = to_torch(array).to(self.numerics.weights, copy=old is not None)
            unit = self._unit(name)
            self._missing[unit] -= 1
            if self._missing[unit]:
                continue
            if unit == "head":
                head = pool.submit(
                    linear, self._tensors[self._head], self._tensors.pop("head_bias", None), self.numerics
                )
            if not unit.startswith("layers."):
                continue
            pending = [layer for layer in layers.values() if not layer.done()]
            if len(pending) >= max_pending:
                wait(pending, return_when=FIRST_COMPLETED)
            parts = LayerParts(
                {key: self._tensors.pop(key) for key in list(self._tensors) if key.startswith(f"{unit}.")},
                self.numerics,
            )
            layers[unit] = pool.submit(parts.layer, unit, self.spec.layers[int(unit.removeprefix("layers."))])
        if self._expected:
            self._check_missing(old)
        units = [f"layers.{index}" for index in range(len(self.spec.layers))]
        kept = {} if old is None else dict(zip(units, old.layers))
        ready = tuple(layers[unit].result() if unit in layers else kept[unit] for unit in units)
        return self._model(ready, None if head is None else head.result(), old)

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
            old = ModelParams(torch.empty(0), None, None, None, None, None, (), None, None, {}, self._num_bytes)
        pooler = {name: self._tensors.pop(name).float() for name in list(self._tensors) if name.startswith("pooler.")}
        top = LayerParts(self._tensors, self.numerics)
        return ModelParams(
            embed=_new(self._tensors.pop("embed", None), old.embed),
            positions=_new(top.wide("positions"), old.positions),
            token_types=_new(top.wide("token_types"), old.token_types),
            embed_norm=_new(top.norm("embed_norm"), old.embed_norm),
            embed_in=top.linear("embed_in") if "embed_in" in self._tensors else old.embed_in,
            embed_out=top.linear("embed_out") if "embed_out" in self._tensors else old.embed_out,
            layers=layers,
            final_norm=_new(top.norm("final_norm"), old.final_norm),
            head=_new(head, old.head),
            pooler=pooler,
            num_bytes=old.num_bytes,
        )


def _new(part: PartT | None, old: PartT) -> PartT:
    return old if part is None else part


class LayerParts:
    """Named tensors, taken one by one and prepared."""

    def __init__(self, tensors: dict[str, Tensor], numerics: Numerics) -> None:
        self._tensors, self._numerics = tensors, numerics

    def take(self, name: str) -> Tensor:
        """Remove and return a parameter."""
        return self._tensors.pop(name)

    def wide(self, name: str) -> Tensor | None:
        """Remove and return a small parameter in the compute dtype, or None."""
        tensor = self._tensors.pop(name, None)
        return None if tensor is None else tensor.to(self._numerics.compute)

    def linear(self, *names: str) -> Linear:
        """Return one fused layer of several parameters with the same input."""
        weights = [self.take(name) for name in names]
        biases = [self._tensors.pop(f"{name}_bias", None) for name in names]
        present = [bias for bias in biases if bias is not None]
        return linear(
            torch.cat(weights) if len(weights) > 1 else weights[0].clone(),
            torch.cat(present) if present else None,
            self._numerics,
        )

    def norm(self, name: str) -> NormParams | None:
        """Return a norm's parameters, or None."""
        weight = self.wide(name)
        return None if weight is None else NormParams(weight, self.wide(f"{name}_bias"))

    @torch.inference_mode()
    def layer(self, prefix: str, layer: Layer) -> LayerParams:
        """Return one layer. Runs in a thread of the pool."""
        norms = {field: self.norm(f"{prefix}.norms.{field}") for field in NORM_FIELDS}
        return LayerParams(
            mixers=tuple(self._mixer(f"{prefix}.mixers.{index}", mixer) for index, mixer in enumerate(layer.mixers)),
            ffn=self._ffn(f"{prefix}.ffn", layer.ffn),
            norms={field: norm for field, norm in norms.items() if norm is not None},
        )

    def _mixer(self, prefix: str, mixer: Mixer) -> MixerParams:
        match mixer:
            case Attention():
                return self._attention(prefix, mixer)
            case LatentAttention():
                return self._latent_attention(prefix, mixer)
            case GatedDelta():
                return self._gated_delta(prefix)

    def _gated_delta(self, prefix: str) -> GatedDeltaParams:
        norm = self.wide(f"{prefix}.norm")
        assert norm is not None
        taps = torch.cat([self.take(f"{prefix}.{part}_conv").float() for part in "qkv"])
        return GatedDeltaParams(
            inner=self.linear(*(f"{prefix}.{part}" for part in ("q", "k", "v", "gate", "beta", "decay"))),
            conv=taps.permute(2, 0, 1).contiguous(),
            decay_rate=-self.take(f"{prefix}.decay_rate").float().exp(),
            decay_offset=self.take(f"{prefix}.decay_offset").float(),
            norm=norm,
            out=self.linear(f"{prefix}.o"),
        )

    def _latent_attention(self, prefix: str, mixer: LatentAttention) -> LatentAttentionParams:
        low_rank = mixer.query_rank is not None
        up = self._tensors[f"{prefix}.kv_b"].to(self._numerics.compute).unflatten(0, (mixer.heads, -1))
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
            indexer=None if mixer.indexer is None else self._indexer(f"{prefix}.indexer"),
        )

    def _indexer(self, prefix: str) -> IndexerParams:
        k_norm = self.norm(f"{prefix}.k_norm")
        assert k_norm is not None
        q, k, weights = (self.linear(f"{prefix}.{part}") for part in ("q", "k", "weights"))
        return IndexerParams(q, k, k_norm, weights)

    def _attention(self, prefix: str, mixer: Attention) -> AttentionParams:
        return AttentionParams(
            qkv=self.linear(*(f"{prefix}.{part}" for part in ("qkv" if mixer.shares_cache_of is None else "q"))),
            out=self.linear(f"{prefix}.o"),
            gate=self.linear(f"{prefix}.gate") if mixer.output_gate else None,
            q_norm=self.wide(f"{prefix}.q_norm"),
            k_norm=self.wide(f"{prefix}.k_norm"),
        )

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
        return MlpParams(self.linear(*inner), self.linear(f"{prefix}.down"))

    def _moe(self, prefix: str, moe: Moe) -> MoeParams:
        stacked = {name: self.take(name) for name in list(self._tensors) if name.startswith(f"{prefix}.experts.")}
        experts = []
        for index in range(moe.experts):
            self._tensors.update({name: tensor[index] for name, tensor in stacked.items()})
            experts.append(self._mlp(f"{prefix}.experts", moe.expert))
        router = PlainLinear(self.take(f"{prefix}.router").to(self._numerics.compute), None)
        if moe.shared is None:
            return MoeParams(router, tuple(experts), None, None)
        shared, gate = self._mlp(f"{prefix}.shared", moe.shared), self.linear(f"{prefix}.shared_gate")
        return MoeParams(router, tuple(experts), shared, gate)


NORM_FIELDS = ("before_mixer", "after_mixer", "before_ffn", "after_ffn")
