"""The attention functions that transformers' models call in place of their own.

They are registered under names of ours in transformers' attention interface. A call is handed to the `CallHandler` of
the model, which every module of it carries: `TracedCalls` records what a model calls, `PagedCalls` (model.py) attends.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import torch
from torch import Tensor, nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from pagoda.common.errors import ModelError
from pagoda.common.models.mixers import Attention

PAGED: Final = "pagoda"
"""attn_implementation of models that run. transformers makes no mask for it."""

TRACED: Final = "pagoda_trace"
"""attn_implementation of models that are traced: masks are made, and describe themselves."""

_HANDLER: Final = "pagoda_calls"
_RULE: Final = "pagoda_mask_rule"
_PROBED_KEYS: Final = 4096
"""Length of a prompt whose first tokens are asked for the tokens that they see."""

_BIAS: Final = "pagoda_bias"
WITHOUT_EFFECT: Final = ("position_ids", "cache_position", "use_cache", "dropout", "is_causal", "output_attentions")
"""Options of a call that change nothing here: every layer is causal, and its cache is ours."""
SINKS: Final = "s_aux"
"""Option with a logit per query head that takes part in the softmax and has no value, [N]."""

BIAS: Final = "position_bias"
"""Option with a bias of the attention scores; understood where a `RelativeBias` made it."""

SCALE: Final = "scaling"

_UNDERSTOOD: Final = (SCALE, "sliding_window", "softcap", SINKS)


class CallHandler(Protocol):
    """Takes a model's calls of attention."""

    def __call__(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, options: dict[str, Any]
    ) -> Tensor:
        """query [1, N, T, H], key [1, K, T, H], value [1, K, T, V] -> [1, T, N, V]."""
        ...


def install(model: nn.Module, handler: CallHandler) -> None:
    """Send the calls of all modules of a model to `handler`."""
    for module in model.modules():
        object.__setattr__(module, _HANDLER, handler)


class RelativeBias:
    """Takes the place of the method `compute_bias` of a module, whose result depends on the distance of two tokens.

    It returns an empty tensor that carries this object to the calls of attention, in the layers that share the bias,
    too; of the positions in a batch the module knows nothing.
    """

    def __init__(self, module: nn.Module) -> None:
        self._compute: Any = module.compute_bias
        self._by_distance: dict[int, Tensor] = {}

    @classmethod
    def install(cls, model: nn.Module) -> None:
        """Replace the method in all modules of a model that have it."""
        for module in model.modules():
            if hasattr(module, "compute_bias"):
                object.__setattr__(module, "compute_bias", cls(module))

    @staticmethod
    def of(bias: object) -> RelativeBias | None:
        """Return the object that made a bias, None if none did."""
        relative_bias: RelativeBias | None = getattr(bias, _BIAS, None)
        return relative_bias

    def __call__(self, *_: object, device: torch.device | None = None, **__: object) -> Tensor:
        carrier = torch.empty(0, device=device)
        setattr(carrier, _BIAS, self)
        return carrier

    def whole(self, length: int) -> Tensor:
        """Return the bias [1, N, length, length] of a whole prompt."""
        bias: Tensor = self._compute(length, length)
        return bias

    def by_distance(self, length: int) -> Tensor:
        """Return the bias [N, length] of keys that are 0, 1, ... tokens before the query.

        Raises ModelError if it depends on more than the distance.
        """
        if length not in self._by_distance:
            rows = self._compute(2, length + 1, past_seen_tokens=length - 1)[0]
            if not torch.equal(rows[:, 0, :length], rows[:, 1, 1:]):
                raise ModelError("its position bias depends on more than the distance of two tokens")
            self._by_distance[length] = rows[:, 0, :length].flip(-1)
        return self._by_distance[length]


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None, **options: Any
) -> tuple[Tensor, None]:
    handler: CallHandler = getattr(module, _HANDLER)
    return handler(module, query, key, value, attention_mask, options), None


@dataclass(slots=True)
class MaskRule:
    """Which keys each query attends to: a mask function of transformers."""

    function: Callable[..., Any]
    windows: dict[int, int | None] = field(default_factory=dict)

    def visible(self, query: int, length: int) -> Tensor:
        """Return whether the query at a position attends to each of the first `length` positions, bool [length]."""
        with torch.device("cpu"):
            keys = torch.arange(length)
            return torch.as_tensor(self.function(0, 0, torch.tensor(query), keys)).broadcast_to(keys.shape)

    def window(self, length: int) -> int | None:
        """Return the sliding window in sequences of up to `length` tokens; None: all earlier tokens are seen.

        Raises ValueError if the mask is neither.
        """
        if length not in self.windows:
            self.windows[length] = self._window(length)
        return self.windows[length]

    def _window(self, length: int) -> int | None:
        last = length - 1
        keys = torch.arange(length + 1, device="cpu")
        window = int(self.visible(last, length + 1).sum())
        for query in {0, 1, last // 3, last // 2, last - 1, last, window, 2 * window}:
            if 0 <= query <= last:
                expected = (keys <= query) & (keys > query - window)
                if not torch.equal(self.visible(query, length + 1), expected):
                    raise ValueError(f"query {query} does not see a window of {window}")
        return window if window < length else None


def mask_rule(mask: Tensor | None) -> MaskRule | None:
    """Return the rule of a mask, None if transformers did not make it."""
    rule: MaskRule | None = getattr(mask, _RULE, None)
    return rule


def _describing_mask(*, q_length: int, kv_length: int, mask_function: Callable[..., Any], **_: Any) -> Tensor:
    """Return a tensor in the shape of a mask, with its `MaskRule` as an attribute."""
    mask = torch.empty(1, 1, q_length, kv_length, device="meta")
    setattr(mask, _RULE, MaskRule(mask_function))
    return mask


ALL_ATTENTION_FUNCTIONS.register(PAGED, _attend)
ALL_ATTENTION_FUNCTIONS.register(TRACED, _attend)
ALL_MASK_ATTENTION_FUNCTIONS.register(TRACED, _describing_mask)


def _sees_all(module: nn.Module, mask: Tensor | None) -> bool:
    """Return whether every token attends to all of a prompt."""
    if mask is None:
        return getattr(module, "is_causal", None) is False
    rule: MaskRule | None = getattr(mask, _RULE, None)
    return rule is not None and all(bool(rule.visible(query, _PROBED_KEYS).all()) for query in (0, _PROBED_KEYS // 2))


@dataclass(frozen=True, slots=True)
class TracedLayers:
    """A model on torch's meta device, and what a forward pass showed of it."""

    model: Any
    attention: tuple[Attention, ...]  # of each call, in the order of the calls
    width: int  # of the hidden states


@dataclass(slots=True)
class TracedCalls:
    """Records what each call attends to. Raises ModelError for what the paged attention does not compute."""

    max_positions: int
    both_ways: bool = False  # A query also attends to later tokens.
    attention: list[Attention] = field(default_factory=list)

    def __call__(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, options: dict[str, Any]
    ) -> Tensor:
        self.attention.append(self._describe(module, query, key, value, mask, options))
        return query.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[3])

    def _describe(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, options: dict[str, Any]
    ) -> Attention:
        kind = type(module).__name__
        set_options = {name: option for name, option in options.items() if option is not None}
        mask = set_options.pop("attention_mask", mask)
        for name in set_options.keys() - {*WITHOUT_EFFECT, *_UNDERSTOOD}:
            raise ModelError(f"{kind} gives attention the option {name}, which the paged attention does not have")
        heads, tokens, head_dim = query.shape[1:]
        kv_heads = key.shape[1]
        if key.shape[2] != tokens or heads % kv_heads or value.shape[1] != kv_heads or value.shape[3] > head_dim:
            raise ModelError(
                f"{kind} attends from q {list(query.shape)} to k {list(key.shape)} and v {list(value.shape)}, which is "
                "not attention of grouped heads over a sequence's own tokens"
            )
        sinks = set_options.get(SINKS)
        if sinks is not None and sinks.shape != (heads,):
            raise ModelError(f"{kind} has attention sinks {list(sinks.shape)}, not one per head of {heads}")
        if causal := not (self.both_ways and _sees_all(module, mask)):
            window = self._window(kind, mask, causal=bool(getattr(module, "is_causal", False)))
        scale = set_options.get("scaling")
        return Attention(
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            scale=head_dim**-0.5 if scale is None else float(scale),
            rope=None,
            window=window if causal else None,
            causal=causal,
            softcap=set_options.get("softcap"),
            sinks=sinks is not None,
        )

    def _window(self, kind: str, mask: Tensor | None, *, causal: bool) -> int | None:
        """Return the sliding window of a mask, None if a token sees all before it. Raise ModelError for other masks."""
        if mask is None and causal:
            return None
        if (rule := mask_rule(mask)) is None:
            raise ModelError(f"{kind} computes a mask or bias of attention by itself")
        try:
            return rule.window(self.max_positions)
        except ValueError:
            raise ModelError(f"{kind} attends neither to all earlier tokens nor to a sliding window of them") from None
