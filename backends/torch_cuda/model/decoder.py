"""The decoder of a rank, built once from a model spec and called once per step.

`match` runs at build time only. The residual stream and the pending update travel separately, so that each addition is
fused into the norm that follows it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import NormalDist
from typing import Any, assert_never

import torch
from torch import Tensor

from pagoda.backends.reference.model.ops import sigmoid, sparse, xielu
from pagoda.backends.torch_cuda.attention_backends.protocol import AttentionKernels
from pagoda.backends.torch_cuda.attention_backends.triton import own_kernels
from pagoda.backends.torch_cuda.device import Device
from pagoda.backends.torch_cuda.execution.step_input import CudaStepBatch
from pagoda.backends.torch_cuda.kernels.attention.invariant_attention import span_tokens
from pagoda.backends.torch_cuda.kernels.experts.moe import moe
from pagoda.backends.torch_cuda.kernels.linear.quantize_rows import QuantizedRows
from pagoda.backends.torch_cuda.kernels.linear.weight_only import FEW
from pagoda.backends.torch_cuda.kernels.pointwise import activation
from pagoda.backends.torch_cuda.memory.cache import CudaCache
from pagoda.backends.torch_cuda.memory.offload import Offload
from pagoda.backends.torch_cuda.model.adapters import CudaAdapters
from pagoda.backends.torch_cuda.model.mixers.interface import CudaMixerStep
from pagoda.backends.torch_cuda.model.mixers.registry import ops_of
from pagoda.backends.torch_cuda.model.parameters import Linear, RankParams
from pagoda.backends.torch_cuda.model.parts import (
    CudaBuildContext,
    CudaTokenEmbedding,
    NormStep,
    Rows,
    linear,
    rotary_tables,
)
from pagoda.backends.torch_cuda.parallel.tensor_parallel import SINGLE_RANK, Comm
from pagoda.backends.torch_decoder.streams import (
    LayerStep,
    Stream,
    make_first_streams,
    run_layers,
    with_streams,
)
from pagoda.common.models.mixers import Mixer
from pagoda.common.models.spec import (
    Activation,
    Ffn,
    InputBlock,
    Layer,
    LowRankResidual,
    Mlp,
    ModelSpec,
    Moe,
    Shortcut,
    SideMoe,
)


class CudaDecoder:
    """Tokens in, hidden states and logits out, without synchronizing with the host."""

    def __init__(
        self,
        spec: ModelSpec,
        params: RankParams,
        device: Device,
        max_len: int,
        comm: Comm = SINGLE_RANK,
        attention: AttentionKernels | None = None,
        offload: Offload | None = None,
        *,
        batch_invariant: bool = False,
        adapters: CudaAdapters | None = None,
    ) -> None:
        build = CudaBuildContext(
            (params if offload is None else offload.staged(params)).with_shared_blocks(spec.shared_blocks),
            device,
            comm,
            attention or own_kernels(device),
            spec.width,
            span_tokens(max_len) if batch_invariant else None,
            adapters,
        )
        tables = rotary_tables(spec.ropes, max_len, device.torch)
        self.spec = spec
        self.build = build
        self.embed = CudaTokenEmbedding(spec.embedding, build)
        self.first = make_first_streams(spec, build)
        layers = make_layers(
            spec,
            build,
            lambda mixer, prefix, numbers: ops_of(mixer).paged(mixer, tables, build, prefix, numbers),
        )
        self.layers = layers if offload is None else offload.wrap(layers)
        self.final_norm = build.norm(spec.final_norm, "final_norm")
        self.embed_out = build.linear("embed_out") if params.get("embed_out") is not None else None
        self.head = linear(
            params["embed" if spec.tied else "head"],
            params.get("head_bias"),
            device,
            batch_invariant=batch_invariant,
            dtype=torch.float32,
        )

    @property
    def embedding_dtype(self) -> torch.dtype:
        """Dtype of the embedding table, and of prompt embeddings."""
        return self.embed.table.dtype

    @torch.inference_mode()
    def hidden(self, batch: CudaStepBatch, caches: Mapping[int, CudaCache]) -> Tensor:
        """Return hidden states [T, D] after the final norm; the caches, by number, are written."""
        self._begin(batch)
        x = self.embed(batch.token_ids, batch.positions, embedded=batch.embedded)
        residual, update = run_layers(self.layers, self.first, batch.token_ids, x, batch, caches)
        return self.final_norm(update, residual)[0]

    @torch.inference_mode()
    def hidden_and_captured(
        self, batch: CudaStepBatch, caches: Mapping[int, CudaCache], captured: tuple[int, ...]
    ) -> tuple[Tensor, Tensor]:
        """Return the same, and the inputs of the `captured` layers side by side, [T, C*D]."""
        assert self.first is None, "layers have one residual stream"
        self._begin(batch)
        stream: Stream = None, self.embed(batch.token_ids, batch.positions)
        inputs: dict[int, Tensor] = {}
        for index, layer in enumerate(self.layers):
            if index in captured:
                residual, update = stream
                inputs[index] = update if residual is None else residual + update
            stream = layer(stream, batch, caches)
        residual, update = stream
        return self.final_norm(update, residual)[0], torch.cat([inputs[index] for index in captured], -1)

    def _begin(self, batch: CudaStepBatch) -> None:
        """Let the layers add the adapters of the step's tokens."""
        if self.build.adapters is not None:
            self.build.adapters.begin(batch.adapter_slots, batch_invariant=self.build.batch_invariant)

    @torch.inference_mode()
    def logits(self, hidden: Tensor, out: Tensor | None = None, adapter_slots: Tensor | None = None) -> Tensor:
        """Return float32 logits [R, V] of hidden [R, D], contiguous, on every rank; in `out` if given.

        adapter_slots int32 [R]: of the rows' adapters, as in `CudaStepBatch`; None: no row has one.
        """
        spec = self.spec
        adapters = self.build.adapters
        if self.embed_out is not None:
            hidden = self.embed_out(hidden)
        own = self.head(hidden)
        if adapters is not None and adapter_slots is not None:
            own = adapters.add_to_logits(own, hidden, adapter_slots, batch_invariant=self.build.batch_invariant)
        whole = self.build.comm.gather_last(own)[:, : spec.vocab]
        logits = whole.contiguous() if out is None else out.copy_(whole)
        if spec.logit_scale != 1.0:
            logits *= spec.logit_scale
        if spec.logit_softcap is not None:
            logits.div_(spec.logit_softcap).tanh_().mul_(spec.logit_softcap)
        return logits


def make_layers(
    spec: ModelSpec,
    build: CudaBuildContext,
    make: Callable[[Mixer, str, tuple[int, ...]], CudaMixerStep],
) -> tuple[LayerStep, ...]:
    """Return every layer, for `run_layers`. `make`: returns a mixer of its spec, parameters' prefix and caches."""
    layers = []
    for index, (layer, caches) in enumerate(zip(spec.layers, spec.cache_numbers)):
        prefix = f"layers.{index}"
        mixers = [make(mixer, f"{prefix}.mixers.{n}", own) for n, (mixer, own) in enumerate(zip(layer.mixers, caches))]
        built = CudaDecoderLayer(layer, mixers[layer.block is not None :], build, prefix)
        if layer.block is None:
            layers.append(with_streams(spec, index, built, build))
        else:
            block = CudaInputBlock(layer.block, mixers[0], build, prefix)
            layers.append(with_streams(spec, index, CudaBlockLayer(block, built), build))
    return tuple(layers)


class CudaDecoderLayer:
    """One layer: mixers, whose outputs are added, and ffn, each between its norms, on the residual stream."""

    def __init__(self, spec: Layer, mixers: Sequence[CudaMixerStep], build: CudaBuildContext, prefix: str) -> None:
        norms = spec.norms
        self.mixers = tuple(mixers)
        self.ffn = None if spec.ffn is None else make_ffn(spec.ffn, build, f"{prefix}.ffn")
        self.norm_after_add = spec.norm_after_add
        self.scale = spec.residual_scale
        self.norm_residual = spec.norm_residual
        self.parallel = spec.parallel
        self.shares_norm = norms.before_ffn is None
        self.side = None if spec.side_moe is None else make_side_moe(spec.side_moe, build, f"{prefix}.side")
        self.low_rank = None if spec.low_rank is None else make_low_rank(spec.low_rank, build, f"{prefix}.low_rank")
        self.shortcut = None if spec.shortcut is None else make_shortcut(spec.shortcut, build, f"{prefix}.shortcut")
        of_mixer, of_ffn = _only_readers(spec, build, prefix)
        self.before_mixer = build.rounding_norm(norms.before_mixer, f"{prefix}.norms.before_mixer", of_mixer)
        self.after_mixer = build.norm(norms.after_mixer, f"{prefix}.norms.after_mixer")
        self.before_ffn = build.rounding_norm(norms.before_ffn, f"{prefix}.norms.before_ffn", of_ffn)
        self.after_ffn = build.norm(norms.after_ffn, f"{prefix}.norms.after_ffn")

    def __call__(self, stream: Stream, *mixer_inputs: object) -> Stream:
        if self.shortcut is None:
            return self._run(stream, *mixer_inputs)
        residual, update = stream
        x = update if residual is None else residual + update
        residual, update = self._run((None, x), *mixer_inputs)
        return residual, update + self.shortcut(x)

    def _run(self, stream: Stream, *mixer_inputs: object) -> Stream:
        if not self.mixers:
            return stream if self.ffn is None else self._feed(stream)
        residual, update = stream
        x, residual = self.before_mixer(update, residual)
        return self._mix(x, residual, *mixer_inputs)

    def after_block(self, x: Tensor, added: Tensor, *mixer_inputs: object) -> Stream:
        """Run on a residual stream x [T, D] of which the mixers read x + added."""
        return self._mix(self.before_mixer(added, x)[0], x, *mixer_inputs)

    def _mix(self, x: Tensor, residual: Tensor, *mixer_inputs: object) -> Stream:
        """Run the mixers on normalised x [T, D], then the ffn."""
        mixed = self.mixers[0](x, *mixer_inputs)
        for mixer in self.mixers[1:]:
            mixed = mixed + mixer(x, *mixer_inputs)
        if self.parallel and self.ffn is not None:
            fed = self.ffn(x if self.shares_norm else self.before_ffn(residual, None)[0])
            return residual, self._update(self.after_mixer, mixed) + self._update(self.after_ffn, fed)
        stream = self._after(self.after_mixer, x if self.norm_residual else residual, mixed)
        if self.low_rank is not None:
            before, update = stream
            total = update if before is None else before + update
            stream = None, (total + self.low_rank(x)) * 2**-0.5
        return stream if self.ffn is None else self._feed(stream)

    def _feed(self, stream: Stream) -> Stream:
        assert self.ffn is not None, "the layer has an ffn"
        residual, update = stream
        x, residual = self.before_ffn(update, residual)
        fed = self.ffn(x)
        fed = fed if self.side is None else self.side(fed, residual)
        return self._after(self.after_ffn, x if self.norm_residual else residual, fed)

    def _after(self, norm: NormStep, residual: Tensor, update: Tensor) -> Stream:
        if self.norm_after_add:
            return None, norm(self._scaled(update), residual)[0]
        return residual, self._update(norm, update)

    def _update(self, norm: NormStep, update: Tensor) -> Tensor:
        return self._scaled(norm(update, None)[0])

    def _scaled(self, update: Tensor) -> Tensor:
        return update if self.scale == 1.0 else update * self.scale


def _only_readers(spec: Layer, build: CudaBuildContext, prefix: str) -> tuple[str | None, str | None]:
    """Return the linear map that alone reads the norm before the mixers, and that before the ffn; None: others do."""
    if spec.parallel or spec.norm_residual or spec.block or spec.low_rank or spec.shortcut or spec.side_moe:
        return None, None
    mixer = spec.mixers[0] if len(spec.mixers) == 1 else None
    of_mixer = None if mixer is None else ops_of(mixer).only_reader(mixer, build, f"{prefix}.mixers.0")
    return of_mixer, f"{prefix}.ffn.inner" if isinstance(spec.ffn, Mlp) else None


class CudaInputBlock:
    """A transformer block in front of a layer's mixers."""

    def __init__(self, spec: InputBlock, attend: CudaMixerStep, build: CudaBuildContext, prefix: str) -> None:
        name = f"{prefix}.block"
        self.attend = attend
        self.norm, self.ffn_norm = (build.norm(spec.norm, f"{name}.{norm}") for norm in ("norm", "ffn_norm"))
        inner = build.adapted(build.linear(f"{name}.ffn.inner"), f"{name}.ffn_adapter", f"{name}.ffn.inner_adapter_out")
        self.feed = _mlp(spec.ffn, build, f"{name}.ffn", build.summed(f"{name}.ffn.down"), inner)
        self.out = build.linear(f"{name}.out")

    def __call__(self, both: Tensor, *mixer_inputs: object) -> Tensor:
        """Return what is added to the mixers' input [T, D], of x and the embedding side by side [T, 2D]."""
        attended = self.attend(self.norm(both, None)[0], *mixer_inputs)
        return self.out(self.feed(self.ffn_norm(attended, None)[0]))


class CudaBlockLayer:
    """A layer with an input block, which reads the first hidden states."""

    def __init__(self, block: CudaInputBlock, layer: CudaDecoderLayer) -> None:
        self.block = block
        self.layer = layer

    def __call__(self, stream: Stream, first: Tensor, *mixer_inputs: object) -> Stream:
        residual, update = stream
        x = update if residual is None else residual + update
        added = self.block(torch.cat((x, first), -1), *mixer_inputs)
        return self.layer.after_block(x, added, *mixer_inputs)


def make_ffn(spec: Ffn, build: CudaBuildContext, prefix: str) -> Linear:
    """Return the feed-forward block as a function of x [T, D]."""
    match spec:
        case Mlp():
            return _mlp(spec, build, prefix, build.summed(f"{prefix}.down"))
        case Moe():
            return make_moe(spec, build, prefix)
        case _:
            assert_never(spec)


def _mlp(spec: Mlp, build: CudaBuildContext, prefix: str, down: Linear, inner: Linear | None = None) -> Linear:
    """`inner`: the map to gate and up where it has more than a matrix."""
    inner = inner or build.linear(f"{prefix}.inner")
    act = partial(activation.gated, clamped=spec.clamped, limit=spec.clip) if spec.gated else activation.plain
    name = spec.activation
    use_kernel = build.device.use_kernels
    if (learned := spec.learned) is not None:
        p = build.params[f"{prefix}.curvature_p"]
        n = build.params[f"{prefix}.curvature_n"]
        return lambda x: down(xielu(inner(x), learned, p, n))

    def mlp(x: Tensor) -> Tensor:
        return down(act(inner(x), name, use_kernel=use_kernel))

    if not spec.sparsity:
        plain = spec.gated and spec.clamped is None and spec.clip is None
        return _rounding_mlp(name, inner, down, mlp, build) if plain and build.rounds(f"{prefix}.down") else mlp
    cut = make_sparse(NormalDist().inv_cdf(spec.sparsity), build.comm)

    def sparse_mlp(x: Tensor) -> Tensor:
        both = inner(x)
        gate = both[:, : both.shape[1] // 2]
        gate.copy_(cut(gate))
        return down(act(both, name, use_kernel=use_kernel))

    return sparse_mlp


def _rounding_mlp(
    name: Activation,
    inner: Callable[[Any], Tensor],
    down: Callable[[Any], Tensor],
    few: Linear,
    build: CudaBuildContext,
) -> Linear:
    """Return the Mlp whose activation rounds its result if there are more than FEW rows; `few`: for no more."""
    rounded = partial(activation.gated_quantised, use_kernel=build.device.use_kernels, chip=build.device.chip)

    def mlp(x: Rows) -> Tensor:
        if isinstance(x, Tensor) and len(x) <= FEW:
            return few(x)
        both = inner(x)
        return down(QuantizedRows(*rounded(both, name), both.dtype))

    return mlp


def make_sparse(quantile: float, comm: Comm) -> Linear:
    """Return `ops.sparse` of gates [T, F], of which each rank has its columns."""
    if comm.size == 1:
        return lambda gate: sparse(gate, quantile)

    def mean(x: Tensor) -> Tensor:
        return comm.all_reduce(x.mean(-1, keepdim=True)) / comm.size

    def cut(gate: Tensor) -> Tensor:
        wide = gate.float()
        middle = mean(wide)
        deviation = mean((wide - middle).square()).sqrt()
        return torch.relu(wide - (middle + deviation * quantile)).to(gate.dtype)

    return cut


def make_moe(spec: Moe, build: CudaBuildContext, prefix: str) -> Linear:
    """Return the mixture as a function of x [T, D]. Each expert's width is sharded: tokens are not exchanged."""
    comm = build.comm
    routed = make_routed(spec, build, prefix)
    shared = None if spec.shared is None else make_shared(spec.shared, build, prefix)

    def mixture(x: Tensor) -> Tensor:
        mixed = routed(x, x)
        return comm.all_reduce(mixed if shared is None else mixed + shared(x))

    return mixture


def make_routed(
    spec: Moe, build: CudaBuildContext, prefix: str, expert_scale: Tensor | None = None
) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the rank's part of the routed experts' output, as a function of x and the router's input, both [T, D]."""
    params = build.params
    device = build.device
    router = build.linear(f"{prefix}.router")
    correction = params.get(f"{prefix}.router_correction")
    inner = params.matrix(f"{prefix}.experts.inner")
    down = params.matrix(f"{prefix}.experts.down")
    inner_bias = params.get(f"{prefix}.experts.inner_bias")
    down_bias = params.get(f"{prefix}.experts.down_bias")
    adapters = build.adapters
    names = (f"{prefix}.experts.inner", f"{prefix}.experts.down")

    def routed(x: Tensor, router_input: Tensor) -> Tensor:
        return moe(
            x,
            router(router_input).float(),
            inner,
            down,
            router=spec.router,
            expert=spec.expert,
            inner_bias=inner_bias,
            down_bias=down_bias,
            correction=correction,
            expert_scale=expert_scale,
            weighs_input=spec.weighs_input,
            adapters=None if adapters is None else adapters.of_experts(*names, batch_invariant=build.batch_invariant),
            batch_invariant=build.batch_invariant,
            use_kernel=device.use_kernels,
            chip=device.chip,
        )

    return routed


def make_side_moe(spec: SideMoe, build: CudaBuildContext, prefix: str) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the sum of the ffn and a mixture, of the ffn's output and of its input before the norm, both [T, D]."""
    names = ("ffn_norm", "input_norm", "output_norm", "router_norm")
    ffn, before, after, router = (build.norm(spec.norm, f"{prefix}.{name}") for name in names)
    routed = make_routed(spec.moe, build, f"{prefix}.moe", build.params[f"{prefix}.expert_scale"])

    def side(fed: Tensor, x: Tensor) -> Tensor:
        router_input = router(x, None)[0] * x.shape[1] ** -0.5
        mixed = build.comm.all_reduce(routed(before(x, None)[0], router_input))
        return ffn(fed, None)[0] + after(mixed, None)[0]

    return side


def make_shortcut(spec: Shortcut, build: CudaBuildContext, prefix: str) -> Linear:
    """Return the mixture around a layer as a function of the layer's input [T, D]."""
    norm = build.norm(spec.norm, f"{prefix}.norm")
    mixture = make_moe(spec.moe, build, f"{prefix}.moe")
    return lambda x: mixture(norm(x, None)[0])


def make_low_rank(spec: LowRankResidual, build: CudaBuildContext, prefix: str) -> Linear:
    """Return the learned residual as a function of the mixers' input [T, D]."""
    left = build.linear(f"{prefix}.left")
    right = build.linear(f"{prefix}.right")
    norm = build.norm(spec.norm, f"{prefix}.norm")
    return lambda h: h + norm(right(left(h)), None)[0]


def make_shared(spec: Mlp, build: CudaBuildContext, prefix: str) -> Linear:
    """Return the rank's part of the mixture's shared Mlp, times its gate, as a function of x [T, D]."""
    mlp = _mlp(spec, build, f"{prefix}.shared", build.linear(f"{prefix}.shared.down"))
    if build.params.get(f"{prefix}.shared_gate") is None:
        return mlp
    gate = build.linear(f"{prefix}.shared_gate")
    sigmoid_of = sigmoid if build.batch_invariant else torch.sigmoid
    return lambda x: sigmoid_of(gate(x)) * mlp(x)
