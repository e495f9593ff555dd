"""Many adapters over few slots under load: every answer is that of the request alone, with real computation.

Part adapters of `make test-full` runs 200 adapters on every backend: PAGODA_TEST_ADAPTERS.
"""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest
from lora_fixtures import CASES, base_model
from support.checkpoints.adapters import llama_modules, write_adapter
from support.devices.jax_devices import DEVICES
from support.suite.slow_matrix import some

from pagoda import LLM, SamplingParams
from pagoda.server.vllm.request_types import LoRARequest

assert DEVICES > 1

SLOTS = 8
ADAPTERS = {
    name: int(os.environ.get("PAGODA_TEST_ADAPTERS", usual))
    for name, usual in {"reference": "24", "torch_cuda": "20", "jax_tpu": "12"}.items()
}
MODULES = llama_modules(32, 48, 4, 2, 2)


def engine(folder: Path, backend: str, **settings: Any) -> LLM:
    given = {"dtype": "float32", "enable_lora": True, "max_loras": SLOTS, "max_lora_rank": 8, "max_model_len": 32}
    given |= {"skip_tokenizer_init": True, "max_num_seqs": 10, "max_cpu_loras": 2 * SLOTS, "block_size": 8}
    given |= {"max_num_batched_tokens": 16}
    return LLM(model=str(folder), backend=backend, **{**given, **settings})


@pytest.mark.setting("--max-loras")
@pytest.mark.setting("--max-cpu-loras")
@pytest.mark.parametrize("backend", some(list(ADAPTERS), ["reference", "torch_cuda"]))
def test_answers_are_those_of_each_request_alone(backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three requests of each adapter and some of none, in random order; half of them share their prompts' pages."""
    monkeypatch.setenv("PAGODA_TORCH_CUDA_DEVICE", "cpu")
    base_model(CASES["all_linear"]).save_pretrained(tmp_path / "base")
    adapters = [
        LoRARequest(
            f"a{seed}", seed + 1, str(write_adapter(tmp_path / str(seed), MODULES, rank=1 + seed % 8, seed=seed))
        )
        for seed in range(ADAPTERS[backend])
    ]
    rng = random.Random(3)
    requests: list[LoRARequest | None] = [*adapters * 3, *[None] * (len(adapters) // 4)]
    rng.shuffle(requests)
    common = [rng.randrange(64) for _ in range(16)]
    prompts = [
        {"prompt_token_ids": [*common, rng.randrange(64)] if rng.random() < 0.5 else rng.choices(range(64), k=9)}
        for _ in requests
    ]
    params = [
        SamplingParams(max_tokens=rng.randrange(1, 9), temperature=rng.choice([0, 1]), seed=5, ignore_eos=True)
        for _ in requests
    ]
    loaded = engine(tmp_path / "base", backend)
    together = loaded.generate(prompts, params, use_tqdm=False, lora_request=requests)
    assert loaded.llm_engine.stats.recompiles == 0
    assert loaded.llm_engine.stats.prefix_hits > 0
    loaded.shutdown()
    single = engine(tmp_path / "base", "reference", max_loras=1, max_num_seqs=1, enable_prefix_caching=False)
    different = 0
    for prompt, own, request, output in zip(prompts, params, requests, together):
        (alone,) = single.generate(prompt, own, use_tqdm=False, lora_request=request)
        assert output.outputs[0].token_ids == alone.outputs[0].token_ids, request
        different += request is not None and own.max_tokens > 4
    assert different > len(adapters)
    single.shutdown()
