"""The drafters on a rank: its part of their parameters, and the decoder that the torch drafters run on.

As in the target's decoder nothing synchronizes with the host.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from pagoda.backends.torch_cuda.attention_backends.protocol import AttentionKernels
from pagoda.backends.torch_cuda.device import Device
from pagoda.backends.torch_cuda.execution.step_input import CudaStepBatch
from pagoda.backends.torch_cuda.memory.cache import CudaCache
from pagoda.backends.torch_cuda.model.decoder import CudaDecoder
from pagoda.backends.torch_cuda.model.feed_forward import paged_makers
from pagoda.backends.torch_cuda.model.parameters import Empty, RankParams
from pagoda.backends.torch_cuda.model.parts import CudaBuildContext, linear, lookup, most_likely, rotary_tables
from pagoda.backends.torch_cuda.parallel.tensor_parallel import Comm, RankShard
from pagoda.backends.torch_cuda.weights.load import Loader
from pagoda.backends.torch_decoder.drafters import (
    DraftModel,
    DraftTokens,
    FeatureModel,
    HeadsModel,
    LanguageModel,
    StagesModel,
    TokensOf,
)
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
from pagoda.common.models.spec import ModelSpec

CudaDraftBatch = tuple[CudaStepBatch, Mapping[int, CudaCache]]
"""What the mixers of a drafter read: the batch, and its caches by number."""

CudaDraftModel = DraftModel[CudaDraftBatch]

_EMBEDDING = "embed"
"""First part of the names of the embedding's parameters: the table, its norm and projections."""


@dataclass(frozen=True, slots=True)
class DrafterBuild:
    """What a drafter is loaded with."""

    target: CudaDecoder | None  # whose embedding and head it may share
    dtype: torch.dtype
    device: Device
    comm: Comm  # of the ranks that share the drafter as they share the target
    attention: AttentionKernels
    max_len: int
    empty: Empty
    batch_invariant: bool = False

    def load(self, spec: DrafterSpec, weights: Iterable[Weight]) -> CudaDraftModel:
        """Return the drafter of these weights. Raises WeightError."""
        match spec:
            case LanguageDrafter():
                return self._language(spec, weights)
            case FeatureDrafter():
                return self._features(spec, weights)
        loaded = self._load(spec, weights, None)
        params = loaded.params

        def plain(name: str) -> Linear:
            return partial(F.linear, weight=params[name], bias=params.get(f"{name}_bias"))

        def tokens_of(name: str) -> TokensOf:
            return self._tokens_of(self._head(params[name]), spec.vocab)

        match spec:
            case HeadsDrafter():
                return HeadsModel(spec, plain, tokens_of, params.num_bytes)
            case StagesDrafter():
                return StagesModel(
                    spec,
                    linear=plain,
                    most_likely=tokens_of,
                    rows=lambda name: partial(lookup, params[name], comm=self.comm),
                    tensor=params.__getitem__,
                    num_bytes=params.num_bytes,
                )

    def _load(self, spec: DrafterSpec, weights: Iterable[Weight], model: ModelSpec | None) -> Loader:
        """Return the filled parameters of this rank. `model`: the drafter's layers, if it has any."""
        attention = None
        if isinstance(spec, FeatureDrafter) and isinstance(spec.inputs, AttendedInputs):
            attention = spec.inputs.attention
        shard = RankShard(self.comm.rank, self.comm.size)
        loader = Loader(model, shard, self.dtype, self.empty, parameters=drafter_params(spec), attention=attention)
        loader.fill(weights)
        return loader

    def _head(self, weight: Tensor) -> Linear:
        """Return the head of a rank's rows [V / ranks, D], with results in float32."""
        return linear(weight, None, self.device, batch_invariant=self.batch_invariant, dtype=torch.float32)

    def _tokens_of(self, head: Linear, vocab: int) -> TokensOf:
        """Return what gives the most likely of `vocab` tokens of a head that is sharded over the ranks."""
        comm = self.comm
        return lambda hidden: most_likely(head(hidden), vocab, comm)

    def _language(self, spec: LanguageDrafter, weights: Iterable[Weight]) -> CudaDraftModel:
        params = self._load(spec, weights, spec.model).params
        decoder = CudaDecoder(
            spec.model,
            params,
            self.device,
            self.max_len,
            self.comm,
            self.attention,
            batch_invariant=self.batch_invariant,
        )

        def hidden(tokens: DraftTokens[CudaDraftBatch]) -> Tensor:
            batch, caches = tokens.batch
            return decoder.hidden(batch, caches)

        def scores(hidden: Tensor) -> Tensor:
            return decoder.head(decoder.head_input(hidden))  # scale and cap of logits keep their order

        return LanguageModel(hidden, self._tokens_of(scores, spec.model.vocab), params.num_bytes)

    def _features(self, spec: FeatureDrafter, weights: Iterable[Weight]) -> CudaDraftModel:
        target = self.target
        assert target is not None, "the target is a decoder"
        model = spec.model
        own = self._load(spec, weights, model).params
        named = dict(own.by_name)
        if not spec.own_embedding:
            given = target.build.params.by_name
            named = {name: value for name, value in given.items() if name.startswith(_EMBEDDING)} | named
        params = RankParams(named)
        context = CudaBuildContext(params, self.device, self.comm, self.attention, model.width, target.build.span)
        head = self._head(params["head"]) if spec.own_head else target.head
        return FeatureModel(
            spec,
            context,
            paged_makers(context, rotary_tables(spec.ropes, self.max_len, self.device.torch)),
            mixer_inputs=lambda tokens: tokens.batch,
            most_likely=self._tokens_of(head, spec.head_vocab or model.vocab),
            embed_out=target.embed_out,
            target_ids=params.get("target_ids"),
            num_bytes=own.num_bytes,
        )
