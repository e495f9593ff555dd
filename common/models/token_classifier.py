"""Classifiers made of a language model's head: the logits of a few tokens, as rerankers use them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from pagoda.common.models.family import Family, Rename, Rule, TokenRows, classifier
from pagoda.common.models.hf_config import HfConfig
from pagoda.common.models.spec import Classifier, Pooler

KEY: Final = "classifier_from_token"
_KEYS: Final = (KEY, "method", "is_original_qwen3_reranker")
_DIFFERENCE = "from_2_way_softmax"
_LOGITS = "no_post_processing"


@dataclass(frozen=True, slots=True)
class TokenClassifier:
    """The logits of `tokens`; with `difference` that of the second of two minus that of the first.

    A sigmoid of the difference is the second's share in a softmax over both.
    """

    tokens: tuple[int, ...]
    difference: bool
    head: Classifier

    @classmethod
    def of(cls, config: HfConfig) -> TokenClassifier | None:
        """Return what the config asks for by vLLM's keys, None without them. Raises ModelError."""
        tokens = config.opt(KEY, list, [])
        original = config.opt("is_original_qwen3_reranker", bool, False)
        method = config.opt("method", str, _DIFFERENCE if original else "")
        if not tokens:
            if original:
                raise config.error(KEY, 'is missing; a Qwen3 reranker needs ["no", "yes"]')
            return None
        if not all(type(token) is int and token >= 0 for token in tokens):
            raise config.error(KEY, f"is {tokens}; it must be a list of tokens")
        if method not in (_DIFFERENCE, _LOGITS):
            raise config.error("method", f"is {method!r}; it must be {_DIFFERENCE} or {_LOGITS}")
        difference = method == _DIFFERENCE
        if difference and len(tokens) != 2:
            raise config.error(KEY, f"has {len(tokens)} tokens; {_DIFFERENCE} needs two")
        labels = 1 if difference else len(tokens)
        return cls(tuple(tokens), difference, classifier(config, bias=False, labels=labels))

    def pooler(self, pooler: Pooler) -> Pooler:
        """Return the pooler of the family's classifiers with this head."""
        return replace(pooler, dense=(), classifier=self.head)

    def rules(self, family: Family, *, tied: bool) -> tuple[Rule, ...]:
        """Return the rules that fill the head. `tied`: the language model's head is the embedding."""
        table = "embed" if tied else "head"
        return tuple(
            TokenRows(rule.source, "pooler.classifier", self.tokens, self.difference, table if tied else None)
            for rule in family.rules
            if isinstance(rule, Rename) and rule.target == table
        )


def text_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys that vLLM's users set at the top of the config of a multimodal model."""
    return {key: config[key] for key in _KEYS if config.get(key) is not None}
