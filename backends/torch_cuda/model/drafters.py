"""Drafter models on device tensors: hidden states of the target and tokens -> the next guesses, greedily.

As in the target's decoder nothing synchronizes with the host. `first` runs on all tokens of a step, so that the caches
stay complete; `guess` returns one token per sequence, and is called once for each guess.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from pagoda.backends.reference.model.ops import to_torch
from pagoda.backends.torch_cuda.attention_backends.protocol import AttentionKernels
from pagoda.backends.torch_cuda.device import Device
from pagoda.backends.torch_cuda.execution.step_input import CudaStepBatch
from pagoda.backends.torch_cuda.memory.cache import CudaCache
from pagoda.backends.torch_cuda.model.decoder import CudaDecoder
from pagoda.backends.torch_cuda.model.feed_forward import block_makers
from pagoda.backends.torch_cuda.model.mixers.registry import ops_of
from pagoda.backends.torch_cuda.model.parameters import Empty, RankParams
from pagoda.backends.torch_cuda.model.parts import CudaBuildContext, linear, rotary_tables
from pagoda.backends.torch_cuda.parallel.tensor_parallel import SINGLE_RANK, RankShard
from pagoda.backends.torch_cuda.weights.load import Loader
from pagoda.backends.torch_decoder.decoder import DecoderStack, TokenEmbedding
from pagoda.backends.torch_decoder.ops import Linear
from pagoda.common.backend import Weight
from pagoda.common.models.drafters import (
    AttendedInputs,
    DrafterSpec,
    FeatureDrafter,
    HeadsDrafter,
    JoinedInputs,
    LanguageDrafter,
    StagesDrafter,
    drafter_params,
)
from pagoda.common.models.shapes import checked, lacking
from pagoda.common.weights.quantization.tensors import QuantizedTensor

Caches = Mapping[int, CudaCache]


@dataclass(frozen=True, slots=True)
class DraftTokens:
    """The tokens that a drafter reads in one pass, and what it reads beside them."""

    batch: CudaStepBatch
    features: Tensor | None  # [T, W] of the target in the first pass, else the drafter's own of the pass before


class CudaDraftDecoder(Protocol):
    """A loaded drafter."""

    num_bytes: int  # of its own weights
    reads_next: bool  # at each position the token after it, with a hidden state; else that token alone

    def first(self, tokens: DraftTokens, caches: Caches) -> Tensor | None:
        """Run on all tokens of a step. Returns its own features [T, D], None if the first guess needs another pass."""
        ...

    def guess(self, number: int, last: Tensor, tokens: DraftTokens, caches: Caches) -> tuple[Tensor, Tensor | None]:
        """Return the guesses `number`, from 0, int64 [S], and the features [S, D] for the next ones.

        `last` [S, D]: features of each sequence's last token. `tokens`: one per sequence, the guess before.
        """
        ...


@dataclass(frozen=True, slots=True)
class DrafterBuild:
    """What a drafter is loaded with."""

    target: CudaDecoder | None  # whose embedding and head it may share
    dtype: torch.dtype
    device: Device
    attention: AttentionKernels
    max_len: int
    empty: Empty
    batch_invariant: bool = False

    def load(self, spec: DrafterSpec, weights: Iterable[Weight]) -> CudaDraftDecoder:
        """Return the drafter of these weights. Raises WeightError."""
        match spec:
            case LanguageDrafter():
                return CudaLanguageDrafter(spec, weights, self)
            case FeatureDrafter():
                return CudaFeatureDrafter(spec, weights, self)
            case HeadsDrafter():
                return CudaHeadsDrafter(spec, weights, self)
            case StagesDrafter():
                return CudaStagesDrafter(spec, weights, self)


class CudaLanguageDrafter:
    """A language model that reads tokens alone."""

    reads_next = False

    def __init__(self, spec: LanguageDrafter, weights: Iterable[Weight], build: DrafterBuild) -> None:
        loader = Loader(spec.model, RankShard(), build.dtype, build.empty)
        loader.fill(weights)
        self.num_bytes = loader.params.num_bytes
        self.decoder = CudaDecoder(
            spec.model,
            loader.params,
            build.device,
            build.max_len,
            attention=build.attention,
            batch_invariant=build.batch_invariant,
        )

    def first(self, tokens: DraftTokens, caches: Caches) -> Tensor | None:
        self.decoder.hidden(tokens.batch, caches)
        return None

    def guess(self, number: int, last: Tensor, tokens: DraftTokens, caches: Caches) -> tuple[Tensor, Tensor | None]:
        return self.decoder.logits(self.decoder.hidden(tokens.batch, caches)).argmax(-1), None


class CudaFeatureDrafter:
    """Layers over embeddings and hidden states."""

    reads_next = True

    def __init__(self, spec: FeatureDrafter, weights: Iterable[Weight], build: DrafterBuild) -> None:
        assert build.target is not None, "the target is a decoder"
        model = spec.model
        target = build.target
        inputs = spec.inputs
        attention = inputs.attention if isinstance(inputs, AttendedInputs) else None
        loader = Loader(
            model, RankShard(), build.dtype, build.empty, parameters=drafter_params(spec), attention=attention
        )
        loader.fill(weights)
        own = loader.params.by_name
        self.spec = spec
        self.num_bytes = loader.params.num_bytes
        shared = (
            {}
            if spec.own_embedding
            else {name: value for name, value in target.build.params.by_name.items() if name.startswith(_EMBEDDING)}
        )
        context = CudaBuildContext(
            RankParams({**shared, **own}), build.device, SINGLE_RANK, build.attention, model.width, target.build.span
        )
        tables = rotary_tables(spec.ropes, build.max_len, build.device.torch)
        offset = len(spec.caches) - len(model.caches)
        makers = block_makers(
            context,
            lambda mixer, prefix, numbers: ops_of(mixer).paged(
                mixer, tables, context, prefix, tuple(offset + number for number in numbers)
            ),
        )
        self.embed = TokenEmbedding(model.embedding, context)
        self.stack = DecoderStack(model, context, makers)
        self.attend = None
        if attention is not None:
            self.attend = ops_of(attention).paged(attention, tables, context, "inputs.attention", (0,))
        self.embed_norm = context.norm(inputs.embed_norm, "inputs.embed_norm")
        self.hidden_norm = context.norm(inputs.hidden_norm, "inputs.hidden_norm")
        self.project = context.linear("inputs.project")
        self.head = self._head(spec, own, build)
        self.embed_out = target.embed_out
        ids = own.get("target_ids")
        self.target_ids = None
        if isinstance(ids, Tensor):
            self.target_ids = torch.arange(len(ids), device=ids.device) + ids.long()

    def _head(self, spec: FeatureDrafter, own: Mapping[str, object], build: DrafterBuild) -> Linear:
        assert build.target is not None
        if not spec.own_head:
            return build.target.head
        head = own["head"]
        assert isinstance(head, Tensor)
        return linear(head, None, build.device, batch_invariant=build.batch_invariant, dtype=torch.float32)

    def first(self, tokens: DraftTokens, caches: Caches) -> Tensor | None:
        assert tokens.features is not None
        features = self.project(tokens.features) if self.attend is not None else tokens.features
        return self._run(tokens.batch, features, caches)

    def guess(self, number: int, last: Tensor, tokens: DraftTokens, caches: Caches) -> tuple[Tensor, Tensor | None]:
        if number:
            assert tokens.features is not None
            last = self._run(tokens.batch, tokens.features, caches)
        normed = self.stack.final_norm(last, None)[0]
        vocab = self.spec.head_vocab or self.spec.model.vocab
        scores = self.head(normed if self.embed_out is None else self.embed_out(normed))[:, :vocab]
        token_ids = scores.argmax(-1)
        if self.target_ids is not None:
            token_ids = self.target_ids[token_ids]
        return token_ids, normed if self.spec.chains_normed else last

    def _run(self, batch: CudaStepBatch, features: Tensor, caches: Caches) -> Tensor:
        return self.stack.without_norm(self._input(batch, features, caches), batch, caches)

    def _input(self, batch: CudaStepBatch, features: Tensor, caches: Caches) -> Tensor:
        """Return what the first layer reads, [T, D]."""
        inputs = self.spec.inputs
        embeds = self.embed(batch.token_ids, batch.positions + 1)
        if isinstance(inputs, JoinedInputs):
            if inputs.blank_first:
                embeds = embeds * (batch.positions > 0)[:, None]
            parts = [self.embed_norm(embeds, None)[0], self.hidden_norm(features, None)[0]]
            return self.project(torch.cat(parts[::-1] if inputs.hidden_first else parts, -1))
        assert self.attend is not None
        normed = self.hidden_norm(features, None)[0]
        both = torch.cat([self.embed_norm(embeds, None)[0], normed], -1)
        return (normed if inputs.norms_residual else features) + self.attend(both, batch, caches)


_EMBEDDING = "embed"
"""First part of the names of the embedding's parameters: the table, its norm and projections."""


class CudaHeadsDrafter:
    """A head per guess."""

    reads_next = True

    def __init__(self, spec: HeadsDrafter, weights: Iterable[Weight], build: DrafterBuild) -> None:
        self.params = _plain_params(spec, weights, build)
        self.spec, self.num_bytes = spec, sum(tensor.nbytes for tensor in self.params.values())

    def first(self, tokens: DraftTokens, caches: Caches) -> Tensor | None:
        return tokens.features

    def guess(self, number: int, last: Tensor, tokens: DraftTokens, caches: Caches) -> tuple[Tensor, Tensor | None]:
        x = last if tokens.features is None else tokens.features
        params = self.params
        features = x
        for block in range(self.spec.blocks):
            name = f"heads.{number}.blocks.{block}"
            x = x + F.silu(F.linear(x, params[name], params.get(f"{name}_bias")))
        return F.linear(x, params[f"heads.{number}.head"]).argmax(-1), features


class CudaStagesDrafter:
    """A stage per guess over a state and the token before."""

    reads_next = True

    def __init__(self, spec: StagesDrafter, weights: Iterable[Weight], build: DrafterBuild) -> None:
        self.params = _plain_params(spec, weights, build)
        self.spec, self.num_bytes = spec, sum(tensor.nbytes for tensor in self.params.values())

    def first(self, tokens: DraftTokens, caches: Caches) -> Tensor | None:
        return tokens.features

    def guess(self, number: int, last: Tensor, tokens: DraftTokens, caches: Caches) -> tuple[Tensor, Tensor | None]:
        spec = self.spec
        params = self.params
        state = last if tokens.features is None else tokens.features
        if not number and spec.scales_input:
            state = self._scaled(state) * 0.5**0.5
        own = f"stages.{0 if spec.tied else number}"
        project = params[f"stages.{min(number, 1) if spec.tied else number}.project"]
        embeds = F.embedding(tokens.batch.token_ids, params[f"{own}.embed"])
        mixed = self._scaled(F.linear(state, project) + spec.embedding_weight * embeds)
        state = F.gelu(mixed * params[f"{own}.norm"] + params[f"{own}.norm_bias"])
        return F.linear(state, params[f"{own}.head"]).argmax(-1), state

    def _scaled(self, x: Tensor) -> Tensor:
        """Return x divided by its root mean square."""
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.spec.eps)


def _plain_params(spec: DrafterSpec, weights: Iterable[Weight], build: DrafterBuild) -> dict[str, Tensor]:
    """Return every parameter on the device. Raises WeightError."""
    expected = drafter_params(spec)
    params = {}
    for name, value in checked(weights, expected):
        tensor = to_torch(value.dequantize() if isinstance(value, QuantizedTensor) else value)
        params[name] = build.empty(tuple(tensor.shape), build.dtype).copy_(tensor)
    if expected:
        raise lacking(expected)
    return params
