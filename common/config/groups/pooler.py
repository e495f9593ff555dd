"""What --pooler-config may say: how a pooling model pools, over what its files say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

from pagoda.common.config.fields import did_you_mean
from pagoda.common.errors import ConfigError

PoolingKind: TypeAlias = Literal["first", "last", "mean", "all"]

KINDS: Final[Mapping[str, PoolingKind]] = {"CLS": "first", "LAST": "last", "MEAN": "mean", "ALL": "all"}
_FLAG: Final = "--pooler-config"
_KIND_KEYS: Final = ("pooling_type", "seq_pooling_type", "tok_pooling_type")
_ACTIVATION_KEYS: Final = ("use_activation", "normalize", "activation", "softmax")
_REFUSED: Final = {
    "step_tag_id": "pooling at the ends of steps",
    "returned_token_ids": "pooling at the ends of steps",
    "enable_chunked_processing": "embedding a text in pieces",
    "max_embed_len": "embedding a text in pieces",
    "logit_bias": "shifting a classifier's logits",
    "logit_mean": "shifting a classifier's logits",
    "logit_sigma": "scaling a classifier's logits",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolerConfig:
    """None: as the model's files say. `dimensions`: of embeddings, where a request says nothing."""

    kind: PoolingKind | None = None
    use_activation: bool | None = None
    dimensions: int | None = None

    @classmethod
    def of(cls, stated: Mapping[str, Any]) -> PoolerConfig:
        """The JSON object as vLLM spells it. Raises ConfigError naming the key."""
        known = (*_KIND_KEYS, *_ACTIVATION_KEYS, "dimensions", "task")
        for key, value in stated.items():
            if key in _REFUSED and value is not None:
                raise ConfigError(_FLAG, f"{key}: {_REFUSED[key]} is not in this version; drop it")
            if key not in known and key not in _REFUSED:
                raise ConfigError(_FLAG, f"{key} is unknown{did_you_mean(key, known)}")
        if stated.get("task") is not None:
            raise ConfigError(_FLAG, "task: requests name their task, of those the model offers; drop it")
        kinds = {_kind(key, stated[key]) for key in _KIND_KEYS if stated.get(key) is not None}
        switches = {_switch(key, stated[key]) for key in _ACTIVATION_KEYS if stated.get(key) is not None}
        if len(kinds) > 1 or len(switches) > 1:
            several = _KIND_KEYS if len(kinds) > 1 else _ACTIVATION_KEYS
            named = " and ".join(key for key in several if stated.get(key) is not None)
            raise ConfigError(_FLAG, f"{named} contradict each other; keep one")
        return cls(
            kind=next(iter(kinds), None),
            use_activation=next(iter(switches), None),
            dimensions=_dimensions(stated.get("dimensions")),
        )


def _kind(key: str, value: Any) -> PoolingKind:
    found = KINDS.get(value.upper()) if isinstance(value, str) else None
    if found is None:
        raise ConfigError(_FLAG, f"{key} is {value!r}; use {', '.join(KINDS)}")
    return found


def _switch(key: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(_FLAG, f"{key} is {value!r}; use true or false")
    return value


def _dimensions(value: Any) -> int | None:
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= 1):
        return value
    raise ConfigError(_FLAG, f"dimensions is {value!r}; use a number of at least 1")
