"""Folders of drafter models with random weights for the tiny model of `tiny_folder`, one of each format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from support.checkpoints.tiny_folder import CONFIG, tensors, write_model


def save(folder: Path, config: dict[str, Any], weights: dict[str, np.ndarray]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def random_of(shapes: dict[str, tuple[int, ...]], seed: int = 3) -> dict[str, np.ndarray]:
    noise = np.random.default_rng(seed)
    return {
        name: noise.normal(scale=shape[-1] ** -0.5, size=shape).astype(np.float32) for name, shape in shapes.items()
    }


WIDTH, VOCAB = CONFIG["hidden_size"], CONFIG["vocab_size"]
LAYER = {name.removeprefix("model."): value for name, value in tensors({**CONFIG, "num_hidden_layers": 1}).items()}


def eagle(folder: Path, **config: Any) -> Path:
    weights = {name: value for name, value in LAYER.items() if name.startswith("layers.")}
    del weights["layers.0.input_layernorm.weight"]
    weights |= random_of({"fc.weight": (WIDTH, 2 * WIDTH), "fc.bias": (WIDTH,)})
    return save(folder, {**CONFIG, "num_hidden_layers": 1, **config}, weights)


def eagle3_weights(attention: str) -> dict[str, np.ndarray]:
    weights = {
        name.replace("layers.0.", attention): value for name, value in LAYER.items() if name.startswith("layers.")
    }
    wide = {
        name: (value.shape[0], 2 * WIDTH)
        for name, value in weights.items()
        if name.split(".")[-2] in ("q_proj", "k_proj", "v_proj")
    }
    weights |= random_of({**wide, "fc.weight": (WIDTH, 3 * WIDTH), "lm_head.weight": (100, WIDTH)})
    norms = {f"{attention}hidden_norm.weight", "norm.weight"}
    weights |= {name: np.ones(WIDTH, np.float32) for name in norms}
    known = np.zeros(VOCAB, np.bool_)
    known[2:202:2] = True
    return weights | {"d2t": np.arange(2, 102), "t2d": known}


def eagle3(folder: Path, **config: Any) -> Path:
    whole = {**CONFIG, "num_hidden_layers": 1, "draft_vocab_size": 100, "architectures": ["LlamaForCausalLMEagle3"]}
    whole |= {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 1]}, **config}
    return save(folder, whole, eagle3_weights("midlayer."))


def speculators(folder: Path, **config: Any) -> Path:
    proposal = {"proposal_type": "greedy", "speculative_tokens": 2}
    whole = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "transformer_layer_config": {**CONFIG, "num_hidden_layers": 1},
        "speculators_config": {"algorithm": "eagle3", "proposal_methods": [proposal]},
        "draft_vocab_size": 100,
        "eagle_aux_hidden_state_layer_ids": [0, 1, 1],
        **config,
    }
    return save(folder, whole, eagle3_weights("layers.0."))


def medusa(folder: Path, **config: Any) -> Path:
    whole = {"model_type": "medusa", "hidden_size": WIDTH, "vocab_size": VOCAB, "num_heads": 3, "num_hidden_layers": 2}
    shapes: dict[str, tuple[int, ...]] = {f"lm_heads.{head}.weight": (VOCAB, WIDTH) for head in range(3)}
    for head in range(3):
        for layer in range(2):
            name = f"blocks.{head}.layers.{layer}"
            shapes |= {f"{name}.weight": (WIDTH, WIDTH), f"{name}.bias": (WIDTH,)}
    return save(folder, {**whole, **config}, random_of(shapes))


def first_medusa(folder: Path, **config: Any) -> Path:
    whole = {"medusa_num_heads": 3, "medusa_num_layers": 1, "base_model_name_or_path": "tiny"}
    shapes: dict[str, tuple[int, ...]] = {f"{head}.1.weight": (VOCAB, WIDTH) for head in range(3)}
    for head in range(3):
        shapes |= {f"{head}.0.linear.weight": (WIDTH, WIDTH), f"{head}.0.linear.bias": (WIDTH,)}
    return save(folder, {**whole, **config}, random_of(shapes))


def mlp_speculator(folder: Path, **config: Any) -> Path:
    whole = {"model_type": "mlp_speculator", "emb_dim": WIDTH, "inner_dim": 24, "vocab_size": VOCAB, "n_predict": 3}
    whole |= {"tie_weights": True, "scale_input": True, "top_k_tokens_per_head": [5, 3, 2], "n_candidates": 5}
    shapes: dict[str, tuple[int, ...]] = {"speculator.proj.0.weight": (24, WIDTH)}
    for stage in range(3):
        name = "speculator.{}." + f"{stage}.weight"
        shapes |= {name.format("emb"): (VOCAB, 24), name.format("head"): (VOCAB, 24), name.format("ln"): (24,)}
        shapes |= {f"speculator.ln.{stage}.bias": (24,)}
        if stage:
            shapes[name.format("proj")] = (24, 24)
    return save(folder, {**whole, **config}, random_of(shapes))


DRAFTERS = {
    "draft_model": lambda folder: write_model(folder, seed=0),
    "eagle": eagle,
    "eagle3": eagle3,
    "speculators": speculators,
    "medusa": medusa,
    "first medusa": first_medusa,
    "mlp_speculator": mlp_speculator,
}
METHODS = {"speculators": "draft_model", "first medusa": "medusa"}
