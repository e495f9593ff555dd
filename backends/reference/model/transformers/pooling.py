"""Prompts -> pooled outputs by a model that transformers computes (--model-impl transformers), on any torch device."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from pagoda.backends.fallback.attention import PAGED, install
from pagoda.backends.fallback.describe import first_position
from pagoda.backends.fallback.model import PagedCalls, WidenedHead, load_pretrained
from pagoda.backends.fallback.rope import fix_frequencies
from pagoda.backends.reference.model.pooler import ReferencePooler
from pagoda.backends.torch_decoder.mixers.packed_attention import attend
from pagoda.backends.torch_decoder.packed import PackedPrompts, SameLength
from pagoda.common.engine.pooling.values import PoolingRules
from pagoda.common.errors import ModelError
from pagoda.common.models.registry import architecture_of
from pagoda.common.models.transformers_spec import TransformersSpec
from pagoda.common.weights.sentence_modules import DENSE_TENSORS

logger = logging.getLogger(__name__)

_PROBE_LENGTH: Final = 8
_TOLERANCE: Final = 0.02
"""Of the largest magnitude, for rounding to 16 bits."""

_NO_PADDING: Final = -1
"""An id that no token has."""


class TransformersPooling:
    """One model on one device. Layers and head are transformers' code."""

    def __init__(
        self,
        spec: TransformersSpec,
        weights: Iterable[tuple[str, Tensor]],
        dtype: torch.dtype,
        max_len: int,
        device: torch.device,
    ) -> None:
        """`weights`: under the checkpoint's names, in any dtype. `max_len`: the longest prompt.

        Raise WeightError, or ModelError if a prompt fails.
        """
        model: Any = load_pretrained(spec, dict(weights), dtype)
        fix_frequencies(model, max_len)
        for config in (model.config, model.config.get_text_config()):
            config.pad_token_id = _NO_PADDING  # prompts are not padded, and a head is not to look for it
            config.use_cache = False
        self.spec = spec
        self._max_len = max_len
        self._model = model.to(device).eval().requires_grad_(False)
        self._base: Any = model.base_model
        self._head = WidenedHead(model)
        types = "token_type_ids" in inspect.signature(model.forward).parameters
        self._has_types = types and getattr(model.config, "type_vocab_size", 0) > 1
        self._first = first_position(model)
        self._calls = PagedCalls(spec)
        self.num_bytes = sum(part.nbytes for part in (*model.parameters(), *model.buffers()))
        self.concatenates = self._choose(device)

    def _choose(self, device: torch.device) -> bool:
        """Return whether two prompts concatenated have the outputs of each alone. Raise ModelError if one fails."""
        length = min(_PROBE_LENGTH, self._max_len)
        ids = (torch.arange(2 * length - 1, device=device) + self.spec.vocab // 2) % self.spec.vocab  # no padding
        parts = (slice(0, length), slice(length, 2 * length - 1)) if length > 1 else (slice(0, 1),)
        groups = tuple(SameLength(part.stop - part.start, part) for part in parts)
        positions = torch.cat([torch.arange(group.length, device=device) for group in groups])
        starts = torch.tensor([0, *(part.stop for part in parts)], dtype=torch.int32, device=device)
        prompts = PackedPrompts(ids, positions, None, groups, starts)
        try:
            alone = self._by_length(prompts)
        except (torch.OutOfMemoryError, MemoryError):
            raise
        except Exception as error:  # of transformers' code, or of the model's own
            words = " ".join(str(error).split()) or type(error).__name__
            name = architecture_of(self.spec.source.config)
            raise ModelError(f"{name}: transformers cannot run it: {words}") from error
        if not self.spec.attention:
            return False
        own = self._model.config._attn_implementation
        try:
            self._model.set_attn_implementation(PAGED)
            install(self._model, self._calls)
            together = self._concatenated(prompts)
            if float((together - alone).abs().max()) <= _TOLERANCE * float(alone.abs().max()):
                return True
        except Exception:  # as above; it runs as before
            pass
        self._model.set_attn_implementation(own)
        self._head.given = None
        logger.warning("prompts run one length at a time: concatenated they have other outputs")
        return False

    def __call__(self, prompts: PackedPrompts) -> Tensor:
        """Return hidden states or logits of every token [T, n], or logits of every prompt [S, labels], float32."""
        return self._concatenated(prompts) if self.concatenates else self._by_length(prompts)

    def _by_length(self, prompts: PackedPrompts) -> Tensor:
        """Compute prompts of one length at a time, by transformers' code alone."""
        types = prompts.token_types
        return self._groups(prompts, lambda ids, rows: self._outputs(ids, None if types is None else types[rows]))

    def _concatenated(self, prompts: PackedPrompts) -> Tensor:
        """Compute the layers of all prompts at once, with attention within each."""

        def attended(number: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, _: object) -> Tensor:
            return attend(q, k, v, prompts, self.spec.attention[number], sinks=sinks).unflatten(1, (q.shape[1], -1))

        types = None if prompts.token_types is None else prompts.token_types[None]
        positions = (prompts.positions + self._first)[None]
        self._head.given = None
        with self._calls.by(attended):
            output = self._base(input_ids=prompts.token_ids[None], position_ids=positions, **self._types(types))
        hidden: Tensor = output[0][0].float()
        if self._base is self._model:
            return hidden

        def head(ids: Tensor, rows: Tensor) -> Tensor:
            self._head.given = output[0][0][rows]
            return self._outputs(ids, None)

        return self._groups(prompts, head)

    def _groups(self, prompts: PackedPrompts, run: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """Call `run` with ids and indices [n, L] of prompts of one length; return its rows in the prompts' order."""
        ids = prompts.token_ids
        order = []
        parts = []
        for group in prompts.groups:
            rows = torch.arange(len(ids), device=ids.device)[group.rows].view(-1, group.length)
            part = run(ids[rows], rows)
            parts.append(part if self.spec.per_prompt else part.flatten(0, 1))
            order.append(rows[:, 0] if self.spec.per_prompt else rows.flatten())
        return torch.cat(parts)[torch.cat(order).argsort()]

    def _outputs(self, token_ids: Tensor, token_types: Tensor | None) -> Tensor:
        """Return the model's outputs, float32, of n prompts of L tokens; token_ids and token_types int64 [n, L]."""
        output: Tensor = self._model(input_ids=token_ids, **self._types(token_types))[0]
        return output.float()

    def _types(self, token_types: Tensor | None) -> dict[str, Tensor]:
        """Return the token types as an argument; those of a model that has none are without effect."""
        return {"token_type_ids": token_types} if self._has_types and token_types is not None else {}


class TransformersPooler:
    """The model and the pooling of its outputs. No prompt is padded."""

    def __init__(
        self,
        spec: TransformersSpec,
        weights: Iterable[tuple[str, Tensor]],
        dtype: torch.dtype,
        max_len: int,
        device: torch.device,
    ) -> None:
        """`max_len`: the longest prompt. Raise WeightError or ModelError, see TransformersPooling."""
        assert spec.pooler is not None, "the model pools"
        self.spec = spec
        tensors = dict(weights)
        dense = {name: tensors.pop(name) for name in list(tensors) if name.startswith(DENSE_TENSORS)}
        self.model = TransformersPooling(spec, tensors.items(), dtype, max_len, device)
        params = {_parameter(name): tensor.float().to(device) for name, tensor in dense.items()}
        self.pooler = ReferencePooler(spec.pooler, params)
        self.num_bytes = self.model.num_bytes

    def __call__(
        self, prompts: PackedPrompts, bounds: Sequence[int], rules: Sequence[PoolingRules]
    ) -> tuple[Tensor, ...]:
        """Tokens bounds[s] to bounds[s+1] are prompt s -> float32 [n] or [length, n] for each prompt."""
        return self.pooler(self.model(prompts), range(len(rules) + 1) if self.spec.per_prompt else bounds, rules)


def _parameter(name: str) -> str:
    """Return the pooler's name of sentence_modules.0.linear.weight etc."""
    _, index, _, kind = name.split(".")
    return f"pooler.dense.{index}{'_bias' if kind == 'bias' else ''}"
