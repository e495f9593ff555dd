"""Keys of --pooler-config, which override the pooling settings in the model's files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

from pagoda.common.config.fields import did_you_mean
from pagoda.common.errors import ConfigError

PoolingKind: TypeAlias = Literal["first", "last", "mean", "all"]

KINDS: Final[Mapping[str, PoolingKind]] = {
    "CLS": "first",
    "LAST": "last",
    "MEAN": "mean",
    "ALL": "all",
    "STEP": "all",  # With step_tag_id.
}
_FLAG: Final = "--pooler-config"
_KIND_KEYS: Final = ("pooling_type", "seq_pooling_type", "tok_pooling_type")
_ACTIVATION_KEYS: Final = ("use_activation", "normalize", "activation", "softmax")
_REFUSED: Final = {
    "returned_token_ids": "a choice of labels",
    "enable_chunked_processing": "chunked processing of long inputs",
    "max_embed_len": "chunked processing of long inputs",
    "logit_bias": "a classifier logit bias",
    "logit_mean": "a classifier logit bias",
    "logit_sigma": "classifier logit scaling",
}
_INSTEAD: Final = {
    "returned_token_ids": ", or make a classifier of the tokens by --hf-overrides classifier_from_token",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolerConfig:
    """Overrides of the model's pooling settings; None keeps the model's."""

    kind: PoolingKind | None = None
    use_activation: bool | None = None
    dimensions: int | None = None  # Default embedding size, for requests that set none.
    task: str | None = None  # Task of requests that name none.
    step_tag: int | None = None  # Id of the tokens that have an output, in tasks with one output per token.

    @classmethod
    def of(cls, keys: Mapping[str, Any]) -> PoolerConfig:
        """Parse vLLM's JSON keys. Raise ConfigError naming the key."""
        accepted_keys = (*_KIND_KEYS, *_ACTIVATION_KEYS, "dimensions", "step_tag_id", "task")
        for key, value in keys.items():
            if key in _REFUSED and value is not None:
                problem = f"{key}: {_REFUSED[key]} is not in this version; drop it"
                raise ConfigError(_FLAG, problem + _INSTEAD.get(key, ""))
            if key not in accepted_keys and key not in _REFUSED:
                raise ConfigError(_FLAG, f"{key} is unknown{did_you_mean(key, accepted_keys)}")
        kinds = {_kind(key, keys[key]) for key in _KIND_KEYS if keys.get(key) is not None}
        switches = {_switch(key, keys[key]) for key in _ACTIVATION_KEYS if keys.get(key) is not None}
        if len(kinds) > 1 or len(switches) > 1:
            synonyms = _KIND_KEYS if len(kinds) > 1 else _ACTIVATION_KEYS
            conflicting = " and ".join(key for key in synonyms if keys.get(key) is not None)
            raise ConfigError(_FLAG, f"{conflicting} contradict each other; keep one")
        return cls(
            kind=next(iter(kinds), None),
            use_activation=next(iter(switches), None),
            dimensions=_integer("dimensions", keys.get("dimensions"), 1),
            task=_name("task", keys.get("task")),
            step_tag=_integer("step_tag_id", keys.get("step_tag_id"), 0),
        )


def _kind(key: str, value: Any) -> PoolingKind:
    kind = KINDS.get(value.upper()) if isinstance(value, str) else None
    if kind is None:
        raise ConfigError(_FLAG, f"{key} is {value!r}; use {', '.join(KINDS)}")
    return kind


def _switch(key: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(_FLAG, f"{key} is {value!r}; use true or false")
    return value


def _name(key: str, value: Any) -> str | None:
    if value is None or isinstance(value, str):
        return value
    raise ConfigError(_FLAG, f"{key} is {value!r}; use a text such as embed")


def _integer(key: str, value: Any, least: int) -> int | None:
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= least):
        return value
    raise ConfigError(_FLAG, f"{key} is {value!r}; use an integer of at least {least}")
