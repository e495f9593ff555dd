"""Drafter models on device tensors: hidden states of the target and tokens -> the next guesses, greedily.

As in the target's decoder nothing synchronizes with the host. `first` runs on all tokens of a step, so that the caches
stay complete; `guess` returns one token per sequence, and is called once for each guess.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
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
from pagoda.backends.torch_cuda.model.feed_forward import paged_makers
from pagoda.backends.torch_cuda.model.parameters import Empty, RankParams
from pagoda.backends.torch_cuda.model.parts import CudaBuildContext, linear, rotary_tables
from pagoda.backends.torch_cuda.parallel.tensor_parallel import SINGLE_RANK, RankShard
from pagoda.backends.torch_cuda.weights.load import Loader
from pagoda.backends.torch_decoder.drafters import FeatureLayers, HeadsGuesser, StagesGuesser
from pagoda.backends.torch_decoder.ops import Linear
from pagoda.common.backend import Weight
from pagoda.common.models.drafters import (
    AttendedInputs,
    DrafterSpec,
    FeatureDrafter,
    HeadsDrafter,
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
        ids = own.get("target_ids")
        self.layers = FeatureLayers(
            spec,
            context,
            paged_makers(context, tables),
            self._head(spec, own, build),
            target.embed_out,
            ids if isinstance(ids, Tensor) else None,
        )

    def _head(self, spec: FeatureDrafter, own: Mapping[str, object], build: DrafterBuild) -> Linear:
        assert build.target is not None
        if not spec.own_head:
            return build.target.head
        head = own["head"]
        assert isinstance(head, Tensor)
        return linear(head, None, build.device, batch_invariant=build.batch_invariant, dtype=torch.float32)

    def first(self, tokens: DraftTokens, caches: Caches) -> Tensor | None:
        assert tokens.features is not None
        return self._run(tokens.batch, self.layers.read(tokens.features), caches)

    def guess(self, number: int, last: Tensor, tokens: DraftTokens, caches: Caches) -> tuple[Tensor, Tensor | None]:
        if number:
            assert tokens.features is not None
            last = self._run(tokens.batch, tokens.features, caches)
        return self.layers.guess(last)

    def _run(self, batch: CudaStepBatch, features: Tensor, caches: Caches) -> Tensor:
        return self.layers.run(batch.token_ids, batch.positions, features, batch, caches)


_EMBEDDING = "embed"
"""First part of the names of the embedding's parameters: the table, its norm and projections."""


class CudaHeadsDrafter:
    """A head per guess."""

    reads_next = True

    def __init__(self, spec: HeadsDrafter, weights: Iterable[Weight], build: DrafterBuild) -> None:
        params = _plain_params(spec, weights, build)
        self.num_bytes = sum(tensor.nbytes for tensor in params.values())
        self.heads = HeadsGuesser(spec, partial(_linear, params), partial(_linear, params))

    def first(self, tokens: DraftTokens, caches: Caches) -> Tensor | None:
        return tokens.features

    def guess(self, number: int, last: Tensor, tokens: DraftTokens, caches: Caches) -> tuple[Tensor, Tensor | None]:
        hidden = last if tokens.features is None else tokens.features
        return self.heads.guess(number, hidden), hidden


class CudaStagesDrafter:
    """A stage per guess over a state and the token before."""

    reads_next = True

    def __init__(self, spec: StagesDrafter, weights: Iterable[Weight], build: DrafterBuild) -> None:
        params = _plain_params(spec, weights, build)
        self.num_bytes = sum(tensor.nbytes for tensor in params.values())
        self.stages = StagesGuesser.of(spec, partial(_linear, params), partial(_linear, params), params.__getitem__)

    def first(self, tokens: DraftTokens, caches: Caches) -> Tensor | None:
        return tokens.features

    def guess(self, number: int, last: Tensor, tokens: DraftTokens, caches: Caches) -> tuple[Tensor, Tensor | None]:
        state = last if tokens.features is None else tokens.features
        return self.stages.guess(number, state if number else self.stages.first_state(state), tokens.batch.token_ids)


def _linear(params: Mapping[str, Tensor], name: str) -> Linear:
    return partial(F.linear, weight=params[name], bias=params.get(f"{name}_bias"))


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
