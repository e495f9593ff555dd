"""A forward pass of a model without weights, on torch's meta device, which shows what its layers attend to."""

from __future__ import annotations

import inspect
from typing import Any, Final

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PretrainedConfig, PreTrainedModel

from pagoda.backends.fallback.attention import TRACED, TracedCalls, TracedLayers, install
from pagoda.backends.fallback.classes import model_class, rope_kind, ropes_of, text_config
from pagoda.backends.fallback.rope import LENGTH_DEPENDENT, fix_frequencies
from pagoda.common.errors import ModelError
from pagoda.common.models.transformers_spec import TransformersSource

TRACED_TOKENS: Final = 4


def trace_layers(
    source: TransformersSource, config: PretrainedConfig, max_positions: int, *, both_ways: bool
) -> TracedLayers:
    """Return the model on the meta device, its calls of attention and the width of its hidden states.

    Raise ModelError for attention that is not that of `TracedCalls`.
    """
    calls = TracedCalls(max_positions, both_ways)
    model = on_meta(source, config)
    _fix_ropes(model, config, max_positions)
    install(model, calls)
    base = base_of(model, pools=source.use is not None)
    ids = torch.zeros(1, TRACED_TOKENS, dtype=torch.int64, device="meta")
    with torch.no_grad(), torch.device("meta"), MetaValues():
        # With a mask, positions are not searched for the ends of packed sequences.
        hidden = base(input_ids=ids, position_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)[0]
    layers = getattr(text_config(config), "num_hidden_layers", None)
    if not calls.attention or (layers is not None and len(calls.attention) < layers):
        raise ModelError(
            f"{len(calls.attention)} of {layers} layers attend through transformers' attention interface; the others "
            "do not attend, or do so by themselves"
        )
    return TracedLayers(model=model, attention=tuple(calls.attention), width=int(hidden.shape[-1]))


def on_meta(
    source: TransformersSource, config: PretrainedConfig, dtype: torch.dtype = torch.bfloat16
) -> PreTrainedModel:
    """Return the model without weights, to be traced. Raise ModelError if its attention cannot be."""
    try:
        with torch.device("meta"):
            kind: Any = model_class(source, config)
            model: PreTrainedModel = kind._from_config(
                config, attn_implementation=TRACED, experts_implementation="eager", dtype=dtype
            )
    except KeyError as error:
        if error.args != (TRACED,):
            raise
        raise ModelError("its attention does not go through transformers' attention interface") from None
    if getattr(model, "_is_stateful", False):
        raise ModelError("it has recurrent layers, whose state is not a KV cache")
    return model.eval()


def _fix_ropes(model: PreTrainedModel, config: PretrainedConfig, max_positions: int) -> None:
    """Fix frequencies that depend on the length. Raise ModelError if the model's own code computes them."""
    kinds = [kind for kind in map(rope_kind, ropes_of(config)) if kind in LENGTH_DEPENDENT]
    if not fix_frequencies(model, max_positions) and kinds:
        raise ModelError(
            f"its own code computes the frequencies of {kinds[0]} RoPE from the longest sequence of a batch, which "
            "cached keys cannot follow; choose another rope_type by --hf-overrides"
        )


def base_of(model: PreTrainedModel, *, pools: bool = False) -> nn.Module:
    """Return the model below the head. Raises ModelError if it is not a part of its own or takes no positions.

    `pools`: it may have no head.
    """
    base: nn.Module = model.base_model
    if base is model and not pools:
        raise ModelError("its head is not apart from the layers")
    if "position_ids" not in inspect.signature(base.forward).parameters:
        raise ModelError(f"{type(base).__name__} takes no position_ids")
    return base


def vocab_of(model: PreTrainedModel) -> int:
    """Return the number of logits. Raise ModelError for a model without a head."""
    head = model.get_output_embeddings()
    if head is None:
        raise ModelError("it has no language modelling head")
    return int(head.weight.shape[0])


class MetaValues(TorchDispatchMode):
    """Gives the meta device values where code asks for them: loops over chosen experts find none."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__
        if name.startswith("nonzero") and args[0].is_meta:
            return torch.empty(0, args[0].dim(), dtype=torch.int64, device="meta")
        if name.startswith("_local_scalar_dense") and args[0].is_meta:
            return 0
        return func(*args, **(kwargs or {}))
