"""Drafter models end to end: each checkpoint format through LLM, the same outputs as without, and what is refused."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file, save_file
from support.checkpoints.drafter_folders import DRAFTERS, METHODS, eagle, medusa, mlp_speculator, speculators
from support.checkpoints.tiny_folder import write_model

from pagoda import LLM, EngineArgs, SamplingParams
from pagoda.backends.registry import check_drafters
from pagoda.common.config.groups.parallel import ParallelConfig
from pagoda.common.errors import ConfigError, WeightError
from pagoda.common.models.families.drafters import implied_method
from pagoda.server.settings.drafter import open_drafter

PROMPTS = ["The capital of", "abababab", "x"]
SETTINGS: dict[str, Any] = {"backend": "reference", "dtype": "float32", "max_model_len": 64, "max_num_seqs": 4}
SETTINGS |= {"kv_cache_memory_bytes": 1 << 24, "enforce_eager": True}
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


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


@pytest.mark.parametrize("kind", sorted(DRAFTERS.keys() - {"speculators"}))
def test_a_checkpoint_given_without_a_method_implies_it(kind: str, target: Path, tmp_path: Path):
    settings = {"model": str(DRAFTERS[kind](tmp_path / kind)), "num_speculative_tokens": 2}
    config = EngineArgs(str(target), speculative_config=settings, **SETTINGS).create_engine_config()
    checkpoint = open_drafter(config, config.extension.speculative)
    assert implied_method(checkpoint.config(), checkpoint.names) == METHODS.get(kind, kind)


def test_a_drafter_needs_no_method(target: Path, plain: list[list[int]], tmp_path: Path):
    llm = LLM(model=str(target), speculative_config={"model": str(mlp_speculator(tmp_path))}, **SETTINGS)
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


def test_an_eager_drafter_of_a_model_that_is_not_is_refused(target: Path, tmp_path: Path):
    settings = {"method": "medusa", "model": str(medusa(tmp_path)), "enforce_eager": True}
    with pytest.raises(ConfigError, match="enforce_eager: a drafter runs as the model does; drop it, or use --enforce"):
        LLM(model=str(target), speculative_config=settings, **SETTINGS | {"enforce_eager": False})


def test_ranks_of_backends_without_them_refuse_drafter_models(target: Path, tmp_path: Path):
    settings = {"method": "medusa", "model": str(medusa(tmp_path))}
    with pytest.raises(ConfigError):
        LLM(model=str(target), speculative_config=settings, **(SETTINGS | {"tensor_parallel_size": 2}))


def test_backends_without_drafter_models_refuse_them_by_name():
    with pytest.raises(ConfigError, match=r"method eagle: simulated runs no drafter models; use --backend jax_tpu or"):
        check_drafters("simulated", "eagle", ParallelConfig())


@pytest.mark.parametrize(
    ("backend", "sizes", "named"),
    [
        ("torch_cuda", {"tensor_parallel_size": 2}, None),
        ("reference", {"tensor_parallel_size": 2}, "reference runs drafters on one device; drop --tensor-parallel"),
        ("reference", {"data_parallel_size": 2}, None),  # an engine for each
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
