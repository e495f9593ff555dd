"""Drafter models end to end: each checkpoint format through LLM, the same outputs as without, and what is refused."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from support.tiny_folder import CONFIG, tensors, write_model

from pagoda import LLM, SamplingParams
from pagoda.backends.registry import check_drafters
from pagoda.common.config.groups.parallel import ParallelConfig
from pagoda.common.errors import ConfigError, WeightError

PROMPTS = ["The capital of", "abababab", "x"]
SETTINGS: dict[str, Any] = {"backend": "reference", "dtype": "float32", "max_model_len": 64, "max_num_seqs": 4}
SETTINGS |= {"kv_cache_memory_bytes": 1 << 24, "enforce_eager": True}
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


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


def outputs(llm: LLM) -> list[list[int]]:
    return [list(each.outputs[0].token_ids) for each in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("target") / "tiny", num_hidden_layers=3)


@pytest.fixture(scope="module")
def plain(target: Path) -> list[list[int]]:
    return outputs(LLM(model=str(target), **SETTINGS))


@pytest.mark.setting("--speculative-config")
@pytest.mark.parametrize("kind", DRAFTERS)
def test_outputs_are_those_without_a_drafter(kind: str, target: Path, plain: list[list[int]], tmp_path: Path):
    settings = {"method": METHODS.get(kind, kind), "model": str(DRAFTERS[kind](tmp_path / kind))}
    settings["num_speculative_tokens"] = 3
    llm = LLM(model=str(target), speculative_config=settings, **SETTINGS)
    assert outputs(llm) == plain


REFUSED: dict[str, tuple[str, dict[str, Any], dict[str, Any], type[Exception], str]] = {
    "vocabulary": ("draft_model", {"vocab_size": 300}, {}, ConfigError, "has 300 tokens, the model's 257"),
    "width": ("eagle", {"hidden_size": 64}, {}, ConfigError, "hidden_size is 64, but the model's is 32"),
    "unknown key": ("eagle", {"rotates_twice": True}, {}, ConfigError, "rotates_twice"),
    "layers": ("eagle3", {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}}, {}, ConfigError, "has 3"),
    "type": ("speculators", {"speculators_model_type": "dflash"}, {}, ConfigError, "'dflash' is not supported"),
    "key of the format": ("speculators", {"fuses": 1}, {}, ConfigError, "key fuses is unknown"),
    "too many": ("medusa", {}, {"num_speculative_tokens": 4}, ConfigError, "the drafter guesses 3 tokens"),
    "number": ("eagle", {}, {"num_speculative_tokens": None}, ConfigError, "needs num_speculative_tokens"),
    "ranks": (
        "medusa",
        {},
        {"draft_tensor_parallel_size": 2},
        ConfigError,
        "is sharded as the model is",
    ),
    "quantisation": ("medusa", {}, {"quantization": "fp8"}, ConfigError, "as its checkpoint has them"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused_by_name(name: str, target: Path, tmp_path: Path):
    kind, config, changes, error, message = REFUSED[name]
    write = (lambda folder, **config: write_model(folder, **config)) if kind == "draft_model" else DRAFTERS[kind]
    folder = write(tmp_path / kind, **config)
    settings = {"method": METHODS.get(kind, kind), "model": str(folder), "num_speculative_tokens": 3, **changes}
    with pytest.raises(error, match=message):
        LLM(model=str(target), speculative_config=settings, **SETTINGS)


def test_a_drafter_without_a_tensor_is_refused(target: Path, tmp_path: Path):
    folder = eagle(tmp_path)
    weights = load_file(folder / "model.safetensors")
    del weights["layers.0.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    settings = {"method": "eagle", "model": str(folder), "num_speculative_tokens": 3}
    with pytest.raises(WeightError, match=r"lacks .*mlp.up_proj.weight"):
        LLM(model=str(target), speculative_config=settings, **SETTINGS)


@pytest.mark.parametrize("changes", [{"tensor_parallel_size": 2}, {"enable_prompt_embeds": True}])
def test_settings_without_drafter_models_are_refused(changes: dict[str, Any], target: Path, tmp_path: Path):
    settings = {"method": "medusa", "model": str(medusa(tmp_path))}
    with pytest.raises(ConfigError):
        LLM(model=str(target), speculative_config=settings, **(SETTINGS | changes))


def test_backends_without_drafter_models_refuse_them_by_name():
    with pytest.raises(ConfigError, match=r"method eagle: simulated runs no drafter models; use --backend jax_tpu or"):
        check_drafters("simulated", "eagle", ParallelConfig())


@pytest.mark.parametrize(
    ("backend", "sizes", "named"),
    [
        ("torch_cuda", {"tensor_parallel_size": 2}, "torch_cuda runs drafters on one device; drop --tensor-parallel"),
        ("reference", {"data_parallel_size": 2}, "reference runs drafters on one device; drop --data-parallel-size"),
        ("jax_tpu", {"nnodes": 2}, "jax_tpu runs drafters on one host; drop --nnodes"),
        ("jax_tpu", {"tensor_parallel_size": 2, "data_parallel_size": 2}, None),
    ],
)
def test_devices_of_a_drafter(backend: str, sizes: dict[str, int], named: str | None):
    with nullcontext() if named is None else pytest.raises(ConfigError, match=named):
        check_drafters(backend, "eagle", ParallelConfig(**sizes))


def test_the_speculators_format_states_the_number_of_drafts(target: Path, tmp_path: Path):
    settings = {"model": str(speculators(tmp_path))}
    llm = LLM(model=str(target), speculative_config=settings, **SETTINGS)
    outputs(llm)
    accepted = next(each for each in llm.get_metrics() if each.name == "vllm:spec_decode_num_accepted_tokens_per_pos")
    assert len(accepted.values) == 2
