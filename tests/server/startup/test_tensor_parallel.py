"""torch_cuda on several ranks, from LLM and the command line down: CPUs stand for GPUs, gloo for NCCL."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.checkpoints.tiny_folder import write_model
from support.servers.served import REAL, environment, served, wait_ready
from support.suite.watching import PATIENCE, Children, gone, programs

from pagoda.common.errors import ConfigError, EngineDeadError
from pagoda.common.sampling_params import SamplingParams
from pagoda.server.llm import LLM

PROMPTS = ([5, 17, 3, 80, 41, 2, 9], [60, 33, 21], list(range(20, 41)))
SMALL: dict[str, Any] = {"max_model_len": 48, "max_num_seqs": 2, "max_num_batched_tokens": 16, "block_size": 16}
FLAGS = tuple(word for name, value in SMALL.items() for word in ("--" + name.replace("_", "-"), str(value)))
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
DRAWN = SamplingParams(temperature=1.5, top_k=20, seed=7, max_tokens=8, ignore_eos=True, logprobs=2)


@pytest.fixture(autouse=True)
def cpus_stand_for_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGODA_TORCH_CUDA_DEVICE", "cpu")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # ranks would fight for the cores


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """257 words: rows that pad the vocabulary stand between those of rank 0 and of rank 1."""
    return str(write_model(tmp_path_factory.mktemp("ranks") / "tiny"))


@contextmanager
def loaded(model: str, **settings: Any) -> Iterator[LLM]:
    llm = LLM(model, backend="torch_cuda", dtype="float32", **SMALL | {"disable_log_stats": True} | settings)
    try:
        yield llm
    finally:
        llm.shutdown()


@pytest.fixture
def young() -> Children:
    """Processes started since the test began."""
    return Children()


def ask(llm: LLM, params: SamplingParams) -> list[list[int]]:
    found = llm.generate([{"prompt_token_ids": ids} for ids in PROMPTS], params, use_tqdm=False)
    return [list(each.outputs[0].token_ids) for each in found]


@pytest.mark.setting("--tensor-parallel-size", "--distributed-executor-backend")
@pytest.mark.variable("PAGODA_TORCH_CUDA_DEVICE")
def test_two_ranks_generate_as_one_until_one_dies(model: str, young: Children) -> None:
    with loaded(model) as alone:
        greedy, drawn = ask(alone, GREEDY), ask(alone, DRAWN)
    with loaded(model, tensor_parallel_size=2, distributed_executor_backend="mp", enable_sleep_mode=True) as both:
        assert len(young()) == 1
        assert ask(both, GREEDY) == greedy
        assert ask(both, DRAWN) == drawn
        both.sleep(level=2)
        both.wake_up()
        assert ask(both, GREEDY) == greedy
        with loaded(model) as other:  # an engine of one rank beside it
            assert ask(other, GREEDY) == greedy
        os.kill(young()[0], signal.SIGKILL)
        with pytest.raises(EngineDeadError, match=r"^rank 1 \(CPU\) was killed by SIGKILL"):
            ask(both, GREEDY)
    assert young() == []
    with loaded(model, tensor_parallel_size=2) as again:
        assert ask(again, GREEDY) == greedy
    assert young() == []


def test_two_ranks_share_a_drafter(model: str) -> None:
    """The model guesses for itself: a rank with a wrong part of the drafter's parameters would make wrong guesses."""
    drafter = {"method": "draft_model", "model": model, "num_speculative_tokens": 3, "draft_tensor_parallel_size": 2}
    with loaded(model) as alone:
        greedy = ask(alone, GREEDY)
    with loaded(model, tensor_parallel_size=2, speculative_config=drafter, disable_log_stats=False) as both:
        assert ask(both, GREEDY) == greedy
        counts = {each.name.removeprefix("vllm:spec_decode_"): each for each in both.get_metrics()}
    drafts, accepted = counts["num_draft_tokens"].value, counts["num_accepted_tokens"].value
    assert drafts == accepted > len(PROMPTS)


@pytest.mark.program("ray")
def test_ranks_started_by_ray(model: str, young: Children) -> None:
    with loaded(model, tensor_parallel_size=2, distributed_executor_backend="ray") as both:
        placed = ask(both, GREEDY)
    assert young() == []
    with loaded(model) as alone:
        assert ask(alone, GREEDY) == placed


def test_ranks_shard_experts_and_replicate_a_kv_head(tmp_path: Path) -> None:
    config = {
        **{"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "vocab_size": 97, "hidden_size": 32},
        **{"intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 1},
        **{"max_position_embeddings": 64, "rms_norm_eps": 1e-5, "num_local_experts": 4, "num_experts_per_tok": 2},
        **{"tie_word_embeddings": True, "hidden_act": "silu", "torch_dtype": "float32", "eos_token_id": 2},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    random = {"load_format": "dummy", "skip_tokenizer_init": True}
    with loaded(str(tmp_path), **random) as alone:
        want = ask(alone, DRAWN)
    assert len({token for answer in want for token in answer}) > 8, "a flat answer proves nothing"
    with loaded(str(tmp_path), **random, tensor_parallel_size=2) as both:
        assert ask(both, DRAWN) == want


def test_indivisible_heads_are_refused(model_file: Path, young: Children) -> None:
    with pytest.raises(ConfigError, match=r"^--tensor-parallel-size: 2 ranks cannot share 9 query heads evenly; use 1"):
        LLM(str(model_file), backend="torch_cuda", tensor_parallel_size=2)
    assert young() == []


@pytest.mark.slow_matrix
def test_a_real_model_on_three_ranks(model_file: Path) -> None:
    """A KV head each."""
    question = {"role": "user", "content": "What is the capital of France? Answer in one short sentence."}
    with loaded(str(model_file), tensor_parallel_size=3, max_model_len=64) as llm:
        answer = llm.chat([question], SamplingParams(temperature=0.0, max_tokens=12), use_tqdm=False)
    assert answer[0].outputs[0].text == "The capital of France is Paris."


def serve(model: str, *flags: str) -> Any:
    together = ("--backend", "torch_cuda", "-tp", "2", "--dtype", "float32", "--served-model-name", "m")
    return served(model, *together, *FLAGS, *flags, program=REAL)


def descendants(pid: int) -> list[int]:
    """Processes that a process has started, and those that they have."""
    return [each for child in programs(pid) for each in (child, *descendants(child))]


def post(url: str, **body: Any) -> urllib.request.Request:
    asked = {"model": "m", "prompt": PROMPTS[0], "temperature": 0, "ignore_eos": True} | body
    return urllib.request.Request(
        url + "/v1/completions", json.dumps(asked).encode(), {"content-type": "application/json"}
    )


def test_a_server_names_the_rank_that_was_killed(model: str) -> None:
    with serve(model) as (process, url):
        wait_ready(process)
        engine, rank = descendants(process.pid)
        with urllib.request.urlopen(post(url, max_tokens=30, stream=True), timeout=PATIENCE) as stream:
            assert stream.readline().startswith(b"data: ")
            os.kill(rank, signal.SIGKILL)
            rest = stream.read().decode()
        _, log = process.communicate(timeout=PATIENCE)
        assert "the engine has ended" in rest
        lines = [line for line in log.splitlines() if line.startswith("pagoda: error: ")]
        assert len(lines) == 1
        assert lines[0].startswith("pagoda: error: rank 1 (CPU) was killed by SIGKILL: out of memory?")
        assert process.returncode == 1
        assert gone(engine)
        assert "Traceback" not in log


def test_ctrl_c_ends_all_quietly(model: str) -> None:
    """In a terminal it reaches every process."""
    words = [sys.executable, *REAL, model, "--port", "0", "--backend", "torch_cuda", "-tp", "2", *FLAGS]
    process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True, env=environment(), start_new_session=True)
    assert process.stderr is not None
    try:
        wait_ready(process)
        others = descendants(process.pid)
        assert len(others) == 2
        os.killpg(process.pid, signal.SIGINT)
        _, log = process.communicate(timeout=PATIENCE)
        assert process.returncode == 0
        assert [line for line in log.splitlines() if "INFO" not in line] == []
        assert all(map(gone, others))
    finally:
        process.kill()
        process.wait()
