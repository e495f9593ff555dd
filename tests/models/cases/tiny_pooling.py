"""Small random pooling models, built and saved by transformers, and their outputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from models.cases import assembled, renames, tiny

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
GLM5_SHARED = {"indexer_types": ["full", "shared"], "pad_token_id": 0}
LABELS = {"id2label": {index: f"kind {index}" for index in range(3)}, "label2id": {}}
LABELS["label2id"] = {name: index for index, name in LABELS["id2label"].items()}

Answer = Callable[[Any], torch.Tensor]


def last_token(output: Any) -> torch.Tensor:
    return output.last_hidden_state[0, -1]


def first_token(output: Any) -> torch.Tensor:
    return output.last_hidden_state[0, 0]


def mean_token(output: Any) -> torch.Tensor:
    return output.last_hidden_state[0].mean(0)


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
    oracle: str = ""  # see Tiny, also for the next three
    written: dict[str, Any] = field(default_factory=dict)
    rename: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]] | None = None
    assemble: Callable[[transformers.PreTrainedModel], None] | None = None

    @property
    def tiny(self) -> tiny.Tiny:
        return tiny.Tiny(
            self.name,
            self.architecture,
            self.extra,
            self.base,
            oracle=self.oracle,
            written=self.written,
            rename=self.rename,
            assemble=self.assemble,
        )


def bert(name: str, architecture: str, use: PoolUse, theirs: Answer, **extra: Any) -> Case:
    return Case(name, architecture, use, theirs, extra, SMALL_BERT, types=True)


def roberta(name: str, architecture: str, use: PoolUse, theirs: Answer, **extra: Any) -> Case:
    return Case(name, architecture, use, theirs, {"pad_token_id": 1, "type_vocab_size": 1, **extra}, SMALL_BERT)


def rotary(name: str, architecture: str, use: PoolUse, theirs: Answer, **extra: Any) -> Case:
    return Case(name, architecture, use, theirs, extra, SMALL_BERT, types=extra.get("type_vocab_size") == 2)


NEW_KEYS = {
    "model_type": "new",
    "rope_parameters": None,
    "rope_theta": 20_000.0,
    "rope_scaling": {"type": "ntk", "factor": 8.0},
    "position_embedding_type": "rope",
    "layer_norm_type": "layer_norm",
    "logn_attention_clip1": False,
    "logn_attention_scale": False,
    "pack_qkv": True,
    "unpad_inputs": "true",
    "use_memory_efficient_attention": "true",
}
"""Keys of gte-multilingual-base."""
NEW_ROPE = {"rope_type": "linear", "rope_theta": 8 * 20_000.0, "factor": 8.0 ** (2 / 8)}  # the same frequencies
NOMIC_KEYS = {
    **{"n_embd": 32, "n_head": 4, "n_layer": 3, "n_inner": 48, "n_positions": 8192, "max_trained_positions": 64},
    **{
        "layer_norm_epsilon": 1e-12,
        "rotary_emb_base": 1000,
        "rotary_emb_fraction": 1.0,
        "activation_function": "swiglu",
    },
    **{"prenorm": False, "qkv_proj_bias": False, "mlp_fc1_bias": False, "mlp_fc2_bias": False, "use_rms_norm": False},
    **{"rotary_emb_scale_base": None, "rotary_scaling_factor": None, "pad_vocab_size_multiple": 64, "causal": False},
    **dict.fromkeys(("hidden_size", "num_attention_heads", "num_hidden_layers", "intermediate_size")),
    **dict.fromkeys(("layer_norm_eps", "rope_parameters", "max_position_embeddings", "hidden_act", "head_dim")),
}
"""Keys of nomic-embed-text-v1.5."""


JINA_KEYS = {"model_type": "bert", "position_embedding_type": "alibi", "feed_forward_type": "geglu"}


def jina(name: str, architecture: str, use: PoolUse, theirs: Answer, oracle: str, **extra: Any) -> Case:
    written = {**JINA_KEYS, "emb_pooler": "mean", "model_max_length": 64}
    return Case(
        name,
        architecture,
        use,
        theirs,
        extra,
        SMALL_BERT,
        types=True,
        oracle=oracle,
        written=written,
        rename=renames.jina_bert,
        assemble=assembled.jina_bert,
    )


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
    rotary("gte", "GteModel", "embed", first_token),
    rotary("gte-classify", "GteForSequenceClassification", "classify", logits, **LABELS),
    Case(
        "gte-new",
        "NewModel",
        "embed",
        first_token,
        {"rope_parameters": NEW_ROPE},
        SMALL_BERT,
        oracle="GteModel",
        written=NEW_KEYS,
    ),
    Case(
        "nomic",
        "NomicBertModel",
        "embed",
        first_token,
        {"type_vocab_size": 2},
        SMALL_BERT,
        types=True,
        oracle="NomicBertModel",
        written=NOMIC_KEYS,
    ),
    rotary("nomic-classify", "NomicBertForSequenceClassification", "classify", logits, type_vocab_size=2),
    rotary("jina-v3", "JinaEmbeddingsV3Model", "embed", first_token),
    rotary("jina-v3-classify", "JinaEmbeddingsV3ForSequenceClassification", "classify", logits, **LABELS),
    jina("jina-v2", "JinaBertForMaskedLM", "embed", mean_token, "BertModel"),
    jina("jina-rerank", "JinaBertForSequenceClassification", "classify", logits, "BertForSequenceClassification"),
    Case(
        "jina-rerank-v2",
        "XLMRobertaForSequenceClassification",
        "classify",
        logits,
        {"pad_token_id": 1, "type_vocab_size": 1, "num_labels": 1},
        SMALL_BERT,
        oracle="XLMRobertaForSequenceClassification",
        written={"use_flash_attn": True},
        rename=renames.flash_roberta,
    ),
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
    Case("glm5-shared", "GlmMoeDsaModel", "embed", last_token, GLM5_SHARED, tiny.SPARSE_LATENT),
    Case("qwen3-next", "Qwen3NextModel", "embed", last_token, {"pad_token_id": 0}, tiny.NEXT),
    decoder("gpt-oss", "GptOssModel", "embed", last_token, **tiny.GPT_OSS.extra),
    decoder("mixtral", "MixtralModel", "embed", last_token, num_local_experts=4, num_experts_per_tok=2),
    decoder(
        "cohere2", "Cohere2Model", "embed", last_token, num_hidden_layers=4, sliding_window=tiny.WINDOW, use_cache=False
    ),
    decoder("hunyuan", "HunYuanDenseV1Model", "embed", last_token, head_dim=12),
    Case(
        "bloom", "BloomModel", "embed", last_token, {"n_layer": 2, "n_head": 4}, {"vocab_size": 97, "hidden_size": 32}
    ),
    Case("gpt-neox", "GPTNeoXModel", "embed", last_token, {"intermediate_size": 48}, tiny.SMALL_MHA),
    Case("gpt2-classify", "GPT2ForSequenceClassification", "classify", logits, LABELS, SMALL_GPT2),
    Case("opt-narrow", "OPTModel", "embed", last_token, {"word_embed_proj_dim": 20}, tiny.SMALL_OPT),
)


@torch.inference_mode()
def theirs(case: Case, model: transformers.PreTrainedModel, token_ids: list[int], second: int | None) -> torch.Tensor:
    """Return transformers' output, float32. `second`: index of the first token of type 1."""
    keywords: dict[str, Any] = {"input_ids": torch.tensor([token_ids])}
    if case.types:
        border = len(token_ids) if second is None else second
        keywords["token_type_ids"] = (torch.arange(len(token_ids)) >= border).long()[None]
    return case.theirs(model(**keywords))
