"""Text models of multimodal checkpoints: tiny ones, saved by transformers with their media towers, against it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from models.cases import tiny
from safetensors.torch import load_file, save_file
from support.checkpoints.byte_text import byte_tokenizer

from pagoda.backends.reference.model.naive.model import NaiveModel
from pagoda.common.models import shapes
from pagoda.common.models.registry import spec_from_config
from pagoda.common.sampling_params import SamplingParams
from pagoda.common.weights.checkpoint import open_checkpoint
from pagoda.common.weights.rules import apply_rules
from pagoda.server.llm import LLM

TOLERANCE = 3e-5
SIZES: dict[str, Any] = {key: value for key, value in tiny.SMALL.items() if key != "pad_token_id"}
VISION: dict[str, Any] = {
    **{"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2},
    **{"image_size": 28, "patch_size": 14},
}
QWEN_VISION: dict[str, Any] = {
    **{"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32},
    **{"deepstack_visual_indexes": [0]},
}


UNUSED = sorted(set(range(tiny.VOCAB)) - set(tiny.tokens()))
"""Tokens that the prompt does not have."""


def multimodal_rope(*section: int, **extra: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 1e3, "mrope_section": list(section), **extra}}


@dataclass(frozen=True)
class Tower:
    """One case. `text`, `vision`: the sections of its config; `outer`: keys beside them."""

    architecture: str
    text: dict[str, Any] = field(default_factory=dict)
    vision: dict[str, Any] = field(default_factory=lambda: VISION)
    outer: dict[str, Any] = field(default_factory=dict)

    def save(self, folder: Path) -> transformers.PreTrainedModel:
        model_class = getattr(transformers, self.architecture)
        sections = {"text_config": {**SIZES, **self.text}, "vision_config": self.vision, **self.outer}
        config = model_class.config_class(**deepcopy(sections))  # the class writes into nested settings
        config._attn_implementation = "eager"
        torch.manual_seed(tiny.hash_of(self.architecture))
        model = model_class(config).float().eval()
        tiny.randomise(model)
        model.save_pretrained(folder)
        return model


TOWERS = (
    Tower("Gemma3ForConditionalGeneration", {"head_dim": 8, "sliding_window": tiny.WINDOW}),
    Tower(
        "Gemma4ForConditionalGeneration",
        {**tiny.PER_LAYER, "global_head_dim": 16, "vocab_size_per_layer_input": tiny.VOCAB},
        {**{key: value for key, value in VISION.items() if key != "image_size"}, "head_dim": 8},
        {"audio_config": None, **dict(zip(("image_token_id", "video_token_id", "audio_token_id"), UNUSED))},
    ),
    Tower(
        "Glm4vForConditionalGeneration",
        {"head_dim": 8, **multimodal_rope(1, 1, 0, partial_rotary_factor=0.5)},
        QWEN_VISION,
    ),
    Tower(
        "Glm4vMoeForConditionalGeneration",
        {**tiny.ROUTED, "head_dim": 8, **multimodal_rope(1, 1, 0, partial_rotary_factor=0.5)},
        QWEN_VISION,
    ),
    Tower("Idefics3ForConditionalGeneration", {"model_type": "llama"}),
    Tower(
        "InternVLForConditionalGeneration",
        {"model_type": "qwen2"},
        {**VISION, "image_size": [28, 28], "patch_size": [14, 14]},
    ),
    Tower(
        "Llama4ForConditionalGeneration",
        {key: value for key, value in tiny.SMALL_LLAMA4.items() if key not in SIZES} | {"num_hidden_layers": 4},
        {**VISION, "vision_output_dim": 32, "projector_input_dim": 16, "projector_output_dim": 16},
    ),
    Tower("LlavaForConditionalGeneration", {"model_type": "llama"}, {**VISION, "model_type": "clip_vision_model"}),
    Tower(
        "Mistral3ForConditionalGeneration",
        {"model_type": "ministral3", "head_dim": 8, "rope_parameters": tiny.GROWING},
        {**VISION, "model_type": "pixtral"},
    ),
    Tower(
        "Mistral3ForConditionalGeneration",
        {
            **{
                "model_type": "mistral4",
                "q_lora_rank": 24,
                "kv_lora_rank": 16,
                "qk_nope_head_dim": 12,
                "v_head_dim": 10,
            },
            **{"qk_rope_head_dim": 8, "num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2},
            **{"moe_intermediate_size": 20, "rope_parameters": tiny.GROWING},
        },
        {**VISION, "model_type": "pixtral"},
    ),
    Tower("Qwen2VLForConditionalGeneration", multimodal_rope(1, 1, 2), {**QWEN_VISION, "embed_dim": 16}),
    Tower("Qwen2_5_VLForConditionalGeneration", multimodal_rope(1, 1, 2), QWEN_VISION),
    Tower(
        "Qwen3VLForConditionalGeneration",
        {"head_dim": 8, **multimodal_rope(2, 1, 1, mrope_interleaved=True)},
        QWEN_VISION,
        {"tie_word_embeddings": True},
    ),
    Tower(
        "Qwen3VLMoeForConditionalGeneration",
        {
            **{"head_dim": 8, "moe_intermediate_size": 20, "num_experts": 4, "num_experts_per_tok": 2},
            **multimodal_rope(2, 1, 1, mrope_interleaved=True),
        },
        QWEN_VISION,
    ),
    *(
        Tower(
            architecture,
            {
                **{key: value for key, value in base.items() if key not in SIZES},
                "num_hidden_layers": 4,
                **multimodal_rope(1, 1, 0, mrope_interleaved=True, partial_rotary_factor=0.5),
            },
            QWEN_VISION,
        )
        for architecture, base in (
            ("Qwen3_5ForConditionalGeneration", tiny.DENSE_NEXT),
            ("Qwen3_5MoeForConditionalGeneration", tiny.NEXT),
        )
    ),
    Tower("SmolVLMForConditionalGeneration", {"model_type": "llama"}),
    Tower(
        "Exaone4_5_ForConditionalGeneration",
        {"model_type": "exaone4_5_text", "sliding_window": tiny.WINDOW, "num_hidden_layers": 5},
        QWEN_VISION,
    ),
    Tower(
        "Gemma4UnifiedForConditionalGeneration",
        {
            **{key: value for key, value in tiny.PER_LAYER.items() if "per_layer" not in key},
            **{"num_kv_shared_layers": 0, "global_head_dim": 16, "num_global_key_value_heads": 1},
            "attention_k_eq_v": True,
        },
        {"mm_embed_dim": 16, "mm_posemb_size": 16, "output_proj_dims": 16, "patch_size": 4},
        {"audio_config": None, **dict(zip(("image_token_id", "video_token_id", "audio_token_id"), UNUSED))},
    ),
    Tower(
        "Lfm2VlForConditionalGeneration",
        {
            **{"model_type": "lfm2", "layer_types": ["conv", "full_attention", "conv"], "num_hidden_layers": 3},
            "block_multiple_of": 16,
        },
        {**VISION, "model_type": "siglip2_vision_model", "num_patches": 4},
    ),
    Tower("Lfm3VlForConditionalGeneration", {**tiny.LFM3, "model_type": "lfm3"}, tiny.LFM3_VISION),
    Tower("MuseGlimmerForConditionalGeneration", tiny.MUSE, tiny.MUSE_VISION, tiny.MUSE_PROJECTOR),
    *(
        Tower(
            architecture,
            {
                **{key: value for key, value in tiny.DENSE_NEXT.items() if key not in SIZES},
                **{"model_type": "qwen3_5_text", "num_hidden_layers": 4},
                **multimodal_rope(1, 1, 0, mrope_interleaved=True, partial_rotary_factor=0.5),
            },
            {**VISION, "insert_layer_id": 0},
            {"insert_layer_id": 0},
        )
        for architecture in ("MiniCPMV4_6ForConditionalGeneration", "MiniCPMV4_7ForConditionalGeneration")
    ),
    Tower(
        "NemotronH_Omni_Reasoning_V3",
        {**tiny.NEMOTRON_H, "model_type": "nemotron_h", "num_hidden_layers": 4},
        {**VISION, "model_type": "radio", "video_temporal_patch_size": 2},
        {"audio_config": None, "projector_hidden_size": 16, "vision_hidden_size": 16},
    ),
    Tower(
        "Step3p7ForConditionalGeneration",
        {
            **{"num_hidden_layers": 3, "head_dim": 8, "sliding_window": tiny.WINDOW, "num_sliding_attention_heads": 6},
            **{"layer_types": ["full_attention", "sliding_attention", "full_attention"]},
            **{"mlp_layer_types": ["dense", "sparse", "sparse"], "n_routed_experts": 6, "num_experts_per_tok": 2},
            **{"moe_intermediate_size": 20, "share_expert_dim": 24, "moe_router_scaling_factor": 1.7},
            **{"swiglu_limits": [0.0, 0.0, 0.5], "swiglu_limits_shared": [0.3, 0.0, 0.4]},
        },
        VISION,
    ),
)


LLAVA = next(tower for tower in TOWERS if tower.architecture.startswith("Llava"))


def ours(folder: Path) -> tiny.Logits:
    checkpoint = open_checkpoint(folder)
    spec, family = spec_from_config(checkpoint.config())
    weights = apply_rules(family.rules, shapes.params(spec), checkpoint.tensors(), family.ignored)
    return NaiveModel(spec, weights, max_len=tiny.TOKENS).logits


@pytest.mark.parametrize("tower", TOWERS, ids=lambda tower: f"{tower.architecture}-{tower.text.get('model_type')}")
def test_the_text_of_a_checkpoint(tower: Tower, tmp_path: Path) -> None:
    model = tower.save(tmp_path)
    # transformers 5.24 cannot run the whole of Llama 4: its output looks for images.
    whole = not isinstance(model, transformers.Llama4ForConditionalGeneration)
    theirs = tiny.logits(model if whole else model.language_model, tiny.tokens())
    assert theirs.std() > 0.1, "a flat answer proves nothing"
    torch.testing.assert_close(ours(tmp_path)(tiny.tokens()), theirs, atol=TOLERANCE, rtol=0)


Names = Callable[[str], str]


def newer(name: str) -> str:
    """transformers' own names of the modules, from 4.52 on."""
    name = name.replace("language_model.lm_head.", "lm_head.").replace("language_model.model.", "model.language_model.")
    return f"model.{name}" if name.startswith(("vision_tower.", "multi_modal_projector.")) else name


def older(name: str) -> str:
    """Those of InternVLChatModel and Kimi-VL."""
    return name.replace("vision_tower.", "vision_model.").replace("multi_modal_projector.", "mlp1.")


@pytest.mark.parametrize("rename", [newer, older])
def test_other_names_of_the_same_modules(rename: Names, tmp_path: Path) -> None:
    LLAVA.save(tmp_path)
    expected = ours(tmp_path)(tiny.tokens())
    file = tmp_path / "model.safetensors"
    tensors = {rename(name): tensor for name, tensor in load_file(file).items()}
    save_file(tensors, file)
    torch.testing.assert_close(ours(tmp_path)(tiny.tokens()), expected, atol=0, rtol=0)


@pytest.mark.setting("--language-model-only")
@pytest.mark.parametrize("only", [False, True])
def test_a_multimodal_checkpoint_is_served(only: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its text, with one line in the log: a warning, unless the flag asks for text alone."""
    model = replace(LLAVA, text={**LLAVA.text, "vocab_size": 257, "eos_token_id": 256}).save(tmp_path)
    byte_tokenizer().backend.save(str(tmp_path / "tokenizer.json"))
    with caplog.at_level(logging.INFO):
        llm = LLM(str(tmp_path), dtype="float32", backend="reference", max_model_len=64, language_model_only=only)
    lines = [record for record in caplog.records if "is served text-only" in record.getMessage()]
    assert [line.levelno for line in lines] == [logging.INFO if only else logging.WARNING]
    prompt = tiny.tokens(12)
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    (answer,) = llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)
    theirs = list(prompt)
    for _ in range(6):
        theirs.append(int(tiny.logits(model, theirs)[-1].argmax()))
    assert answer.outputs[0].token_ids == theirs[12:]
