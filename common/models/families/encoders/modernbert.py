"""ModernBERT: a pre-norm encoder with RoPE, gated ffn and interleaved sliding windows."""

from __future__ import annotations

from dataclasses import replace

from pagoda.common.models import hf_config
from pagoda.common.models.family import Family, PoolUse, Rename, classifier, fused_linear, linear
from pagoda.common.models.hf_config import HfConfig
from pagoda.common.models.mixers import Attention
from pagoda.common.models.primitives import Norm
from pagoda.common.models.spec import Dense, Embedding, Layer, Mlp, ModelSpec, Norms, Pooler


def _modernbert(config: HfConfig) -> ModelSpec:
    layers = config.size("num_hidden_layers")
    config.expect("position_embedding_type", "absolute", "rope")
    config.ignore("layer_norm_eps", "repad_logits_with_grad", "reference_compile", "tie_word_embeddings")
    config.ignore("decoder_bias", "sparse_prediction", "sparse_pred_ignore_index", "deterministic_flash_attn")
    norm = _norm(config)
    ffn = Mlp(
        config.size("intermediate_size"),
        config.activation("hidden_activation", "gelu"),
        gated=True,
        bias=config.opt("mlp_bias", bool, False),
    )
    every = config.opt_size("global_attn_every_n_layers", 3)
    pattern = ["sliding_attention" if layer % every else "full_attention" for layer in range(layers)]
    mixers = _mixers(config, config.layer_types(layers, pattern))
    first = Norms(before_ffn=norm)  # the embedding has a norm
    others = Norms(before_mixer=norm, before_ffn=norm)
    return ModelSpec(
        vocab=config.size("vocab_size"),
        width=config.size("hidden_size"),
        layers=tuple(Layer((mixer,), ffn, others if index else first) for index, mixer in enumerate(mixers)),
        final_norm=norm,
        tied=True,
        max_positions=config.size("max_position_embeddings"),
        embedding=Embedding(norm=norm),
    )


def _norm(config: HfConfig) -> Norm:
    return Norm(config.opt("norm_eps", float, 1e-5), kind="layer", bias=config.opt("norm_bias", bool, False))


def _mixers(config: HfConfig, kinds: tuple[str, ...]) -> list[Attention]:
    heads = config.size("num_attention_heads")
    head_dim = hf_config.head_dim(config, config.size("hidden_size"), heads)
    ropes = hf_config.rope_per_layer_type(
        config,
        head_dim,
        full=config.opt("global_rope_theta", float, 160_000.0),
        sliding=config.opt("local_rope_theta", float, 10_000.0),
    )
    bias = config.opt("attention_bias", bool, False)
    full = Attention(
        heads=heads,
        kv_heads=heads,
        head_dim=head_dim,
        scale=head_dim**-0.5,
        rope=ropes["full_attention"],
        qkv_bias=bias,
        out_bias=bias,
        causal=False,
    )
    reach = config.opt_size("local_attention", 128) // 2  # tokens on each side
    local = replace(full, rope=ropes["sliding_attention"], window=reach + 1)
    return [local if kind == "sliding_attention" else full for kind in kinds]


def _pooler(config: HfConfig, use: PoolUse) -> Pooler:
    """Return a mean or first-token pooler, with a dense layer and norm before a classifier."""
    config.expect("classifier_pooling", "cls", "mean")
    kind = config.opt("classifier_pooling", str, "cls")
    dense = Dense(
        config.size("hidden_size"),
        config.activation("classifier_activation", "gelu"),
        config.opt("classifier_bias", bool, False),
        _norm(config),
    )
    match use:
        case "embed":
            return Pooler("first")
        case "classify":
            return Pooler("mean" if kind == "mean" else "first", (dense,), classifier(config))
        case "token_classify":
            return Pooler("all", (dense,), classifier(config))
        case "reward":
            return Pooler("all")


MODERNBERT = Family(
    _modernbert,
    (
        Rename("[model.]embeddings.tok_embeddings.weight", "embed"),
        *linear("[model.]embeddings.norm", "embed_norm"),
        *fused_linear("[model.]layers.{l}.attn.Wqkv", *(f"layers.{{l}}.mixers.0.{part}" for part in "qkv")),
        *linear("[model.]layers.{l}.attn.Wo", "layers.{l}.mixers.0.o"),
        *linear("[model.]layers.{l}.attn_norm", "layers.{l}.norms.before_mixer"),
        *fused_linear("[model.]layers.{l}.mlp.Wi", "layers.{l}.ffn.gate", "layers.{l}.ffn.up"),
        *linear("[model.]layers.{l}.mlp.Wo", "layers.{l}.ffn.down"),
        *linear("[model.]layers.{l}.mlp_norm", "layers.{l}.norms.before_ffn"),
        *linear("[model.]final_norm", "final_norm"),
    ),
    (),
    pooler=_pooler,
    pooler_rules=(
        *linear("head.dense", "pooler.dense.0"),
        *linear("head.norm", "pooler.dense.0.norm"),
        *linear("classifier", "pooler.classifier"),
    ),
    heads=("head.*", "classifier.*", "decoder.*"),
    generates=False,
)
