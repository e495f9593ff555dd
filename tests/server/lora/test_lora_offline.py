"""LoRA adapters through LLM on the reference backend: peft's logits, mixed batches, many adapters over few slots."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lora_fixtures import CASES, FOLDER, SMALL, base_model
from support.checkpoints.adapters import llama_modules, write_adapter

from pagoda import LLM, SamplingParams
from pagoda.common.errors import ConfigError, RequestError
from pagoda.server.vllm.request_types import LoRARequest

MODULES = llama_modules(32, 48, 4, 2, 2)
SAVED = {"model.embed_tokens": (64, 32), "lm_head": (64, 32)}
EVERYTHING = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=-1, logprobs=-1, detokenize=False)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The base model of each case."""
    saved: dict[str, Path] = {}
    for name, case in CASES.items():
        saved[name] = tmp_path_factory.mktemp(name)
        base_model(case).save_pretrained(saved[name])
    return saved


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> list[LoRARequest]:
    """Twenty adapters of the small Llama, of several ranks and modules; every fifth is of DoRA, and saves modules."""
    root = tmp_path_factory.mktemp("adapters")
    requests = []
    for index in range(20):
        modules = {
            name: shape for name, shape in MODULES.items() if index % 3 or ("proj" in name[-6:] and "q_" in name)
        }
        saved = SAVED if index % 5 == 3 else None
        dora = index % 5 == 1
        path = write_adapter(root / str(index), modules, rank=1 + index % 8, seed=index, saved=saved, use_dora=dora)
        requests.append(LoRARequest(f"adapter-{index}", index + 1, str(path)))
    return requests


def engine(folder: Path, **settings: Any) -> LLM:
    given = {"dtype": "float32", "enable_lora": True, "max_loras": 9, "max_lora_rank": 8, "max_model_len": 64}
    given |= {"lora_modules_to_save": ("embed_tokens", "lm_head")}
    given |= {"skip_tokenizer_init": True, "max_logprobs": -1, "logprobs_mode": "raw_logits", "backend": "reference"}
    return LLM(model=str(folder), **{**given, **settings})


def logits(output: Any) -> np.ndarray:
    """The logits of every position of a prompt, float64 [T, V]."""
    positions = [*output.prompt_logprobs[1:], *output.outputs[0].logprobs]
    return np.array([[position[token].logprob for token in range(SMALL["vocab_size"])] for position in positions])


def peft_logits(name: str) -> tuple[list[int], np.ndarray]:
    saved = json.loads((FOLDER / name / "logits.json").read_text())
    return saved["prompt"], np.array(saved["logits"])


@pytest.mark.setting("--enable-lora")
@pytest.mark.setting("--lora-modules-to-save")
@pytest.mark.parametrize("name", CASES)
def test_an_adapter_of_peft_gives_its_logits(name: str, folders: dict[str, Path]) -> None:
    prompt, expected = peft_logits(name)
    llm = engine(folders[name])
    adapted, plain = llm.generate(
        [{"prompt_token_ids": prompt}] * 2,
        EVERYTHING,
        use_tqdm=False,
        lora_request=[LoRARequest(name, 1, str(FOLDER / name)), None],
    )
    np.testing.assert_allclose(logits(adapted), expected, atol=3e-5)
    assert np.abs(logits(plain) - expected).max() > 0.1


@pytest.mark.setting("--max-loras")
@pytest.mark.setting("--max-lora-rank")
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_its_logits_are_the_same_beside_others(
    batch_invariant: bool, folders: dict[str, Path], adapters: list[LoRARequest]
) -> None:
    prompt, expected = peft_logits("all_linear")
    llm = engine(folders["all_linear"], batch_invariant=batch_invariant)
    mixed = [*adapters[:4], LoRARequest("all_linear", 100, str(FOLDER / "all_linear")), None, *adapters[4:8]]
    outputs = llm.generate([{"prompt_token_ids": prompt}] * 10, EVERYTHING, use_tqdm=False, lora_request=mixed)
    np.testing.assert_allclose(logits(outputs[4]), expected, atol=3e-5)
    for index, request in enumerate(mixed):
        (alone,) = llm.generate({"prompt_token_ids": prompt}, EVERYTHING, use_tqdm=False, lora_request=request)
        np.testing.assert_allclose(logits(outputs[index]), logits(alone), atol=3e-5)
    different = {tuple(logits(output)[-1].round(3)) for output in outputs}
    assert len(different) == 10


@pytest.mark.setting("--max-cpu-loras")
def test_adapters_take_turns_in_two_slots(folders: dict[str, Path], adapters: list[LoRARequest]) -> None:
    """Decodes of several adapters, and of none, beside chunks of prompts: the answers are those of each alone."""
    params = SamplingParams(max_tokens=12, temperature=0, detokenize=False, ignore_eos=True)
    llm = engine(folders["all_linear"], max_loras=2, max_cpu_loras=3, max_num_seqs=5, max_num_batched_tokens=8)
    chosen = [adapters[index % 20] if index % 7 else None for index in range(60)]
    prompts = [{"prompt_token_ids": [1 + index % 5, *range(3, 9)]} for index in range(60)]
    together = llm.generate(prompts, params, use_tqdm=False, lora_request=chosen)
    single = engine(folders["all_linear"], max_loras=1, max_num_seqs=1)
    for prompt, request, output in zip(prompts, chosen, together):
        (alone,) = single.generate(prompt, params, use_tqdm=False, lora_request=request)
        assert output.outputs[0].token_ids == alone.outputs[0].token_ids, request


def test_outputs_name_the_callers_request(folders: dict[str, Path], adapters: list[LoRARequest]) -> None:
    llm = engine(folders["all_linear"])
    prompts = [{"prompt_token_ids": [1, 2, 3]}] * 2
    first, second = llm.generate(prompts, EVERYTHING, use_tqdm=False, lora_request=[adapters[0], None])
    assert first.lora_request is adapters[0]
    assert first.outputs[0].lora_request is adapters[0]
    assert second.lora_request is None
    assert second.outputs[0].lora_request is None
    llm.llm_engine.add_request("x", prompts[0], EVERYTHING, lora_request=adapters[1])
    outputs = []
    while llm.llm_engine.has_unfinished_requests():
        outputs += llm.llm_engine.step()
    assert {output.lora_request for output in outputs} == {adapters[1]}


def test_a_new_version_is_read_in_place(folders: dict[str, Path], tmp_path: Path) -> None:
    """Its prefixes are not those of the version before."""
    llm = engine(folders["all_linear"])
    path = write_adapter(tmp_path / "a", MODULES, seed=1, saved=SAVED, use_dora=True)
    prompt, params = {"prompt_token_ids": [*range(1, 40)]}, SamplingParams(max_tokens=1, temperature=0, logprobs=-1)

    def answer(**more: Any) -> Any:
        request = LoRARequest("a", 1, str(path), **more)
        if more:
            assert not llm.llm_engine.add_lora(request)
        (output,) = llm.generate(prompt, params, use_tqdm=False, lora_request=request)
        return output

    assert llm.llm_engine.add_lora(LoRARequest("a", 1, str(path)))
    first = answer()
    write_adapter(path, MODULES, seed=2)
    second = answer()
    third = answer(load_inplace=True)
    assert second.num_cached_tokens > 0
    assert third.num_cached_tokens == 0
    wanted, same, other = (
        {token: each.logprob for token, each in output.outputs[0].logprobs[0].items()}
        for output in (first, second, third)
    )
    assert same == pytest.approx(wanted, abs=1e-5)
    assert other != pytest.approx(wanted, abs=1e-2)
    assert llm.llm_engine.list_loras() == {1}
    assert llm.llm_engine.remove_lora(1)
    assert not llm.llm_engine.remove_lora(1)


def test_a_bad_adapter_is_refused_and_the_engine_goes_on(folders: dict[str, Path], tmp_path: Path) -> None:
    llm = engine(folders["all_linear"], lora_modules_to_save=())
    high = write_adapter(tmp_path / "high", MODULES, rank=16)
    prompt = {"prompt_token_ids": [1, 2, 3]}
    saved = LoRARequest("saved", 3, str(FOLDER / "saved"))
    for request, words in (
        (saved, "a copy of .* needs room in every slot; start the server with --lora-modules-to-save"),
        (LoRARequest("high", 1, str(high)), "r is 16, above --max-lora-rank 8"),
        (LoRARequest("none", 2, str(tmp_path / "none")), "no such folder"),
    ):
        with pytest.raises(RequestError, match=words) as raised:
            llm.generate(prompt, EVERYTHING, use_tqdm=False, lora_request=request)
        assert raised.value.field == "lora_request"
    with pytest.raises(RequestError, match="must be a LoRARequest"):
        llm.generate(prompt, EVERYTHING, use_tqdm=False, lora_request=7)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="cannot be pinned"):
        llm.llm_engine.pin_lora(1)
    assert llm.generate(prompt, EVERYTHING, use_tqdm=False)[0].finished


def test_without_the_flag_an_adapter_is_refused(folders: dict[str, Path], adapters: list[LoRARequest]) -> None:
    llm = engine(folders["all_linear"], enable_lora=False, max_loras=1, max_lora_rank=16)
    with pytest.raises(RequestError, match="--enable-lora"):
        llm.generate({"prompt_token_ids": [1]}, EVERYTHING, use_tqdm=False, lora_request=adapters[0])


@pytest.mark.setting("--lora-dtype")
def test_weights_are_rounded_to_the_stated_type(folders: dict[str, Path], adapters: list[LoRARequest]) -> None:
    prompt, rows = {"prompt_token_ids": [4, 5, 6]}, {}
    for dtype in ("auto", "bfloat16"):
        llm = engine(folders["all_linear"], lora_dtype=dtype)
        (output,) = llm.generate(prompt, EVERYTHING, use_tqdm=False, lora_request=adapters[1])
        rows[dtype] = logits(output)
    difference = np.abs(rows["auto"] - rows["bfloat16"]).max()
    assert 1e-4 < difference < 0.2


@pytest.mark.setting("--fully-sharded-loras")
@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"fully_sharded_loras": True}, "--fully-sharded-loras: reference runs a model on one device"),
        ({"max_lora_rank": 7}, "--max-lora-rank: 7 is not one of 1, 8, 16"),
        ({"lora_modules_to_save": ("norm",)}, "--lora-modules-to-save: norm cannot be replaced per request; use embed"),
        ({"max_loras": 0}, "--max-loras: 0 is not positive"),
        ({"max_loras": 4, "max_cpu_loras": 2}, "--max-cpu-loras: 2 is below --max-loras 4"),
        ({"runner": "pooling"}, "--enable-lora: pooling models have no LoRA adapters"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, Any], words: str, folders: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match=words):
        engine(folders["all_linear"], **settings)
