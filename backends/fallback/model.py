"""A model of transformers with its weights: hidden states and logits of one step, attention by the backend."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable
from typing import Any, Final, Self

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast, BaseModelOutputWithPooling

from pagoda.backends.fallback.attention import BIAS, PAGED, SINKS, RelativeBias, install
from pagoda.backends.fallback.classes import make_config, model_class
from pagoda.backends.fallback.rope import fix_frequencies
from pagoda.backends.fallback.tracing import base_of
from pagoda.common.errors import ModelError, WeightError
from pagoda.common.models.transformers_spec import TransformersSpec

logger = logging.getLogger(__name__)

Attend = Callable[[int, Tensor, Tensor, Tensor, Tensor | None, RelativeBias | None], Tensor]
"""(number of the call, q [T, N, H], k [T, K, H], v [T, K, H], sinks [N] and bias if any) -> [T, N, H].

k and v are written to the cache.
"""

ProbeRows = tuple[tuple[int, int], ...]
"""(token, position) of each row of a batch."""

_UNUSED: Final = "pooler."
"""Prefix of what some base models apply to their hidden states for classifiers."""
_PROBLEMS: Final = ("missing", "unexpected", "mismatched")
_PROBED: Final = (5, 3)
_FIRST_ROWS: Final = (_PROBED, (9, 1), (2, 7))
_OTHER_ROWS: Final = ((11, 0), (2, 4), _PROBED)

_PROBE_TOLERANCE: Final = 0.02
"""Of the largest magnitude: in half precision a row of a product may be rounded differently at another place."""


class TransformersModel:
    """One model on one device. Calls come in this order: create, place, hidden and logits."""

    def __init__(self, spec: TransformersSpec, model: PreTrainedModel, max_len: int) -> None:
        self.spec = spec
        fix_frequencies(model, max_len)
        self._model: Any = model
        self._base: Any = self._layers(model)
        self._calls = PagedCalls(spec)
        install(model, self._calls)
        self._given = _GivenHidden()
        self.num_bytes = sum(part.nbytes for part in (*model.parameters(), *model.buffers()))

    @classmethod
    def load(
        cls, spec: TransformersSpec, weights: Iterable[tuple[str, Tensor]], dtype: torch.dtype, max_len: int
    ) -> Self:
        """Return the model in host memory.

        `weights`: under the checkpoint's names, in any dtype. `max_len`: served context, at which RoPE frequencies that
        depend on the length are fixed. Raises WeightError if a tensor is missing or misshapen.
        """
        return cls(spec, _load(spec, dict(weights), dtype), max_len)

    @classmethod
    def without_weights(cls, spec: TransformersSpec, dtype: torch.dtype, max_len: int) -> TransformersModel:
        """Return the model on torch's meta device, to compute over given tensors (`tensors`)."""
        model = cls(spec, _build_on_meta(spec, dtype), max_len)
        model._separate_head()
        return model

    def _layers(self, model: PreTrainedModel) -> nn.Module:
        """Return the part of the model that `hidden` runs."""
        return base_of(model)

    def place(self, device: torch.device) -> None:
        """Move it to the device.

        Raises ModelError if tokens depend on each other outside of attention, or if it ignores the positions given.
        """
        self._model.to(device)
        self._check_tokens(device)
        self._separate_head()

    def set_head(self, make: Callable[[nn.Linear], Callable[[Tensor], Tensor]]) -> None:
        """Replace the product of the language modelling head, after `place`.

        `make`: returns the product of a layer with hidden states [R, D], float32 [R, V].
        """
        head = self._model.get_output_embeddings()
        if type(head).forward is nn.Linear.forward:
            product = make(head)
            head.forward = lambda hidden: product(hidden.flatten(0, -2)).unflatten(0, hidden.shape[:-1])

    def _separate_head(self) -> None:
        setattr(self._model, self._model.base_model_prefix, self._given)

    def tensors(self) -> nn.Module:
        """Return a module of all parameters and buffers, after `place`, whose `forward` calls a function.

        `torch.func.functional_call` runs a function over other tensors.
        """
        module = _Calls((self._base, self._model))
        for part in module.modules():
            for name, value in list(vars(part).items()):
                if isinstance(value, Tensor):
                    delattr(part, name)
                    part.register_buffer(name, value, persistent=False)
        return module

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of prompt embeddings."""
        return self.embedding_table.dtype

    @property
    def embedding_table(self) -> Tensor:
        """The embedding table [V, D']."""
        weight: Tensor = self._base.get_input_embeddings().weight
        return weight

    def hidden(
        self, token_ids: Tensor, positions: Tensor, attend: Attend, insert: Callable[[Tensor], Tensor] | None = None
    ) -> Tensor:
        """Return hidden states [T, D] of token_ids, positions int64 [T].

        `insert`: replaces rows of the embeddings [T, D'] before the layers.
        """
        inputs: dict[str, Tensor] = {"input_ids": token_ids[None]}
        if insert is not None:
            embedded = self._base.get_input_embeddings()(token_ids)
            inputs = {"inputs_embeds": insert(embedded)[None]}
        with self._calls.by(attend):
            hidden: Tensor = self._base(**inputs, position_ids=positions[None], use_cache=False)[0]
        return hidden[0]

    def logits(self, hidden: Tensor) -> Tensor:
        """Return float32 logits [R, V] of hidden [R, D], by the model's own code after the layers.

        The product of the head is that of `set_head`.
        """
        self._given.hidden = hidden[None]
        ids = torch.zeros(1, len(hidden), dtype=torch.int64, device=hidden.device)
        logits: Tensor = self._model(input_ids=ids, use_cache=False).logits[0]
        return logits.float()

    @torch.inference_mode()
    def _check_tokens(self, device: torch.device) -> None:
        """Compute a token in two batches, its own value in place of attention. Raise ModelError if the results differ.

        Then something else combines tokens (a convolution, recurrent state, experts with a limited capacity), or
        positions are counted instead of taken from position_ids.
        """
        first, other = (self._without_attention(rows, device) for rows in self._probes())
        if len(first) != len(other) or not all(_close(a[0], b[-1]) for a, b in zip(first, other)):
            raise ModelError(
                f"{type(self._model).__name__} cannot run on the paged KV cache: outside of attention its tokens "
                "depend on each other, or their positions on their order in a batch"
            )

    def _probes(self) -> tuple[ProbeRows, ProbeRows]:
        """Return two batches, in which one token stands first and last."""
        return _FIRST_ROWS, _OTHER_ROWS

    def _without_attention(self, rows: ProbeRows, device: torch.device) -> list[Tensor]:
        """Return the inputs of every call of attention and the hidden states, each [T, ...]."""
        seen: list[Tensor] = []

        def attend(
            number: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, bias: RelativeBias | None
        ) -> Tensor:
            seen.extend((q, k, v))
            return v.repeat_interleave(q.shape[1] // v.shape[1], 1)

        ids, positions = torch.tensor(rows, device=device).unbind(1)
        hidden = self.hidden(ids % self.spec.vocab, positions % self.spec.max_positions, attend)
        return [*seen, hidden]


def _close(a: Tensor, b: Tensor) -> bool:
    scale = max(float(a.abs().max()), float(b.abs().max()), 1e-6)
    return float((a - b).abs().max()) <= _PROBE_TOLERANCE * scale


class PagedCalls:
    """Implements CallHandler: hands the calls of a forward pass to the step's attention, numbered in their order."""

    def __init__(self, spec: TransformersSpec) -> None:
        self._spec = spec.attention
        self._attend: Attend | None = None
        self._next = 0

    def by(self, attend: Attend) -> PagedCalls:
        """Return the context of one forward pass, whose calls are handed to `attend`."""
        self._attend = attend
        self._next = 0
        return self

    def __enter__(self) -> None:
        assert self._attend is not None, "by() comes first"

    def __exit__(self, *_: object) -> None:
        self._attend = None

    def __call__(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, options: dict[str, Any]
    ) -> Tensor:
        assert self._attend is not None, "attention is called within hidden() alone"
        number = self._next
        self._next = self._next + 1
        head_dim = query.shape[3]
        value_dim = value.shape[3]
        if value_dim < head_dim:
            value = F.pad(value, (0, head_dim - value_dim))
        q, k, v = (heads[0].transpose(0, 1) for heads in (query, key, value))
        bias = RelativeBias.of(options.get(BIAS))
        return self._attend(number, q, k, v, options.get(SINKS), bias)[None, ..., :value_dim]


class _Calls(nn.ModuleList):
    def forward(self, function: Callable[[], Any]) -> Any:
        return function()


class _GivenHidden(nn.Module):
    """Stands in for the base model where only the head is computed: returns hidden states that were computed before."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden: Tensor | None = None

    def forward(self, *_: object, **__: object) -> _HiddenOutput:
        return _HiddenOutput(last_hidden_state=self.hidden)

    def __getattr__(self, name: str) -> Any:
        """Return itself for a part of the base model that some heads call in place of it."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return self


class _HiddenOutput(BaseModelOutputWithPast):
    """Further outputs of some base models, which their heads pass on, are None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("_"):
            raise AttributeError(name)


class WidenedHead:
    """What follows the base model, in float32. `given`: hidden states [n, L, D] in place of the base model's."""

    def __init__(self, model: nn.Module) -> None:
        base: Any = model.base_model
        self.given: Tensor | None = None
        if base is model:
            return
        for part in model.children():
            if part is not base:
                part.float()
        self._layers = base.forward
        self._pooler = getattr(base, "pooler", None)
        base.forward = self._forward

    def _forward(self, *arguments: Any, **options: Any) -> Any:
        if self.given is None:
            output = self._layers(*arguments, **options)
        else:
            pooled = None if self._pooler is None else self._pooler(self.given)
            output = _GivenOutput(last_hidden_state=self.given, pooler_output=pooled)
        for name, value in output.items():
            if isinstance(value, Tensor) and value.is_floating_point():
                output[name] = value.float()
        return output


class _GivenOutput(BaseModelOutputWithPooling):
    """Further outputs of some base models, which their heads pass on, are None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("_"):
            raise AttributeError(name)


def _build_on_meta(spec: TransformersSpec, dtype: torch.dtype) -> PreTrainedModel:
    """Return the model in inference mode, without weights."""
    config = make_config(spec.source)
    kind: Any = model_class(spec.source, config)
    with torch.device("meta"):
        model: PreTrainedModel = kind._from_config(config, attn_implementation=PAGED, dtype=dtype)
    wide = model._get_dtype_plan(dtype)
    for name, parameter in model.named_parameters():
        if any(re.search(rf"(^|\.){part}($|\.)", name) for part in wide):
            parameter.data = parameter.data.float()
    return model.eval().requires_grad_(False)


def _load(spec: TransformersSpec, state: dict[str, Tensor], dtype: torch.dtype) -> PreTrainedModel:
    """Return the model in inference mode, on the CPU."""
    model = load_pretrained(spec, state, dtype, attn_implementation=PAGED)
    return model.eval().requires_grad_(False)


def load_pretrained(
    spec: TransformersSpec, state: dict[str, Tensor], dtype: torch.dtype, **options: Any
) -> PreTrainedModel:
    """Return the model on the CPU; `state` in any dtype, under the checkpoint's names.

    Raise WeightError for a missing or misshapen tensor, and for one that the model does not have. Tensors that a
    pooling model does not have, such as another head, are logged; without a classifier its `pooler` may be missing.
    """
    config = make_config(spec.source)
    kind: Any = model_class(spec.source, config)
    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()  # Its report would repeat the errors below.
    transformers.logging.disable_progress_bar()
    try:
        model, report = kind.from_pretrained(
            None, config=config, state_dict=state, dtype=dtype, output_loading_info=True, **options
        )
    except (RuntimeError, ValueError) as error:
        raise WeightError(f"{kind.__name__}: {str(error).strip().partition(chr(10))[0]}") from error
    finally:
        transformers.logging.set_verbosity(level)
    problems = {problem: sorted(map(str, report.get(f"{problem}_keys") or ())) for problem in _PROBLEMS}
    if spec.pooler is not None and (names := problems.pop("unexpected")):
        logger.warning("%d tensors of the checkpoint are not used, one is %s", len(names), names[0])
    if spec.pooler is not None and spec.pooler.classifier is None:
        problems["missing"] = [name for name in problems["missing"] if not name.startswith(_UNUSED)]
    for problem, names in problems.items():
        if names:
            raise WeightError(f"{kind.__name__}: {len(names)} {problem} tensors in the checkpoint, one is {names[0]}")
    loaded: PreTrainedModel = model
    return loaded
