"""Logical parameters -> physical ones: fused q, k, v, fused gate and up, everything prepacked.

A layer is packed as soon as its last parameter has arrived, so that few layers are in memory unpacked.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from pagoda.backends.reference.model.numerics import Numerics, thread_count
from pagoda.backends.reference.model.ops import to_torch
from pagoda.common.backend import Weight
from pagoda.common.errors import WeightError
from pagoda.common.models.mixers import Attention, GatedDelta, LatentAttention, Mixer
from pagoda.common.models.shapes import params
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
    """`qkv`: [D] -> [(N+2K)*H]; `out`: [N*H] -> [D]; `gate`: [D] -> [N*H], None without an output gate."""

    qkv: Linear
    out: Linear
    gate: Linear | None
    q_norm: Tensor | None
    k_norm: Tensor | None


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
class NormParams:
    """Weight and bias [D]."""

    weight: Tensor
    bias: Tensor | None


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


class Packer:
    """Builds ModelParams from a stream of canonical weights; threads pack while the next weights are read."""

    def __init__(self, spec: ModelSpec, numerics: Numerics) -> None:
        self.spec, self.numerics = spec, numerics
        self._expected = params(spec)
        self._tensors: dict[str, Tensor] = {}
        self._bytes = 0
        self._head = "embed" if spec.tied else "head"
        self._missing = Counter(self._unit(name) for name in self._expected)

    def pack(self, weights: Iterable[Weight]) -> ModelParams:
        """Consume the stream. Raises WeightError naming an unknown, repeated, misshapen or missing parameter."""
        threads = thread_count()
        try:
            with ThreadPoolExecutor(threads, "pagoda-pack", initializer=torch.set_num_threads, initargs=(1,)) as pool:
                return self._pack(weights, pool, max_pending=2 * threads)
        finally:
            torch.set_num_threads(threads)  # part of that setting is per process, not per thread

    def _pack(self, weights: Iterable[Weight], pool: ThreadPoolExecutor, max_pending: int) -> ModelParams:
        """`max_pending`: layers being packed at a time, so that a fast reader does not fill the memory."""
        head: Future[Linear] | None = None
        layers: dict[str, Future[LayerParams]] = {}
        for name, array in dequantized(weights, "reference"):
            self._accept(name, array)
            unit = self._unit(name)
            self._missing[unit] -= 1
            if self._missing[unit] or unit == "top":
                continue
            if unit == "head":
                head = pool.submit(
                    linear, self._tensors[self._head], self._tensors.pop("head_bias", None), self.numerics
                )
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
            raise WeightError(
                f"the checkpoint lacks {len(self._expected)} parameters, first {next(iter(self._expected))}"
            )
        ready = tuple(layers[f"layers.{index}"].result() for index in range(len(self.spec.layers)))
        return self._model(ready, None if head is None else head.result())

    def _unit(self, name: str) -> str:
        """Return the unit that the parameter is packed with: its layer, the head, or the top of the model."""
        if name.startswith("layers."):
            return ".".join(name.split(".")[:2])
        return "head" if name in (self._head, "head_bias") and self.spec.pooler is None else "top"

    def _accept(self, name: str, array: npt.NDArray[np.generic]) -> None:
        param = self._expected.pop(name, None)
        if param is None:
            raise WeightError(f"parameter {name} is unknown or came twice")
        if array.shape != param.shape:
            raise WeightError(f"parameter {name} has shape {array.shape}, the model needs {param.shape}")
        self._tensors[name] = to_torch(array).to(self.numerics.weights)
        self._bytes += param.size * self.numerics.weights.itemsize

    def _model(self, layers: tuple[LayerParams, ...], head: Linear | None) -> ModelParams:
        pooler = {name: self._tensors.pop(name).float() for name in list(self._tensors) if name.startswith("pooler.")}
        top = LayerParts(self._tensors, self.numerics)
        has_projection = "embed_in" in self._tensors
        return ModelParams(
            embed=top.take("embed"),
            positions=top.wide("positions"),
            token_types=top.wide("token_types"),
            embed_norm=top.norm("embed_norm"),
            embed_in=top.linear("embed_in") if has_projection else None,
            embed_out=top.linear("embed_out") if has_projection else None,
            layers=layers,
            final_norm=top.norm("final_norm"),
            head=head,
            pooler=pooler,
            num_bytes=self._bytes,
        )


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
        )

    def _attention(self, prefix: str, mixer: Attention) -> AttentionParams:
        return AttentionParams(
            qkv=self.linear(f"{prefix}.q", f"{prefix}.k", f"{prefix}.v"),
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
