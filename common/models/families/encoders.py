"""Bidirectional encoders, which only pool.

The families, in the order of this file:

- `BertModel`, `BgeM3EmbeddingModel`, `CamembertModel`, `HF_ColBERT`, `RobertaModel`: BERT and RoBERTa (XLM-RoBERTa,
  CamemBERT): post-norm encoders with learned positions and token types.
- `ColBERTJinaRobertaModel`, `GteModel`, `GteNewModel`, `JinaEmbeddingsV3Model`, `NewModel`, `NomicBertModel`: GTE,
  Nomic and Jina v3: BERT's post-norm layers with RoPE; those of GTE and Nomic have a gated ffn.
- `JinaBertModel`, `XLMRobertaModel`: Jina's BERT with ALiBi (jina-embeddings-v2, jina-reranker-v1), and XLM-RoBERTa as
  jina-reranker-v2 names it.
- `ColBERTModernBertModel`, `ModernBertModel`: ModernBERT: a pre-norm encoder with RoPE, gated ffn and interleaved
  sliding windows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final

from pagoda.common.models import hf_config
from pagoda.common.models.family import (
    Family,
    MergedAdapter,
    PoolUse,
    Rename,
    Reshape,
    Rule,
    Zeros,
    classifier,
    fused_linear,
    linear,
)
from pagoda.common.models.hf_config import HfConfig
from pagoda.common.models.mixers import Attention
from pagoda.common.models.mixers.attention import alibi_slopes
from pagoda.common.models.primitives import Norm
from pagoda.common.models.rope import LinearScaling, Rope
from pagoda.common.models.spec import (
    Activation,
    Dense,
    Embedding,
    Layer,
    Mlp,
    ModelSpec,
    Moe,
    Norms,
    Pooler,
    Router,
    TokenHead,
    TokenSelection,
)

# BERT and RoBERTa.

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


# GTE, Nomic and Jina v3.


def _gte(config: HfConfig) -> ModelSpec:
    config.expect("position_embedding_type", "rope")
    config.expect("layer_norm_type", "layer_norm")
    config.expect("logn_attention_scale", False)
    config.expect("pack_qkv", True)
    config.ignore("logn_attention_clip1", "unpad_inputs", "use_memory_efficient_attention", "classifier_dropout")
    config.ignore("tie_word_embeddings")
    ffn = Mlp(config.size("intermediate_size"), config.activation("hidden_act", "gelu"), gated=True, bias=True)
    return _rotary_model(config, _rotary_rope(config, 160_000.0), ffn, bias=True)


def _jina(config: HfConfig) -> ModelSpec:
    config.ignore("classifier_dropout", "tie_word_embeddings")
    config.alias("rope_theta", "rotary_emb_base")  # Here and below, the second key is that of the first files.
    config.expect("position_embedding_type", "rotary")
    config.expect("use_reg_tokens", False)
    config.ignore("load_trained_adapters", "task_instructions", "truncate_dim", "emb_pooler", *_JINA_LORA)
    ffn = Mlp(config.size("intermediate_size"), config.activation("hidden_act", "gelu"), gated=False, bias=True)
    return _rotary_model(config, _rotary_rope(config, 20_000.0), ffn, bias=True)


_JINA_LORA: Final = ("lora_adaptations", "lora_alpha", "lora_rank", "lora_dropout_p", "lora_main_params_trainable")


def _nomic(config: HfConfig) -> ModelSpec:
    for key, supported in (
        ("causal", False),
        ("expert_choice_router", False),
        ("moe_normalize_expert_weights", False),
        ("num_shared_experts", 0),
        ("parallel_block", False),
        ("prenorm", False),
        ("rotary_emb_fraction", 1.0),
        ("rotary_emb_interleaved", False),
        ("rotary_emb_scale_base", None),
        ("scale_attn_by_inverse_layer_idx", False),
        ("scale_attn_weights", True),
        ("use_rms_norm", False),
    ):
        config.expect(key, supported)
    config.ignore(*_NOMIC_UNUSED)
    for key, older in (
        ("hidden_size", "n_embd"),
        ("num_attention_heads", "n_head"),
        ("num_hidden_layers", "n_layer"),
        ("intermediate_size", "n_inner"),
        ("layer_norm_eps", "layer_norm_epsilon"),
        ("rope_theta", "rotary_emb_base"),
        ("max_position_embeddings", "max_trained_positions"),
    ):
        config.alias(key, older)
    config.default("max_position_embeddings", 2048)
    config.expect("activation_function", "swiglu", "gelu")
    gated = config.opt("activation_function", str, "swiglu") == "swiglu"
    biased = config.opt("mlp_fc1_bias", bool, False)
    inner = config.size("intermediate_size")
    config.expect("mlp_fc2_bias", biased)
    ffn = Mlp(inner, config.activation("hidden_act", "silu" if gated else "gelu"), gated=gated, bias=biased)
    spec = _rotary_model(config, _rotary_rope(config, 1000.0), ffn, bias=config.opt("qkv_proj_bias", bool, False))
    if not (every := config.opt("moe_every_n_layers", int, 0)):
        config.ignore("num_experts", "moe_top_k")
        return spec
    # The bias that all experts share is that of a shared Mlp whose weights are zero.
    expert = replace(ffn, bias=False)
    bias = Mlp(1, "relu", gated=False, down_bias=True)
    router = Router(config.opt_size("moe_top_k", 2), renormalise=False)
    moe = Moe(config.opt_size("num_experts", 8), expert, router, shared=bias)
    layers = (replace(layer, ffn=moe if n % every == 1 else ffn) for n, layer in enumerate(spec.layers))
    return replace(spec, layers=tuple(layers))


_NOMIC_UNUSED: Final = (
    # Implementation and training. Contexts beyond the trained one need --hf-overrides of RoPE.
    *("dense_seq_output", "fused_bias_fc", "fused_dropout_add_ln", "n_positions", "pad_vocab_size_multiple"),
    *("parallel_block_tied_norm", "reorder_and_upcast_attn", "rotary_scaling_factor", "use_xentropy"),
    *("ffn_div", "moe_impl", "moe_resid_pdrop", "add_pooling_layer"),
    *("last_layer_subset", "tie_word_embeddings", "classifier_dropout"),
    *(f"summary_{name}" for name in ("activation", "first_dropout", "proj_to_labels", "type", "use_proj")),
)


def _rotary_rope(config: HfConfig, theta: float) -> Rope:
    """Return RoPE; a fixed NTK scaling is another base, and frequencies divided by factor^(2 / dim)."""
    width = config.size("hidden_size")
    heads = config.size("num_attention_heads")
    head_dim = hf_config.head_dim(config, width, heads)
    section = hf_config.rope_section(config)
    if section is None or section.opt("type", str, section.opt("rope_type", str, "")) != "ntk":
        return hf_config.rope(config, head_dim, theta=theta)
    section.expect("mixed_b", None)
    factor = section.need("factor", float)
    section.finish()
    base = config.opt("rope_theta", float, theta)
    return Rope(base * factor, head_dim, LinearScaling(factor ** (2 / head_dim)))


def _rotary_model(config: HfConfig, rope: Rope, ffn: Mlp, *, bias: bool) -> ModelSpec:
    """`bias`: of the attention's projections."""
    heads = config.size("num_attention_heads")
    norm = Norm(config.opt("layer_norm_eps", float, 1e-12), kind="layer", bias=True)
    attention = Attention(heads, heads, rope.dim, rope.dim**-0.5, rope, qkv_bias=bias, out_bias=bias, causal=False)
    return _post_norm_model(config, attention, ffn, norm, token_types=config.opt("type_vocab_size", int, 0))


def _post_norm_model(config: HfConfig, mixer: Attention, ffn: Mlp, norm: Norm, *, token_types: int) -> ModelSpec:
    """Return an encoder of equal layers, each of whose sums is normalised, and whose embeddings have no positions."""
    layer = Layer((mixer,), ffn, Norms(after_mixer=norm, after_ffn=norm), norm_after_add=True)
    return ModelSpec(
        vocab=config.size("vocab_size"),
        width=config.size("hidden_size"),
        layers=(layer,) * config.size("num_hidden_layers"),
        final_norm=None,
        tied=True,
        max_positions=config.size("max_position_embeddings"),
        embedding=Embedding(token_types=token_types, norm=norm),
    )


_QKV: Final = tuple("layers.{l}.mixers.0." + part for part in "qkv")


def _rotary_tables(prefix: str) -> tuple[Rule, ...]:
    return (
        Rename(f"[{prefix}.]embeddings.word_embeddings.weight", "embed"),
        Rename(f"[{prefix}.]embeddings.token_type_embeddings.weight", "token_types"),
        *linear(f"[{prefix}.]embeddings.LayerNorm", "embed_norm"),
        *linear(f"[{prefix}.]emb_ln", "embed_norm"),
    )


def _gte_rules(prefix: str) -> tuple[Rule, ...]:
    layer = f"[{prefix}.]encoder.layer.{{l}}"
    return (
        *_rotary_tables(prefix),
        *fused_linear(f"{layer}.attention.qkv_proj", *_QKV),
        *linear(f"{layer}.attention.o_proj", "layers.{l}.mixers.0.o"),
        *linear(f"{layer}.attn_ln", "layers.{l}.norms.after_mixer"),
        *fused_linear(f"{layer}.mlp.up_gate_proj", "layers.{l}.ffn.up", "layers.{l}.ffn.gate"),
        *linear(f"{layer}.mlp.down_proj", "layers.{l}.ffn.down"),
        *linear(f"{layer}.mlp_ln", "layers.{l}.norms.after_ffn"),
        Zeros("layers.{l}.ffn.up_bias"),
        Zeros("layers.{l}.ffn.gate_bias"),
    )


def layer_rules(prefix: str, mixer: str) -> tuple[Rule, ...]:
    """Return the weight rules of embeddings and layers as flash-attention's encoders name them."""
    layer = f"[{prefix}.]encoder.layers.{{l}}"
    return (
        *_rotary_tables(prefix),
        *fused_linear(f"{layer}.{mixer}.Wqkv", *_QKV),
        *linear(f"{layer}.{mixer}.out_proj", "layers.{l}.mixers.0.o"),
        *linear(f"{layer}.norm1", "layers.{l}.norms.after_mixer"),
        *linear(f"{layer}.mlp.fc1", "layers.{l}.ffn.up"),
        *linear(f"{layer}.mlp.fc11", "layers.{l}.ffn.up"),
        *linear(f"{layer}.mlp.fc12", "layers.{l}.ffn.gate"),
        *linear(f"{layer}.mlp.fc2", "layers.{l}.ffn.down"),
        *linear(f"{layer}.norm2", "layers.{l}.norms.after_ffn"),
    )


def _rotary_family(build: Callable[[HfConfig], ModelSpec], rules: tuple[Rule, ...], prefix: str) -> Family:
    return Family(
        build,
        rules,
        IGNORED,
        pooler=encoder_pooler,
        pooler_rules=(
            *linear(f"[{prefix}.]pooler.dense", "pooler.dense.0"),
            *linear("classifier.dense", "pooler.dense.0"),
            *linear("classifier.out_proj", "pooler.classifier"),
            *linear("classifier", "pooler.classifier"),
        ),
        heads=("*pooler.dense.*", "classifier.*", "lm_head.*", "cls.*"),
        generates=False,
    )


NEW = _rotary_family(_gte, _gte_rules("new"), "new")
GTE = _rotary_family(_gte, _gte_rules("gte"), "gte")
_NOMIC_MLP = "[nomic_bert.]encoder.layers.{l}.mlp"
_NOMIC_MOE = "layers.{l}.ffn"
NOMIC = _rotary_family(
    _nomic,
    (
        *layer_rules("nomic_bert", "attn"),
        Rename(f"{_NOMIC_MLP}.router.layer.weight", f"{_NOMIC_MOE}.router"),
        Reshape(f"{_NOMIC_MLP}.experts.mlp.w1", f"{_NOMIC_MOE}.experts.up"),
        Reshape(f"{_NOMIC_MLP}.experts.mlp.w2", f"{_NOMIC_MOE}.experts.down", transpose=True),
        Rename(f"{_NOMIC_MLP}.experts.bias", f"{_NOMIC_MOE}.shared.down_bias"),
        Zeros(f"{_NOMIC_MOE}.shared.up"),
        Zeros(f"{_NOMIC_MOE}.shared.down"),
        Zeros(f"{_NOMIC_MOE}.shared.down_bias"),  # GGUF files leave this tensor out.
    ),
    "nomic_bert",
)


_JINA_DEFAULT_TASK: Final = "text-matching"


def _jina_adapter(config: HfConfig) -> MergedAdapter | None:
    """Return the adapter of the task `jina_task`, by default text matching."""
    tasks = config.opt("lora_adaptations", list, [])
    task = config.nullable("jina_task", str)
    if task is not None and task not in tasks:
        raise config.error("jina_task", f"is {task}; the checkpoint has adapters for {', '.join(tasks) or 'no task'}")
    if not tasks:
        return None
    index = tasks.index(task or _JINA_DEFAULT_TASK) if task or _JINA_DEFAULT_TASK in tasks else len(tasks) - 1
    return MergedAdapter(index, config.opt("lora_alpha", float, 1.0) / config.opt_size("lora_rank", 4))


JINA_V3 = replace(_rotary_family(_jina, layer_rules("roberta", "mixer"), "roberta"), config_adapter=_jina_adapter)
JINA_COLBERT = replace(JINA_V3, pooler=colbert_pooler, pooler_rules=COLBERT_RULES)


# Jina's BERT.


def _jina_bert(config: HfConfig) -> ModelSpec:
    config.expect("position_embedding_type", "alibi")
    config.expect("feed_forward_type", "geglu", "reglu")
    config.ignore("classifier_dropout", "tie_word_embeddings", "model_max_length", "hidden_act")
    norm = Norm(config.opt("layer_norm_eps", float, 1e-12), kind="layer", bias=True)
    plain = attention(config, config.size("hidden_size"))
    activation: Activation = "relu" if config.need("feed_forward_type", str) == "reglu" else "gelu"
    ffn = Mlp(config.size("intermediate_size"), activation, gated=True, down_bias=True)
    mixer = replace(plain, alibi_slopes=alibi_slopes(plain.heads))
    return _post_norm_model(config, mixer, ffn, norm, token_types=config.opt_size("type_vocab_size", 2))


def _jina_pooler(config: HfConfig, use: PoolUse) -> Pooler:
    """Return BERT's pooler; embeddings are means unless the config says otherwise."""
    config.expect("emb_pooler", "mean", "cls")
    kind = config.nullable("emb_pooler", str)
    pooler = encoder_pooler(config, use)
    return replace(pooler, kind="mean") if use == "embed" and kind != "cls" else pooler


_JINA_MLP = "[bert.]encoder.layer.{l}.mlp"
_JINA_FFN = "layers.{l}.ffn"
JINA_BERT = replace(
    BERT,
    build=_jina_bert,
    rules=(
        *encoder_rules("bert"),
        *fused_linear(f"{_JINA_MLP}.gated_layers", f"{_JINA_FFN}.gate", f"{_JINA_FFN}.up"),
        *linear(f"{_JINA_MLP}.wo", f"{_JINA_FFN}.down"),
        *linear(f"{_JINA_MLP}.layernorm", "layers.{l}.norms.after_ffn"),
    ),
    pooler=_jina_pooler,
)
XLM_ROBERTA = replace(ROBERTA, rules=(*ROBERTA.rules, *layer_rules("roberta", "mixer")))


# ModernBERT.


def _modernbert(config: HfConfig) -> ModelSpec:
    layers = config.size("num_hidden_layers")
    config.expect("position_embedding_type", "absolute", "rope")
    config.ignore("layer_norm_eps", "repad_logits_with_grad", "reference_compile", "tie_word_embeddings")
    config.ignore("decoder_bias", "sparse_prediction", "sparse_pred_ignore_index", "deterministic_flash_attn")
    norm = _modernbert_norm(config)
    ffn = Mlp(
        config.size("intermediate_size"),
        config.activation("hidden_activation", "gelu"),
        gated=True,
        bias=config.opt("mlp_bias", bool, False),
    )
    every = config.opt_size("global_attn_every_n_layers", 3)
    pattern = ["sliding_attention" if layer % every else "full_attention" for layer in range(layers)]
    mixers = _modernbert_mixers(config, config.layer_types(layers, pattern))
    first = Norms(before_ffn=norm)  # The first layer has no norm before its mixer, as the embedding has one.
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


def _modernbert_norm(config: HfConfig) -> Norm:
    return Norm(config.opt("norm_eps", float, 1e-5), kind="layer", bias=config.opt("norm_bias", bool, False))


def _modernbert_mixers(config: HfConfig, kinds: tuple[str, ...]) -> list[Attention]:
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
    reach = config.opt_size("local_attention", 128) // 2  # Number of tokens on each side.
    local = replace(full, rope=ropes["sliding_attention"], window=reach + 1)
    return [local if kind == "sliding_attention" else full for kind in kinds]


def _modernbert_pooler(config: HfConfig, use: PoolUse) -> Pooler:
    """Return a mean or first-token pooler, with a dense layer and norm before a classifier."""
    config.expect("classifier_pooling", "cls", "mean")
    kind = config.opt("classifier_pooling", str, "cls")
    dense = Dense(
        config.size("hidden_size"),
        config.activation("classifier_activation", "gelu"),
        config.opt("classifier_bias", bool, False),
        _modernbert_norm(config),
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
    pooler=_modernbert_pooler,
    pooler_rules=(
        *linear("head.dense", "pooler.dense.0"),
        *linear("head.norm", "pooler.dense.0.norm"),
        *linear("classifier", "pooler.classifier"),
    ),
    heads=("head.*", "classifier.*", "decoder.*"),
    generates=False,
)
