"""MiniCPM 3: latent attention, with MiniCPM's factors on embedding, updates and logits."""

from __future__ import annotations

from pagoda.common.models.families.latent.deepseek import RULES, latent_attention
from pagoda.common.models.families.llama_block.minicpm import scaled
from pagoda.common.models.family import Family, gated_mlp, pre_norm_decoder, rms_norm
from pagoda.common.models.hf_config import HfConfig
from pagoda.common.models.spec import ModelSpec


def _minicpm3(config: HfConfig) -> ModelSpec:
    layers = config.size("num_hidden_layers")
    width = config.size("hidden_size")
    config.default("q_lora_rank", 768)
    config.default("kv_lora_rank", 256)
    config.default("v_head_dim", width // config.size("num_attention_heads"))
    mixers = [latent_attention(config, interleaved=False)] * layers
    spec = pre_norm_decoder(config, mixers, [gated_mlp(config)] * layers, rms_norm(config, 1e-5), tied=True)
    return scaled(config, spec, embedding=12.0, depth=1.4, base=256)


MINICPM3 = Family(_minicpm3, RULES)
