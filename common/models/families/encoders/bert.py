"""BERT and RoBERTa (XLM-RoBERTa, CamemBERT): post-norm encoders with learned positions and token types."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from pagoda.common.models import hf_config
from pagoda.common.models.family import Family, PoolUse, Rename, Rule, classifier, linear
from pagoda.common.models.hf_config import HfConfig
from pagoda.common.models.mixers import Attention
from pagoda.common.models.primitives import Norm
from pagoda.common.models.spec import Dense, Embedding, Layer, Mlp, ModelSpec, Norms, Pooler, TokenHead, TokenSelection

_POOLER: Final = ("fc_size", "num_attention_heads", "num_fc_layers", "size_per_head", "type")
"""`pooler_*` keys of the original release, which its code does not read."""


def encoder(config: HfConfig, *, position_offset: int = 0) -> ModelSpec:
    """Return the encoder. `position_offset`: row of the position table for the first token."""
    width = config.size("hidden_size")
    config.expect("position_embedding_type", "absolute")
    config.expect("attention_bias", True)
    config.ignore("classifier_dropout", "tie_word_embeddings")
    config.ignore("directionality", *(f"pooler_{name}" for name in _POOLER))
    norm = Norm(config.opt("layer_norm_eps", float, 1e-12), kind="layer", bias=True)
    ffn = Mlp(config.size("intermediate_size"), config.activation("hidden_act", "gelu"), gated=False, bias=True)
    layer = Layer((attention(config, width),), ffn, Norms(after_mixer=norm, after_ffn=norm), norm_after_add=True)
    positions = config.size("max_position_embeddings") - position_offset
    return ModelSpec(
        vocab=config.size("vocab_size"),
        width=width,
        layers=(layer,) * config.size("num_hidden_layers"),
        final_norm=None,
        tied=True,
        max_positions=positions,
        embedding=Embedding(
            positions=positions,
            position_offset=position_offset,
            token_types=config.opt_size("type_vocab_size", 2),
            norm=norm,
        ),
    )


def attention(config: HfConfig, width: int) -> Attention:
    """Return the mixer of a layer."""
    heads = config.size("num_attention_heads")
    head_dim = hf_config.head_dim(config, width, heads)
    return Attention(
        heads=heads,
        kv_heads=heads,
        head_dim=head_dim,
        scale=head_dim**-0.5,
        rope=None,
        qkv_bias=True,
        out_bias=True,
        causal=False,
    )


def encoder_rules(prefix: str) -> tuple[Rule, ...]:
    """Return the weight rules of the layers. `prefix`: optional name prefix, present in models with a head."""
    layer = f"[{prefix}.]encoder.layer.{{l}}"
    ours = "layers.{l}"
    return (
        Rename(f"[{prefix}.]embeddings.word_embeddings.weight", "embed"),
        Rename(f"[{prefix}.]embeddings.position_embeddings.weight", "positions"),
        Rename(f"[{prefix}.]embeddings.token_type_embeddings.weight", "token_types"),
        *linear(f"[{prefix}.]embeddings.LayerNorm", "embed_norm"),
        *linear(f"{layer}.attention.self.query", f"{ours}.mixers.0.q"),
        *linear(f"{layer}.attention.self.key", f"{ours}.mixers.0.k"),
        *linear(f"{layer}.attention.self.value", f"{ours}.mixers.0.v"),
        *linear(f"{layer}.attention.output.dense", f"{ours}.mixers.0.o"),
        *linear(f"{layer}.attention.output.LayerNorm", f"{ours}.norms.after_mixer"),
        *linear(f"{layer}.intermediate.dense", f"{ours}.ffn.up"),
        *linear(f"{layer}.output.dense", f"{ours}.ffn.down"),
        *linear(f"{layer}.output.LayerNorm", f"{ours}.norms.after_ffn"),
    )


def encoder_pooler(config: HfConfig, use: PoolUse) -> Pooler:
    """Return a first-token pooler, with a dense layer before a classifier of whole texts."""
    match use:
        case "embed":
            return Pooler("first")
        case "classify":
            dense = Dense(config.size("hidden_size"), "tanh")
            return Pooler("first", (dense,), classifier(config))
        case "token_classify":
            return Pooler("all", classifier=classifier(config))
        case "reward":
            return Pooler("all")


IGNORED = ("*embeddings.position_ids", "*embeddings.token_type_ids")

BERT = Family(
    encoder,
    encoder_rules("bert"),
    IGNORED,
    pooler=encoder_pooler,
    pooler_rules=(*linear("[bert.]pooler.dense", "pooler.dense.0"), *linear("classifier", "pooler.classifier")),
    heads=("*pooler.dense.*", "classifier.*", "cls.*"),
    generates=False,
)


# RoBERTa: BERT's layers, with positions starting after the padding token's id.


def _roberta(config: HfConfig) -> ModelSpec:
    return encoder(config, position_offset=config.opt("pad_token_id", int, 1) + 1)


ROBERTA = Family(
    _roberta,
    encoder_rules("roberta"),
    IGNORED,
    pooler=encoder_pooler,
    pooler_rules=(
        *linear("classifier.dense", "pooler.dense.0"),
        *linear("classifier.out_proj", "pooler.classifier"),
        *linear("classifier", "pooler.classifier"),
    ),
    heads=("*pooler.dense.*", "classifier.*", "lm_head.*"),
    generates=False,
)


# Models with outputs per token: ColBERT, and BGE-M3, whose heads are in files of their own.


def colbert_pooler(config: HfConfig, use: PoolUse) -> Pooler:
    """Return the projection of every token."""
    config.alias("dim", "colbert_dim", "projection_dim")
    return Pooler("all", (Dense(config.opt_size("dim", 128), bias=False),))


def _bge_m3_pooler(config: HfConfig, use: PoolUse) -> Pooler:
    """Return the first token's embedding, vectors of tokens (without the first) and their lexical weights."""
    begin = config.opt("bos_token_id", int, 0)
    end = config.opt("eos_token_id", int, 2)
    heads = (
        TokenHead(
            "token_embed",
            config.opt_size("colbert_dim", config.size("hidden_size")),
            selection=TokenSelection(skip_first=begin),
        ),
        TokenHead("token_classify", 1, "relu", TokenSelection(skip_first=begin, skip_last=end)),
    )
    return Pooler("first", token_heads=heads)


COLBERT_RULES = (Rename("linear.weight", "pooler.dense.0"), Rename("colbert_linear.weight", "pooler.dense.0"))
COLBERT = replace(BERT, pooler=colbert_pooler, pooler_rules=COLBERT_RULES)
BGE_M3 = replace(
    ROBERTA,
    pooler=_bge_m3_pooler,
    pooler_rules=(*linear("colbert_linear", "pooler.token_embed"), *linear("sparse_linear", "pooler.token_classify")),
    side_files=("colbert_linear.pt", "sparse_linear.pt"),
)
