"""Names and layouts of checkpoints whose architectures transformers lacks, from a model with the same maths."""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor

Tensors = dict[str, Tensor]


def renamed(tensors: Tensors, names: Mapping[str, str]) -> Tensors:
    """Replace each part of a name that is a key of `names`."""
    pattern = re.compile("|".join(map(re.escape, sorted(names, key=len, reverse=True))))
    return {pattern.sub(lambda hit: names[hit[0]], name): tensor for name, tensor in tensors.items()}


def fused(tensors: Tensors, parts: tuple[str, ...], target: str, groups: int = 1) -> Tensors:
    """Join the rows of `parts` (in the middle of names) to `target`, group by group."""
    result = dict(tensors)
    for name in [name for name in tensors if parts[0] in name]:
        pieces = [result.pop(name.replace(parts[0], part)).unflatten(0, (groups, -1)) for part in parts]
        result[name.replace(parts[0], target)] = torch.cat(pieces, 1).flatten(0, 1)
    return result


def text_alone(tensors: Tensors) -> Tensors:
    """Return the tensors of a multimodal model's text, as a checkpoint of it alone names them."""
    text = {name: tensor for name, tensor in tensors.items() if name.startswith(("model.language_model.", "lm_head."))}
    return renamed(text, {"model.language_model.": "model."})


QKV = (".q_proj.", ".k_proj.", ".v_proj.")


def internlm2(tensors: Tensors) -> Tensors:
    """Of a Llama with two KV heads."""
    names = {
        "embed_tokens": "tok_embeddings",
        "lm_head": "output",
        "input_layernorm": "attention_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn": "attention",
        "o_proj": "wo",
        "mlp.gate_proj": "feed_forward.w1",
        "mlp.up_proj": "feed_forward.w3",
        "mlp.down_proj": "feed_forward.w2",
    }
    return renamed(fused(tensors, QKV, ".wqkv.", groups=2), names)


def exaone(tensors: Tensors) -> Tensors:
    """Of a Llama."""
    names = {
        "model.embed_tokens": "transformer.wte",
        "model.norm": "transformer.ln_f",
        "model.layers": "transformer.h",
        "input_layernorm": "ln_1",
        "post_attention_layernorm": "ln_2",
        "self_attn.o_proj": "attn.attention.out_proj",
        "self_attn": "attn.attention",
        "gate_proj": "c_fc_0",
        "up_proj": "c_fc_1",
        "down_proj": "c_proj",
    }
    return renamed(tensors, names)


def chatglm(tensors: Tensors) -> Tensors:
    """Of a Glm."""
    names = {
        "model.embed_tokens": "transformer.embedding.word_embeddings",
        "model.norm": "transformer.encoder.final_layernorm",
        "model.layers": "transformer.encoder.layers",
        "lm_head": "transformer.output_layer",
        "self_attn": "self_attention",
        "o_proj": "dense",
        "gate_up_proj": "dense_h_to_4h",
        "down_proj": "dense_4h_to_h",
    }
    return renamed(fused(tensors, QKV, ".query_key_value."), names)


def mimo(tensors: Tensors) -> Tensors:
    """Of a Qwen2, with a layer for drafts."""
    return {**tensors, "model.mtp_layers.0.input_layernorm.weight": torch.ones(32)}


def olmo_hybrid(tensors: Tensors) -> Tensors:
    """transformers writes the convolutions of q, k and v in three equal parts, whatever their channels."""
    result = dict(tensors)
    for name in [name for name in tensors if ".q_conv1d." in name]:
        parts = [name.replace(".q_conv1d.", f".{part}_conv1d.") for part in "qkv"]
        channels = [len(tensors[part.replace("_conv1d", "_proj")]) for part in parts]
        result.update(zip(parts, torch.cat([tensors[part] for part in parts]).split(channels)))
    return result


def single_experts(tensors: Tensors) -> Tensors:
    """Of a model whose experts are stacked: one matrix per tensor."""
    result: Tensors = {}
    for name, tensor in tensors.items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            result[name] = tensor
            continue
        start, _, matrix = name.rpartition(".")
        for expert, values in enumerate(tensor):
            parts = {"down": values} if matrix == "down_proj" else dict(zip(("gate", "up"), values.chunk(2)))
            for part, rows in parts.items():
                result[f"{start}.{expert}.{part}_proj.weight"] = rows
    return result


_BAILING = {
    "embed_tokens": "word_embeddings",
    "self_attn.o_proj": "attention.dense",
    "self_attn.q_norm": "attention.query_layernorm",
    "self_attn.k_norm": "attention.key_layernorm",
    "self_attn": "attention",
    "e_score_correction_bias": "expert_bias",
}


def bailing(tensors: Tensors) -> Tensors:
    """Of a Llama with DeepSeek's experts."""
    return renamed(fused(single_experts(tensors), QKV, ".query_key_value."), _BAILING)


def bailing_v2(tensors: Tensors) -> Tensors:
    """Of a Glm4Moe."""
    return renamed(fused(tensors, QKV, ".query_key_value."), _BAILING)


def bailing_linear(tensors: Tensors) -> Tensors:
    """Of a DeepseekV3 with lightning attention in some layers."""
    return renamed(single_experts(tensors), _BAILING)


def pangu_ultra(tensors: Tensors) -> Tensors:
    """Of a DeepseekV3 with norms after mixer and ffn."""
    names = {
        "post_attention_layernorm": "pre_mlp_layernorm",
        "self_attn.o_proj.0": "self_attn.o_proj",
        "self_attn.o_proj.1": "post_attention_layernorm",
        "mlp.0": "mlp",
        "mlp.1": "post_mlp_layernorm",
    }
    return single_experts(renamed(tensors, names))


def telechat2(tensors: Tensors) -> Tensors:
    """Of a Llama with two KV heads and biases on its last matrices."""
    names = {
        "model.embed_tokens": "transformer.word_embeddings",
        "model.norm": "transformer.ln_f",
        "model.layers": "transformer.h",
        "self_attn.o_proj": "self_attention.dense",
        "self_attn.q_proj": "self_attention.query",
        "self_attn": "self_attention",
    }
    return renamed(fused(tensors, QKV[1:], ".key_value.", groups=2), names)


def baichuan(tensors: Tensors) -> Tensors:
    """Of a Llama."""
    return fused(tensors, QKV, ".W_pack.")


def baichuan2(tensors: Tensors) -> Tensors:
    """Of a Llama whose head is normalised: its rows have other lengths in the file."""
    head = tensors["lm_head.weight"]
    return baichuan({**tensors, "lm_head.weight": head * torch.linspace(0.5, 3.0, len(head))[:, None]})


def qwen1(tensors: Tensors) -> Tensors:
    """Of a Qwen2."""
    names = {
        "model.embed_tokens": "transformer.wte",
        "model.norm": "transformer.ln_f",
        "model.layers": "transformer.h",
        "input_layernorm": "ln_1",
        "post_attention_layernorm": "ln_2",
        "self_attn.o_proj": "attn.c_proj",
        "self_attn": "attn",
        "gate_proj": "w2",
        "up_proj": "w1",
        "down_proj": "c_proj",
    }
    return renamed(fused(tensors, QKV, ".c_attn."), names)


def plamo3(tensors: Tensors) -> Tensors:
    """Of a Qwen3 with norms after mixer and ffn."""
    names = {
        "model.layers": "model.layers.layers",
        "input_layernorm": "pre_mixer_norm",
        "post_attention_layernorm": "pre_mlp_norm",
        "self_attn.o_proj.0": "mixer.o_proj",
        "self_attn.o_proj.1": "post_mixer_norm",
        "self_attn": "mixer",
        "mlp.0": "mlp",
        "mlp.1": "post_mlp_norm",
    }
    joined = fused(fused(tensors, QKV, ".qkv_proj."), (".gate_proj.", ".up_proj."), ".gate_up_proj.")
    offsets = {"post_mixer_norm": 1 / 5, "post_mlp_norm": 5**-1.5}

    def shifted(name: str, tensor: Tensor) -> Tensor:
        return tensor - offsets.get(name.split(".")[-2], 1.0) if "norm" in name else tensor

    return {name: shifted(name, tensor) for name, tensor in renamed(joined, names).items()}


def fairseq2(tensors: Tensors) -> Tensors:
    """Of a Helium."""
    names = {
        "model.embed_tokens": "decoder_frontend.embed",
        "model.norm": "decoder.layer_norm",
        "model.layers": "decoder.layers",
        "lm_head": "final_proj",
        "input_layernorm": "self_attn_layer_norm",
        "post_attention_layernorm": "ffn_layer_norm",
        "self_attn.o_proj": "self_attn.output_proj",
        "mlp.gate_proj": "ffn.gate_proj",
        "mlp.up_proj": "ffn.inner_proj",
        "mlp.down_proj": "ffn.output_proj",
    }
    return renamed(tensors, names)


_STEPS = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


def arctic(tensors: Tensors) -> Tensors:
    """Of a Mixtral whose first layer is dense, the second with a further MLP."""
    names = {"mlp.gate.": "block_sparse_moe.gate.", "mlp.experts.": "block_sparse_moe.experts."}
    names |= {f"mlp.{part}": f"block_sparse_moe.mlp.{name}" for part, name in _STEPS.items()}
    names |= {f"residual.mlp.{part}": f"residual_mlp.{name}" for part, name in _STEPS.items()}
    steps = {f".{part}.weight": f".{name}.weight" for part, name in _STEPS.items()}
    return renamed(renamed(single_experts(tensors), names), steps)


def step3p5(tensors: Tensors) -> Tensors:
    """Of a Step 3.7's text model."""
    result: Tensors = {}
    for name, tensor in tensors.items():
        start = name.removesuffix(".mlp.experts.gate_up_proj")
        if start == name:
            result[name] = tensor
        else:
            result[f"{start}.moe.gate_proj.weight"], result[f"{start}.moe.up_proj.weight"] = tensor.chunk(2, 1)
    names = {
        "mlp.experts.down_proj": "moe.down_proj.weight",
        "mlp.gate.weight": "moe.gate.weight",
        "mlp.gate.e_score_correction_bias": "moe.router_bias",
        "mlp.shared_experts": "share_expert",
    }
    return renamed(result, names)


def minimax_m3(tensors: Tensors) -> Tensors:
    """Of a MiniMaxM3VL's text model."""
    result: Tensors = {}
    for name, tensor in tensors.items():
        start, fused, end = name.partition("gate_up_proj")
        if tensor.ndim == 3:
            start, matrix = name.rsplit(".", 1)
            for expert, values in enumerate(tensor):
                parts = {"w2": values} if matrix == "down_proj" else dict(zip(("w1", "w3"), values.chunk(2)))
                result.update({f"{start}.{expert}.{part}.weight": rows for part, rows in parts.items()})
        elif fused:
            result.update({f"{start}{part}_proj{end}": rows for part, rows in zip(("gate", "up"), tensor.chunk(2))})
        else:
            result[name] = tensor
    names = {f"mlp.{part}": f"block_sparse_moe.{part}" for part in ("experts", "gate.weight", "shared_experts")}
    names["mlp.gate.e_score_correction_bias"] = "block_sparse_moe.e_score_correction_bias"
    return renamed(result, {**names, "indexer.": "index_"})


def jina_bert(tensors: Tensors) -> Tensors:
    """Of a BERT with a gated MLP."""
    inner = {"intermediate.": "mlp.", "output.dense": "mlp.wo", "output.LayerNorm": "mlp.layernorm"}
    attention = {name: tensor for name, tensor in tensors.items() if "attention." in name}
    return renamed({name: tensor for name, tensor in tensors.items() if name not in attention}, inner) | attention


def flash_roberta(tensors: Tensors) -> Tensors:
    """Of an XLM-RoBERTa."""
    parts = (".attention.self.query.", ".attention.self.key.", ".attention.self.value.")
    names = {
        "encoder.layer.": "encoder.layers.",
        "embeddings.LayerNorm": "emb_ln",
        "attention.output.dense": "mixer.out_proj",
        "attention.output.LayerNorm": "norm1",
        "intermediate.dense": "mlp.fc1",
        "output.dense": "mlp.fc2",
        "output.LayerNorm": "norm2",
    }
    return renamed(fused(tensors, parts, ".mixer.Wqkv."), names)
