"""LoRA adapters through LLM on the backends of accelerators, on CPU tensors and XLA's CPU client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pytest
from lora_fixtures import CASES, FOLDER, SMALL, base_model
from support.checkpoints.adapters import ReaderHere, llama_modules, write_adapter
from support.devices.jax_devices import DEVICES
from support.suite.slow_matrix import some, thinned

from pagoda import LLM, SamplingParams
from pagoda.common.errors import ConfigError, RequestError
from pagoda.server.startup import engine as startup
from pagoda.server.vllm.request_types import LoRARequest

assert DEVICES > 1

MODULES = llama_modules(32, 48, 4, 2, 2)
SAVING: dict[str, Any] = {"lora_modules_to_save": ("embed_tokens", "lm_head")}
EVERYTHING = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=-1, logprobs=-1, detokenize=False)


@pytest.fixture(autouse=True)
def cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGODA_TORCH_CUDA_DEVICE", "cpu")
    monkeypatch.setattr(startup, "AdapterReader", ReaderHere)


class MakeEngine(Protocol):
    def __call__(self, folder: Path, **settings: Any) -> LLM: ...


@pytest.fixture
def engine() -> Iterator[MakeEngine]:
    """Makes engines, which are shut down after the test."""
    started: list[LLM] = []

    def make(folder: Path, **settings: Any) -> LLM:
        given = {"dtype": "float32", "enable_lora": True, "max_loras": 3, "max_lora_rank": 8, "max_model_len": 32}
        given |= {"skip_tokenizer_init": True, "max_logprobs": -1, "logprobs_mode": "raw_logits", "max_num_seqs": 4}
        given |= {"max_num_batched_tokens": 16}  # jax_tpu compiles a program for each number of tokens
        started.append(LLM(model=str(folder), **{**given, **settings}))
        return started[-1]

    yield make
    for llm in started:
        llm.shutdown()


def logits(output: Any) -> np.ndarray:
    """The logits of every position of a prompt, float64 [T, V]."""
    positions = [*output.prompt_logprobs[1:], *output.outputs[0].logprobs]
    return np.array([[position[token].logprob for token in range(SMALL["vocab_size"])] for position in positions])


@pytest.mark.parametrize(
    ("backend", "name"),
    [
        *[("torch_cuda", name) for name in CASES],
        *[
            pytest.param("jax_tpu", name, marks=pytest.mark.slow_matrix)
            for name in ("fused", "embeddings", "dora", "saved")
        ],
    ],
)
def test_an_adapter_of_peft_gives_its_logits(engine: MakeEngine, backend: str, name: str, tmp_path: Path) -> None:
    """Beside two others, of which one has other modules, and none."""
    base_model(CASES[name]).save_pretrained(tmp_path / "base")
    saved = json.loads((FOLDER / name / "logits.json").read_text())
    saving = SAVING if name.startswith("saved") else {}
    llm = engine(tmp_path / "base", backend=backend, **saving)
    others: list[LoRARequest | None] = [None, None]
    if CASES[name].model_type == "llama":
        others = [
            LoRARequest(f"other-{seed}", 10 + seed, str(write_adapter(tmp_path / str(seed), MODULES, seed=seed)))
            for seed in range(2)
        ]
    requests = [others[0], LoRARequest(name, 1, str(FOLDER / name)), None, others[1]]
    prompts = [{"prompt_token_ids": saved["prompt"]}] * 4
    outputs = llm.generate(prompts, EVERYTHING, use_tqdm=False, lora_request=requests)
    np.testing.assert_allclose(logits(outputs[1]), np.array(saved["logits"]), atol=3e-5)
    assert np.abs(logits(outputs[2]) - np.array(saved["logits"])).max() > 0.1
    if backend == "jax_tpu":
        return
    reference = engine(tmp_path / "base", backend="reference", **saving)
    expected = reference.generate(prompts, EVERYTHING, use_tqdm=False, lora_request=requests)
    for ours, theirs in zip(outputs, expected):
        np.testing.assert_allclose(logits(ours), logits(theirs), atol=3e-5)


@pytest.mark.parametrize("backend", some(["torch_cuda", "jax_tpu"], ["torch_cuda"]))
def test_adapters_take_turns_in_two_slots(engine: MakeEngine, backend: str, tmp_path: Path) -> None:
    """Each answer is the one of the reference backend, where the adapter is alone; nothing compiles meanwhile."""
    base_model(CASES["all_linear"]).save_pretrained(tmp_path / "base")
    adapters = [
        LoRARequest(f"a{seed}", seed + 1, str(write_adapter(tmp_path / str(seed), MODULES, rank=1 + seed, seed=seed)))
        for seed in range(6)
    ]
    params = SamplingParams(max_tokens=6, temperature=0, detokenize=False, ignore_eos=True)
    chosen = [adapters[index % 6] if index % 4 else None for index in range(18)]
    prompts = [{"prompt_token_ids": [1 + index % 5, *range(3, 9)]} for index in range(18)]
    together = engine(tmp_path / "base", backend=backend, max_loras=2).generate(
        prompts, params, use_tqdm=False, lora_request=chosen
    )
    single = engine(tmp_path / "base", backend="reference", max_loras=1, max_num_seqs=1)
    for prompt, request, output in zip(prompts, chosen, together):
        (alone,) = single.generate(prompt, params, use_tqdm=False, lora_request=request)
        assert output.outputs[0].token_ids == alone.outputs[0].token_ids, request


def test_replicas_share_the_slots(engine: MakeEngine, tmp_path: Path) -> None:
    """Two copies of the model, with three slots for both and six adapters: each answer is that of the adapter alone."""
    base_model(CASES["all_linear"]).save_pretrained(tmp_path / "base")
    adapters = [
        LoRARequest(f"a{seed}", seed + 1, str(write_adapter(tmp_path / str(seed), MODULES, rank=1 + seed, seed=seed)))
        for seed in range(6)
    ]
    params = SamplingParams(max_tokens=6, temperature=0, detokenize=False, ignore_eos=True)
    chosen = [adapters[index % 6] if index % 4 else None for index in range(24)]
    prompts = [{"prompt_token_ids": [1 + index % 5, *range(3, 9)]} for index in range(24)]
    replicas = engine(tmp_path / "base", backend="jax_tpu", data_parallel_size=2, max_num_seqs=2)
    together = replicas.generate(prompts, params, use_tqdm=False, lora_request=chosen)
    assert replicas.llm_engine.stats.recompiles == 0
    assert len(replicas.llm_engine.stats.replicas) == 2
    single = engine(tmp_path / "base", backend="reference", max_loras=1, max_num_seqs=1)
    for prompt, request, output in zip(prompts, chosen, together):
        (alone,) = single.generate(prompt, params, use_tqdm=False, lora_request=request)
        assert output.outputs[0].token_ids == alone.outputs[0].token_ids, request
    bad = LoRARequest("none", 9, str(tmp_path / "none"))
    with pytest.raises(RequestError, match="no such folder"):
        replicas.generate(prompts[0], params, use_tqdm=False, lora_request=bad)
    assert replicas.generate(prompts[0], params, use_tqdm=False)[0].finished


@pytest.mark.setting("--fully-sharded-loras")
@thinned(
    lambda backend, name, fully: backend == "torch_cuda" or (fully and name == "experts"),
    backend=["torch_cuda", "jax_tpu"],
    name=["embeddings", "experts", "dora", "saved"],
    fully=[False, True],
)
def test_ranks_share_adapters(engine: MakeEngine, backend: str, name: str, fully: bool, tmp_path: Path) -> None:
    """Two ranks, each with its part of the matrices, give the logits of one, beside a sequence without an adapter.

    DoRA is refused with --fully-sharded-loras.
    """
    base_model(CASES[name]).save_pretrained(tmp_path / "base")
    saved = json.loads((FOLDER / name / "logits.json").read_text())
    sizes = {"tensor_parallel_size": 2, "max_lora_rank": 32, **(SAVING if name == "saved" else {})}
    llm = engine(tmp_path / "base", backend=backend, fully_sharded_loras=fully, **sizes)
    requests = [None, LoRARequest(name, 1, str(FOLDER / name))]
    prompts = [{"prompt_token_ids": saved["prompt"]}] * 2
    if name == "dora" and fully:
        with pytest.raises(RequestError, match=r"use_dora: .*; drop --fully-sharded-loras"):
            llm.generate(prompts, EVERYTHING, use_tqdm=False, lora_request=requests)
        return
    plain, output = llm.generate(prompts, EVERYTHING, use_tqdm=False, lora_request=requests)
    np.testing.assert_allclose(logits(output), np.array(saved["logits"]), atol=3e-5)
    assert np.abs(logits(plain) - np.array(saved["logits"])).max() > 0.1


@pytest.mark.parametrize(
    ("backend", "settings", "words"),
    [
        ("jax_tpu", {"lora_dtype": "float16"}, "--lora-dtype: jax_tpu does not support float16"),
        ("jax_tpu", {"batch_invariant": True}, "--batch-invariant: jax_tpu has other programs for adapters"),
    ],
)
def test_what_is_missing_is_refused(
    engine: MakeEngine, backend: str, settings: dict[str, Any], words: str, tmp_path: Path
) -> None:
    base_model(CASES["all_linear"]).save_pretrained(tmp_path / "base")
    with pytest.raises(ConfigError, match=words):
        engine(tmp_path / "base", backend=backend, **settings)
