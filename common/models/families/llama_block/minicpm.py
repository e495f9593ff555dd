"""MiniCPM and TeleFLM: Llama's block with factors on embedding, updates and logits."""

from __future__ import annotations

from dataclasses import replace

from pagoda.common.models.families.llama_block.llama import RULES, llama
from pagoda.common.models.family import Family
from pagoda.common.models.hf_config import HfConfig
from pagoda.common.models.spec import Embedding, ModelSpec


def _minicpm(config: HfConfig) -> ModelSpec:
    config.expect("num_experts", 0)
    config.expect("sparse_config", None)
    return scaled(config, llama(config, tied=True), embedding=1.0, depth=1.0, base=1)


def scaled(config: HfConfig, spec: ModelSpec, *, embedding: float, depth: float, base: int) -> ModelSpec:
    """Return the spec with factors on embedding, updates and logits. `embedding`, `depth`, `base`: the defaults."""
    config.ignore("mup_denominator")  # training only
    scale = config.opt("scale_depth", float, depth) / len(spec.layers) ** 0.5
    return replace(
        spec,
        layers=tuple(replace(layer, residual_scale=scale) for layer in spec.layers),
        embedding=Embedding(scale=config.opt("scale_emb", float, embedding)),
        logit_scale=config.opt_size("dim_model_base", base) / spec.width,
    )


def _teleflm(config: HfConfig) -> ModelSpec:
    spec = llama(config, tied=False)
    embedding = config.opt("input_mult", float, 1.0)
    output = config.opt("output_mult", float, 1.0)
    output /= config.opt("mup_scale_factor", float, 1.0)
    if not config.opt("use_mup", bool, False):
        return spec
    return replace(spec, embedding=Embedding(scale=embedding), logit_scale=output)


MINICPM = Family(_minicpm, RULES)
TELEFLM = Family(_teleflm, RULES)
