"""The drafters on a device: their parameters, and the decoder that the torch drafters run on.

As in the target's decoder nothing synchronizes with the host.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial

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
from pagoda.backends.torch_decoder.drafters import (
    DraftModel,
    DraftTokens,
    FeatureModel,
    HeadsModel,
    LanguageModel,
    StagesModel,
    load_params,
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
        params = load_params(
            spec,
            weights,
            lambda array, exact: self.empty(array.shape, self.dtype).copy_(to_torch(array)),
        )
        num_bytes = sum(tensor.nbytes for tensor in params.values())

        def plain(name: str) -> Linear:
            return partial(F.linear, weight=params[name], bias=params.get(f"{name}_bias"))

        match spec:
            case HeadsDrafter():
                return HeadsModel(spec, plain, plain, num_bytes)
            case StagesDrafter():
                return StagesModel(spec, plain, plain, params.__getitem__, num_bytes)

    def _language(self, spec: LanguageDrafter, weights: Iterable[Weight]) -> CudaDraftModel:
        loader = Loader(spec.model, RankShard(), self.dtype, self.empty)
        loader.fill(weights)
        decoder = CudaDecoder(
            spec.model,
            loader.params,
            self.device,
            self.max_len,
            attention=self.attention,
            batch_invariant=self.batch_invariant,
        )

        def hidden(tokens: DraftTokens[CudaDraftBatch]) -> Tensor:
            batch, caches = tokens.batch
            return decoder.hidden(batch, caches)

        return LanguageModel(hidden, decoder.logits, loader.params.num_bytes)

    def _features(self, spec: FeatureDrafter, weights: Iterable[Weight]) -> CudaDraftModel:
        target = self.target
        assert target is not None, "the target is a decoder"
        model = spec.model
        attention = spec.inputs.attention if isinstance(spec.inputs, AttendedInputs) else None
        loader = Loader(
            model, RankShard(), self.dtype, self.empty, parameters=drafter_params(spec), attention=attention
        )
        loader.fill(weights)
        named = dict(loader.params.by_name)
        if not spec.own_embedding:
            given = target.build.params.by_name
            named = {name: value for name, value in given.items() if name.startswith(_EMBEDDING)} | named
        params = RankParams(named)
        context = CudaBuildContext(params, self.device, SINGLE_RANK, self.attention, model.width, target.build.span)
        head = target.head
        if spec.own_head:
            head = linear(params["head"], None, self.device, batch_invariant=self.batch_invariant, dtype=torch.float32)
        return FeatureModel(
            spec,
            context,
            paged_makers(context, rotary_tables(spec.ropes, self.max_len, self.device.torch)),
            mixer_inputs=lambda tokens: tokens.batch,
            head=head,
            embed_out=target.embed_out,
            target_ids=params.get("target_ids"),
            num_bytes=loader.params.num_bytes,
        )
