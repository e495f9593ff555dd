"""GTE, Nomic and Jina v3: BERT's post-norm layers with RoPE; those of GTE and Nomic have a gated ffn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final

from pagoda.common.models import hf_config
from pagoda.common.models.families.encoders.bert import COLBERT_RULES, IGNORED, colbert_pooler, encoder_pooler
from pagoda.common.models.family import Family, MergedAdapter, Rename, Reshape, Rule, Zeros, fused_linear, linear
from pagoda.common.models.hf_config import HfConfig
from pagoda.common.models.mixers import Attention
from pagoda.common.models.primitives import Norm
from pagoda.common.models.rope import LinearScaling, Rope
from pagoda.common.models.spec import Embedding, Layer, Mlp, ModelSpec, Moe, Norms, Router


def _gte(config: HfConfig) -> ModelSpec:
    config.expect("position_embedding_type", "rope")
    config.expect("layer_norm_type", "layer_norm")
    config.expect("logn_attention_scale", False)
    config.expect("pack_qkv", True)
    config.ignore("logn_attention_clip1", "unpad_inputs", "use_memory_efficient_attention", "classifier_dropout")
    config.ignore("tie_word_embeddings")
    ffn = Mlp(config.size("intermediate_size"), config.activation("hidden_act", "gelu"), gated=True, bias=True)
    return _model(config, _rope(config, 160_000.0), ffn, bias=True)


def _jina(config: HfConfig) -> ModelSpec:
    config.ignore("classifier_dropout", "tie_word_embeddings")
    config.alias("rope_theta", "rotary_emb_base")  # keys of the first files, here and below
    config.expect("position_embedding_type", "rotary")
    config.expect("use_reg_tokens", False)
    config.ignore("load_trained_adapters", "task_instructions", "truncate_dim", "emb_pooler", *_LORA)
    ffn = Mlp(config.size("intermediate_size"), config.activation("hidden_act", "gelu"), gated=False, bias=True)
    return _model(config, _rope(config, 20_000.0), ffn, bias=True)


_LORA: Final = ("lora_adaptations", "lora_alpha", "lora_rank", "lora_dropout_p", "lora_main_params_trainable")


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
    spec = _model(config, _rope(config, 1000.0), ffn, bias=config.opt("qkv_proj_bias", bool, False))
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


def _rope(config: HfConfig, theta: float) -> Rope:
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


def _model(config: HfConfig, rope: Rope, ffn: Mlp, *, bias: bool) -> ModelSpec:
    """`bias`: of the attention's projections."""
    width = config.size("hidden_size")
    heads = config.size("num_attention_heads")
    norm = Norm(config.opt("layer_norm_eps", float, 1e-12), kind="layer", bias=True)
    attention = Attention(heads, heads, rope.dim, rope.dim**-0.5, rope, qkv_bias=bias, out_bias=bias, causal=False)
    layer = Layer((attention,), ffn, Norms(after_mixer=norm, after_ffn=norm), norm_after_add=True)
    return ModelSpec(
        vocab=config.size("vocab_size"),
        width=width,
        layers=(layer,) * config.size("num_hidden_layers"),
        final_norm=None,
        tied=True,
        max_positions=config.size("max_position_embeddings"),
        embedding=Embedding(token_types=config.opt("type_vocab_size", int, 0), norm=norm),
    )


_QKV: Final = tuple("layers.{l}.mixers.0." + part for part in "qkv")


def _tables(prefix: str) -> tuple[Rule, ...]:
    return (
        Rename(f"[{prefix}.]embeddings.word_embeddings.weight", "embed"),
        Rename(f"[{prefix}.]embeddings.token_type_embeddings.weight", "token_types"),
        *linear(f"[{prefix}.]embeddings.LayerNorm", "embed_norm"),
        *linear(f"[{prefix}.]emb_ln", "embed_norm"),
    )


def _gte_rules(prefix: str) -> tuple[Rule, ...]:
    layer = f"[{prefix}.]encoder.layer.{{l}}"
    return (
        *_tables(prefix),
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
        *_tables(prefix),
        *fused_linear(f"{layer}.{mixer}.Wqkv", *_QKV),
        *linear(f"{layer}.{mixer}.out_proj", "layers.{l}.mixers.0.o"),
        *linear(f"{layer}.norm1", "layers.{l}.norms.after_mixer"),
        *linear(f"{layer}.mlp.fc1", "layers.{l}.ffn.up"),
        *linear(f"{layer}.mlp.fc11", "layers.{l}.ffn.up"),
        *linear(f"{layer}.mlp.fc12", "layers.{l}.ffn.gate"),
        *linear(f"{layer}.mlp.fc2", "layers.{l}.ffn.down"),
        *linear(f"{layer}.norm2", "layers.{l}.norms.after_ffn"),
    )


def _family(build: Callable[[HfConfig], ModelSpec], rules: tuple[Rule, ...], prefix: str) -> Family:
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


NEW = _family(_gte, _gte_rules("new"), "new")
GTE = _family(_gte, _gte_rules("gte"), "gte")
_NOMIC_MLP = "[nomic_bert.]encoder.layers.{l}.mlp"
_MOE = "layers.{l}.ffn"
NOMIC = _family(
    _nomic,
    (
        *layer_rules("nomic_bert", "attn"),
        Rename(f"{_NOMIC_MLP}.router.layer.weight", f"{_MOE}.router"),
        Reshape(f"{_NOMIC_MLP}.experts.mlp.w1", f"{_MOE}.experts.up"),
        Reshape(f"{_NOMIC_MLP}.experts.mlp.w2", f"{_MOE}.experts.down", transpose=True),
        Rename(f"{_NOMIC_MLP}.experts.bias", f"{_MOE}.shared.down_bias"),
        Zeros(f"{_MOE}.shared.up"),
        Zeros(f"{_MOE}.shared.down"),
        Zeros(f"{_MOE}.shared.down_bias"),  # left out of GGUF files
    ),
    "nomic_bert",
)


_DEFAULT_TASK: Final = "text-matching"


def _jina_adapter(config: HfConfig) -> MergedAdapter | None:
    """Return the adapter of the task `jina_task`, by default text matching."""
    tasks = config.opt("lora_adaptations", list, [])
    task = config.nullable("jina_task", str)
    if task is not None and task not in tasks:
        raise config.error("jina_task", f"is {task}; the checkpoint has adapters for {', '.join(tasks) or 'no task'}")
    if not tasks:
        return None
    index = tasks.index(task or _DEFAULT_TASK) if task or _DEFAULT_TASK in tasks else len(tasks) - 1
    return MergedAdapter(index, config.opt("lora_alpha", float, 1.0) / config.opt_size("lora_rank", 4))


JINA_V3 = replace(_family(_jina, layer_rules("roberta", "mixer"), "roberta"), config_adapter=_jina_adapter)
JINA_COLBERT = replace(JINA_V3, pooler=colbert_pooler, pooler_rules=COLBERT_RULES)
