"""Jina's BERT with ALiBi (jina-embeddings-v2, jina-reranker-v1), and XLM-RoBERTa as jina-reranker-v2 names it."""

from __future__ import annotations

from dataclasses import replace

from pagoda.common.models.families.encoders.bert import BERT, ROBERTA, attention, encoder_pooler, encoder_rules
from pagoda.common.models.families.encoders.rotary import layer_rules
from pagoda.common.models.family import PoolUse, fused_linear, linear
from pagoda.common.models.hf_config import HfConfig
from pagoda.common.models.mixers.attention import alibi_slopes
from pagoda.common.models.primitives import Norm
from pagoda.common.models.spec import Activation, Embedding, Layer, Mlp, ModelSpec, Norms, Pooler


def _jina_bert(config: HfConfig) -> ModelSpec:
    config.expect("position_embedding_type", "alibi")
    config.expect("feed_forward_type", "geglu", "reglu")
    config.ignore("classifier_dropout", "tie_word_embeddings", "model_max_length", "hidden_act")
    width = config.size("hidden_size")
    norm = Norm(config.opt("layer_norm_eps", float, 1e-12), kind="layer", bias=True)
    plain = attention(config, width)
    activation: Activation = "relu" if config.need("feed_forward_type", str) == "reglu" else "gelu"
    ffn = Mlp(config.size("intermediate_size"), activation, gated=True, down_bias=True)
    mixer = replace(plain, alibi_slopes=alibi_slopes(plain.heads))
    layer = Layer((mixer,), ffn, Norms(after_mixer=norm, after_ffn=norm), norm_after_add=True)
    return ModelSpec(
        vocab=config.size("vocab_size"),
        width=width,
        layers=(layer,) * config.size("num_hidden_layers"),
        final_norm=None,
        tied=True,
        max_positions=config.size("max_position_embeddings"),
        embedding=Embedding(token_types=config.opt_size("type_vocab_size", 2), norm=norm),
    )


def _pooler(config: HfConfig, use: PoolUse) -> Pooler:
    """Return BERT's pooler; embeddings are means unless the config says otherwise."""
    config.expect("emb_pooler", "mean", "cls")
    kind = config.nullable("emb_pooler", str)
    pooler = encoder_pooler(config, use)
    return replace(pooler, kind="mean") if use == "embed" and kind != "cls" else pooler


_MLP = "[bert.]encoder.layer.{l}.mlp"
_FFN = "layers.{l}.ffn"
JINA_BERT = replace(
    BERT,
    build=_jina_bert,
    rules=(
        *encoder_rules("bert"),
        *fused_linear(f"{_MLP}.gated_layers", f"{_FFN}.gate", f"{_FFN}.up"),
        *linear(f"{_MLP}.wo", f"{_FFN}.down"),
        *linear(f"{_MLP}.layernorm", "layers.{l}.norms.after_ffn"),
    ),
    pooler=_pooler,
)
XLM_ROBERTA = replace(ROBERTA, rules=(*ROBERTA.rules, *layer_rules("roberta", "mixer")))
