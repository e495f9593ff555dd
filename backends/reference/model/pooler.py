"""Hidden states -> pooled outputs: pooling, dense layers, classifier, truncation, normalisation; float32."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from pagoda.backends.reference.model.ops import activation
from pagoda.backends.torch_decoder.functions import norm
from pagoda.backends.torch_decoder.packed import PackedPrompts
from pagoda.common.engine.pooling.values import EMBEDS, OF_TOKENS, PoolingRules
from pagoda.common.models import spec as models

Step = Callable[[Tensor], Tensor]

PoolPrompts = Callable[[PackedPrompts, Sequence[int], Sequence[PoolingRules]], tuple[Tensor, ...]]
"""(prompts, bounds of their tokens, what each asks for) -> float32 [n] or [length, n] for each prompt."""


class ReferencePooler:
    """A model's pooler. `params`: by canonical name, float32."""

    def __init__(self, spec: models.Pooler, params: Mapping[str, Tensor]) -> None:
        self.spec = spec
        self.dense = tuple(_dense(dense, f"pooler.dense.{index}", params) for index, dense in enumerate(spec.dense))
        self.weight = params.get("pooler.classifier")
        self.bias = params.get("pooler.classifier_bias")
        self.heads = {
            head.task: (params[f"pooler.{head.task}"], params[f"pooler.{head.task}_bias"]) for head in spec.token_heads
        }

    def __call__(self, hidden: Tensor, bounds: Sequence[int], rules: Sequence[PoolingRules]) -> tuple[Tensor, ...]:
        """Hidden [T, D], tokens bounds[s] to bounds[s+1] of prompt s -> [n] or [length, n] for each prompt."""
        pooled = [self._pool(hidden[begin:end], rule) for (begin, end), rule in zip(pairwise(bounds), rules)]
        if self.heads:
            outputs = [self._project(part, rule) for part, rule in zip(pooled, rules)]
        else:
            outputs = list(self._layers(torch.cat(pooled)).split([len(part) for part in pooled]))
        return tuple(self._finish(output, rule) for output, rule in zip(outputs, rules))

    def _layers(self, rows: Tensor) -> Tensor:
        """Return the dense layers and the classifier of rows [R, D]."""
        for dense in self.dense:
            rows = dense(rows)
        return rows if self.weight is None else F.linear(rows, self.weight, self.bias)

    def _project(self, rows: Tensor, rules: PoolingRules) -> Tensor:
        """Return the head of a per-token task, or the layers of others, of rows [R, D]."""
        return F.linear(rows, *self.heads[rules.task]) if rules.task in self.heads else self._layers(rows)

    def _pool(self, hidden: Tensor, rules: PoolingRules) -> Tensor:
        """One prompt's hidden states [length, D] -> [1, D], or [length, D] for token tasks."""
        kind = "all" if rules.task in OF_TOKENS else self.spec.kind
        match kind:
            case "first":
                return hidden[:1].float()
            case "last":
                return hidden[-1:].float()
            case "mean":
                return hidden.float().mean(0, keepdim=True)
            case "all":
                return hidden.float()

    def _finish(self, answer: Tensor, rules: PoolingRules) -> Tensor:
        """[1 or length, n] -> [n] or [length, n]."""
        if rules.task in EMBEDS:
            answer = answer[:, : rules.dimensions]
            answer = F.normalize(answer, dim=-1) if rules.use_activation else answer
        elif rules.use_activation:
            answer = _activated(answer, self.spec.activation(rules.task))
        return answer if rules.task in OF_TOKENS else answer[0]


def _dense(spec: models.Dense, name: str, params: Mapping[str, Tensor]) -> Step:
    weight = params[name]
    bias = params.get(f"{name}_bias")
    act = activation(spec.activation) if spec.activation is not None else None

    def dense(x: Tensor) -> Tensor:
        x = F.linear(x, weight, bias)
        x = x if act is None else act(x)
        return x if spec.norm is None else norm(x, spec.norm, params[f"{name}.norm"], params.get(f"{name}.norm_bias"))

    return dense


def _activated(answer: Tensor, name: str | None) -> Tensor:
    match name:
        case "sigmoid":
            return answer.sigmoid()
        case "softmax":
            return answer.softmax(-1)
        case "relu":
            return answer.relu()
        case _:
            return answer
