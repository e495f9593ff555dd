"""Small random pooling models, built and saved by transformers, and their outputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from models import tiny

from pagoda.common.models.family import PoolUse

SMALL_BERT: dict[str, Any] = {
    "vocab_size": tiny.VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
SMALL_GPT2 = {**tiny.SMALL_GPT2, "pad_token_id": 0}
LABELS = {"id2label": {index: f"kind {index}" for index in range(3)}, "label2id": {}}
LABELS["label2id"] = {name: index for index, name in LABELS["id2label"].items()}

Answer = Callable[[Any], torch.Tensor]


def last_token(output: Any) -> torch.Tensor:
    return output.last_hidden_state[0, -1]


def first_token(output: Any) -> torch.Tensor:
    return output.last_hidden_state[0, 0]


def logits(output: Any) -> torch.Tensor:
    """[1, n] of a text, [1, T, n] of its tokens -> without the batch."""
    return output.logits[0]


@dataclass(frozen=True)
class Case:
    """A model, its task, and the output of transformers that its raw output equals. `types`: it reads token types."""

    name: str
    architecture: str
    use: PoolUse
    theirs: Answer
    extra: dict[str, Any] = field(default_factory=dict)
    base: dict[str, Any] | None = None
    types: bool = False

    @property
    def tiny(self) -> tiny.Tiny:
        return tiny.Tiny(self.name, self.architecture, self.extra, self.base)


def bert(name: str, architecture: str, use: PoolUse, theirs: Answer, **extra: Any) -> Case:
    return Case(name, architecture, use, theirs, extra, SMALL_BERT, types=True)


def roberta(name: str, architecture: str, use: PoolUse, theirs: Answer, **extra: Any) -> Case:
    return Case(name, architecture, use, theirs, {"pad_token_id": 1, "type_vocab_size": 1, **extra}, SMALL_BERT)


MODERN = {"local_attention": 6, "num_hidden_layers": 4, "cls_token_id": 1, "bos_token_id": 1, "eos_token_id": 2}


def modern(name: str, architecture: str, use: PoolUse, theirs: Answer, **extra: Any) -> Case:
    return Case(name, architecture, use, theirs, {**MODERN, "sep_token_id": 2, **extra}, SMALL_BERT)


def decoder(name: str, architecture: str, use: PoolUse, theirs: Answer, **extra: Any) -> Case:
    return Case(name, architecture, use, theirs, {"pad_token_id": 0, **extra})


CASES = (
    bert("bert", "BertModel", "embed", first_token),
    bert("bert-classify", "BertForSequenceClassification", "classify", logits, **LABELS),
    bert("bert-tokens", "BertForTokenClassification", "token_classify", logits, **LABELS),
    roberta("roberta", "RobertaModel", "embed", first_token),
    roberta("roberta-classify", "RobertaForSequenceClassification", "classify", logits, **LABELS),
    roberta("xlm-roberta-score", "XLMRobertaForSequenceClassification", "classify", logits, num_labels=1),
    roberta("xlm-roberta-tokens", "XLMRobertaForTokenClassification", "token_classify", logits),
    roberta("camembert", "CamembertModel", "embed", first_token, pad_token_id=3),
    modern("modernbert", "ModernBertModel", "embed", first_token, norm_bias=True, attention_bias=True),
    modern("modernbert-classify", "ModernBertForSequenceClassification", "classify", logits, **LABELS),
    modern(
        "modernbert-mean",
        "ModernBertForSequenceClassification",
        "classify",
        logits,
        classifier_pooling="mean",
        classifier_bias=True,
        mlp_bias=True,
    ),
    modern("modernbert-tokens", "ModernBertForTokenClassification", "token_classify", logits),
    decoder(
        "gemma3-both-ways",
        "Gemma3TextModel",
        "embed",
        last_token,
        use_bidirectional_attention=True,
        num_hidden_layers=4,
        head_dim=12,
        query_pre_attn_scalar=20,
        sliding_window=8,
        sliding_window_pattern=3,
    ),
    decoder("gemma3-classify", "Gemma3TextForSequenceClassification", "classify", logits, head_dim=12),
    decoder("llama", "LlamaModel", "embed", last_token),
    decoder("llama-classify", "LlamaForSequenceClassification", "classify", logits, **LABELS),
    decoder("llama-tokens", "LlamaForTokenClassification", "token_classify", logits),
    decoder("qwen3", "Qwen3Model", "embed", last_token, head_dim=16),
    decoder("qwen3-score", "Qwen3ForSequenceClassification", "classify", logits, head_dim=16, num_labels=1),
    decoder("mistral-window", "MistralModel", "embed", last_token, sliding_window=tiny.WINDOW, head_dim=16),
    decoder(
        "gemma2",
        "Gemma2Model",
        "embed",
        last_token,
        num_hidden_layers=4,
        head_dim=12,
        sliding_window=tiny.WINDOW,
        attn_logit_softcapping=2.0,
    ),
    Case("deepseek2", "DeepseekV2Model", "embed", last_token, {"pad_token_id": 0}, tiny.LATENT),
    Case(
        "deepseek3-classify",
        "DeepseekV3ForSequenceClassification",
        "classify",
        logits,
        {"pad_token_id": 0, "q_lora_rank": None, **LABELS},
        tiny.LATENT,
    ),
    Case("deepseek32", "DeepseekV32Model", "embed", last_token, {"pad_token_id": 0}, tiny.SPARSE_LATENT),
    Case("qwen3-next", "Qwen3NextModel", "embed", last_token, {"pad_token_id": 0}, tiny.NEXT),
    decoder("mixtral", "MixtralModel", "embed", last_token, num_local_experts=4, num_experts_per_tok=2),
    Case("gpt2-classify", "GPT2ForSequenceClassification", "classify", logits, LABELS, SMALL_GPT2),
    Case("opt-narrow", "OPTModel", "embed", last_token, {"word_embed_proj_dim": 20}, tiny.SMALL_OPT),
)


@torch.inference_mode()
def theirs(case: Case, model: transformers.PreTrainedModel, token_ids: list[int], second: int | None) -> torch.Tensor:
    """Return transformers' output, float32. `second`: index of the first token of type 1."""
    keywords: dict[str, Any] = {"input_ids": torch.tensor([token_ids])}
    if case.types:
        at = len(token_ids) if second is None else second
        keywords["token_type_ids"] = (torch.arange(len(token_ids)) >= at).long()[None]
    return case.theirs(model(**keywords))
