"""PoolingParams: parameters of a pooling request. Field names are vLLM's.

Values are checked here; what depends on the model is checked by the input processor.
"""

from __future__ import annotations

import copy
from dataclasses import InitVar, dataclass, field
from typing import Any, Final, get_args

from pagoda.common.engine.pooling.values import PoolingTask
from pagoda.common.errors import RequestError
from pagoda.common.sampling_params import RequestOutputKind

TASKS: Final[tuple[str, ...]] = get_args(PoolingTask)

NOT_YET: Final = {
    "returned_token_ids": "the labels of a model are fixed at start (--hf-overrides classifier_from_token)",
    "requires_token_ids": "poolers do not see token ids",
    "late_interaction_params": "documents are not stored for later queries",
    "extra_kwargs": "no pooler reads them",
}
"""Fields that are refused when set, with the reason."""


@dataclass
class PoolingParams:
    """How to pool a prompt. There is one output, at the end."""

    use_activation: bool | None = None  # Normalise embeddings, turn labels into probabilities; None: model's default.
    dimensions: int | None = None  # Number of leading dimensions of an embedding to keep (Matryoshka); None: all.
    step_tag_id: int | None = None  # Only tokens with this id have an output, in tasks with one output per token.
    returned_token_ids: list[int] | None = None
    task: str | None = None  # One of the model's tasks; None: its default.
    requires_token_ids: bool = False
    skip_reading_prefix_cache: bool | None = None  # It has no effect: pooling caches no prefixes.
    late_interaction_params: Any = None
    extra_kwargs: dict[str, Any] | None = None
    output_kind: RequestOutputKind = RequestOutputKind.FINAL_ONLY
    truncate_prompt_tokens: int | None = field(default=None, kw_only=True)  # See TextOptions.
    normalize: InitVar[bool | None] = field(default=None, kw_only=True)  # A former name of use_activation, as in vLLM.
    softmax: InitVar[bool | None] = field(default=None, kw_only=True)
    activation: InitVar[bool | None] = field(default=None, kw_only=True)

    def __post_init__(self, normalize: bool | None, softmax: bool | None, activation: bool | None) -> None:
        for name, value in (("normalize", normalize), ("softmax", softmax), ("activation", activation)):
            if value is None:
                continue
            if self.use_activation not in (None, value):
                raise RequestError(name, f"{name} {value} contradicts use_activation; give one of them")
            self.use_activation = value
        self.verify()

    def clone(self) -> PoolingParams:
        """Return a deep copy."""
        return copy.deepcopy(self)

    def verify(self) -> None:
        """Raise RequestError naming the first invalid field. Call it again after changing fields."""
        for name, why in NOT_YET.items():
            if getattr(self, name):
                raise RequestError(name, f"{name} is not supported: {why}; leave it unset")
        for name in ("use_activation", "skip_reading_prefix_cache"):
            if getattr(self, name) not in (None, True, False):
                raise RequestError(name, f"{name} must be true, false or unset")
        if self.step_tag_id is not None and (type(self.step_tag_id) is not int or self.step_tag_id < 0):
            raise RequestError("step_tag_id", "step_tag_id must be an integer of 0 or more")
        if self.dimensions is not None and (type(self.dimensions) is not int or self.dimensions < 1):
            raise RequestError("dimensions", "dimensions must be an integer of 1 or more")
        limit = self.truncate_prompt_tokens
        if limit is not None and (type(limit) is not int or limit < -1):
            raise RequestError("truncate_prompt_tokens", "truncate_prompt_tokens must be an integer of -1 or more")
        if self.task is not None and self.task not in TASKS:
            raise RequestError("task", f"task {str(self.task)[:40]!r} is not supported; use one of {', '.join(TASKS)}")
        if self.output_kind is not RequestOutputKind.FINAL_ONLY:
            raise RequestError("output_kind", "pooling has one output, at the end: RequestOutputKind.FINAL_ONLY")
