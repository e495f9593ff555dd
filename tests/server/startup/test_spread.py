"""A model spread over several devices, from the command line down: XLA's CPU client stands for the TPUs."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from typing import Any

import pytest

pytest.importorskip("flax")

import support.devices.jax_devices  # noqa: F401
from support.checkpoints.tiny_folder import write_model
from support.servers.served import REAL, environment, served, wait_ready

from pagoda.common.errors import ConfigError
from pagoda.common.sampling_params import SamplingParams
from pagoda.server.llm import LLM

PROMPTS = ([5, 17, 3, 80, 41, 2, 9], [60, 33, 21], list(range(20, 41)))
SMALL: dict[str, Any] = {"max_model_len": 32, "max_num_seqs": 2, "max_num_batched_tokens": 16, "block_size": 32}
FLAGS = tuple(word for name, value in SMALL.items() for word in ("--" + name.replace("_", "-"), str(value)))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_model(tmp_path_factory.mktemp("spread") / "tiny"))


def answers(model: str, **settings: Any) -> list[list[int]]:
    """The greedy tokens of every prompt."""
    llm = LLM(model, backend="jax_tpu", disable_log_stats=True, **SMALL, **settings)
    found = ask(llm)
    llm.llm_engine.shutdown()
    return found


def ask(llm: LLM) -> list[list[int]]:
    rules = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    found = llm.generate([{"prompt_token_ids": ids} for ids in PROMPTS], rules, use_tqdm=False)
    return [list(each.outputs[0].token_ids) for each in found]


@pytest.fixture(scope="module")
def alone(model: str) -> list[list[int]]:
    """What one device answers."""
    return answers(model)


@pytest.mark.setting("--tensor-parallel-size")
def test_server_on_two_devices_answers_as_on_one(model: str, alone: list[list[int]]) -> None:
    flags = ("--backend", "jax_tpu", "-tp", "2", "--served-model-name", "m", *FLAGS)
    with served(model, *flags, program=REAL, XLA_FLAGS="--xla_force_host_platform_device_count=2") as (process, url):
        wait_ready(process)
        for prompt, want in zip(PROMPTS, alone):
            asked = {"model": "m", "prompt": prompt, "temperature": 0, "max_tokens": 6, "ignore_eos": True}
            body = json.dumps(asked | {"return_token_ids": True}).encode()
            request = urllib.request.Request(url + "/v1/completions", body, {"content-type": "application/json"})
            with urllib.request.urlopen(request, timeout=60) as response:
                assert json.load(response)["choices"][0]["token_ids"] == want


@pytest.mark.setting("--tensor-parallel-size")
def test_layers_are_sharded_across_devices(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from pagoda.backends.jax_tpu import backend as module

    backends: list[module.JaxBackend] = []
    create = module.create

    def stop(*args: Any, **kwargs: Any) -> None:
        backends.append(create(*args, **kwargs))
        raise ConfigError("enough", "seen")

    monkeypatch.setattr(module, "create", stop)
    with pytest.raises(ConfigError, match="enough: seen"):
        LLM(model, backend="jax_tpu", tensor_parallel_size=2, **SMALL)
    assert backends[0].model.mesh.shape == {"data": 1, "model": 2}
    assert {leaf.sharding.num_devices for leaf in backends[0].model.leaves} == {2}


@pytest.mark.setting("--data-parallel-size")
def test_two_replicas_share_the_requests(model: str, alone: list[list[int]]) -> None:
    llm = LLM(model, backend="jax_tpu", disable_log_stats=True, data_parallel_size=2, tensor_parallel_size=2, **SMALL)
    assert ask(llm) == alone
    core = llm.llm_engine._core
    assert [shard.scheduler.stats().prefix_queries > 0 for shard in core._scheduler.shards] == [True, True]
    assert llm.llm_engine.info.memory.startswith("2 x (weights")
    assert llm.llm_engine.stats.kv_blocks_total == llm.llm_engine.info.num_blocks - 2
    llm.llm_engine.shutdown()


@pytest.mark.setting("--tensor-parallel-size", "--data-parallel-size")
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tensor_parallel_size": 8}, "--tensor-parallel-size: 8 devices cannot share 4 query heads; use 4 or less"),
        ({"tensor_parallel_size": 16}, "--tensor-parallel-size: 16 needs 16 devices, 8 available .cpu.; use at most 8"),
        ({"tensor_parallel_size": 2, "backend": "reference"}, "--tensor-parallel-size: reference runs a model on one"),
        ({"data_parallel_size": 2, "backend": "reference"}, "--data-parallel-size: each replica needs an engine proce"),
        ({"data_parallel_size": 9}, "--data-parallel-size: 9 needs 9 devices, 8 available .cpu.; use at most 8"),
        (
            {"data_parallel_size": 2, "data_parallel_size_local": 1},
            "--data-parallel-size-local: all 2 replicas run on",
        ),
    ],
)
def test_unsupported_parallel_sizes_are_refused(model: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(model, **{"backend": "jax_tpu"} | SMALL | settings)


def test_error_on_a_cpu_names_xla_flags(model: str) -> None:
    words = [sys.executable, *REAL, model, "--port", "0", "--backend", "jax_tpu", "-tp", "2", *FLAGS]
    done = subprocess.run(words, capture_output=True, text=True, env=environment(), check=False)
    assert done.returncode == 2, done.stderr
    (line,) = (each for each in done.stderr.splitlines() if each.startswith("pagoda: error: "))
    assert (
        "--tensor-parallel-size: 2 needs 2 devices, 1 available (cpu); use at most 1, or, for tests, set XLA_" in line
    )
    assert "Traceback" not in done.stderr
