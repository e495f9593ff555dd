"""Speculative decoding through the Python API and HTTP: the same answers, counted; refused where it cannot be."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.checkpoints.tiny_folder import write_model
from support.devices.jax_devices import DEVICES
from support.servers.live_server import live_server
from support.suite.slow_matrix import some

from pagoda import LLM, SamplingParams
from pagoda.common.errors import ConfigError
from pagoda.common.sampling_params import StructuredOutputsParams
from pagoda.server.bench.online.serve import server_drafts
from pagoda.server.cli.client.http_client import ApiClient
from pagoda.server.cli.main import main
from pagoda.server.vllm.metrics_reader import Counter, Vector

assert DEVICES > 1

NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
SMALL = {"max_model_len": 96, "max_num_batched_tokens": 32, "max_num_seqs": 4, "block_size": 8}
PROMPTS = ["abcabcabcabc", "the cat and the cat", "x"]
PARAMS = {
    "greedy": SamplingParams(temperature=0, max_tokens=40),
    "whole length": SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, logprobs=2),
    "seeded, three answers": SamplingParams(n=3, temperature=0.9, seed=5, max_tokens=24, logprobs=1),
    "filtered": SamplingParams(temperature=0.7, top_k=5, top_p=0.9, min_p=0.02, seed=1, max_tokens=30),
    "penalised": SamplingParams(
        temperature=0.5, seed=2, repetition_penalty=1.2, frequency_penalty=0.4, presence_penalty=0.2, max_tokens=30
    ),
    "repeating": SamplingParams(temperature=0, frequency_penalty=-2.0, max_tokens=60, ignore_eos=True, logprobs=1),
    "repeating, seeded": SamplingParams(n=2, temperature=0.6, seed=8, frequency_penalty=-1.5, max_tokens=50),
    "guided": SamplingParams(
        temperature=0.8, seed=3, max_tokens=30, structured_outputs=StructuredOutputsParams(regex="(ab|ba){3,9}c")
    ),
    "stop string": SamplingParams(temperature=0.4, seed=4, max_tokens=40, stop=["a", "q"], min_tokens=5),
    "prompt logprobs": SamplingParams(temperature=0, max_tokens=10, prompt_logprobs=1, ignore_eos=True),
    "biased": SamplingParams(temperature=0.6, seed=6, max_tokens=20, logit_bias={97: 3.0}, bad_words=["ab"]),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), max_position_embeddings=512)


def answers(llm: LLM) -> dict[str, Any]:
    """Everything that is reported of all requests, which run in one batch; logprobs by their tokens and ranks."""
    prompts = [(name, prompt) for name in PARAMS for prompt in PROMPTS]
    outputs = llm.generate([prompt for _, prompt in prompts], [PARAMS[name] for name, _ in prompts], use_tqdm=False)
    return {
        f"{name}: {prompt}": [
            (
                each.text,
                list(each.token_ids),
                each.finish_reason,
                each.stop_reason,
                [{token: one.rank for token, one in place.items()} for place in each.logprobs or ()],
            )
            for each in output.outputs
        ]
        for (name, prompt), output in zip(prompts, outputs)
    }


@pytest.fixture(scope="module", params=some(["reference", "jax_tpu"], ["reference"]))
def backend(request: pytest.FixtureRequest) -> dict[str, Any]:
    more = {"xla_check_recompilation": True, "xla_cache_path": ""} if request.param == "jax_tpu" else {}
    return {"backend": request.param, "dtype": "float32", **SMALL, **more}


@pytest.fixture(scope="module")
def plain(folder: Path, backend: dict[str, Any]) -> Iterator[dict[str, Any]]:
    llm = LLM(folder, **backend)
    yield answers(llm)
    assert llm.llm_engine.stats.drafts is None
    llm.shutdown()


@pytest.mark.setting("--speculative-config")
@pytest.mark.parametrize("settings", [NGRAM, {"method": "suffix", "suffix_decoding_max_spec_factor": 2.0}])
def test_answers_are_those_without_speculation(
    folder: Path, backend: dict[str, Any], plain: dict[str, Any], settings: dict[str, Any]
) -> None:
    llm = LLM(folder, speculative_config=settings, **backend)
    try:
        assert answers(llm) == plain
        drafts = llm.llm_engine.stats.drafts
        assert drafts is not None
        assert drafts.num_accepted > 20, "drafts were accepted"
        assert drafts.tokens > drafts.num_accepted, "and others rejected"
        assert llm.llm_engine.stats.recompiles == 0
        metrics = {each.name: each for each in llm.get_metrics()}
        counted = metrics["vllm:spec_decode_num_accepted_tokens"]
        assert isinstance(counted, Counter)
        assert counted.value == drafts.num_accepted
        vector = metrics["vllm:spec_decode_num_accepted_tokens_per_pos"]
        assert isinstance(vector, Vector)
        assert sum(vector.values) == drafts.num_accepted
    finally:
        llm.shutdown()


def streamed(raw: bytes) -> str:
    events = [line[6:] for line in raw.decode().splitlines() if line.startswith("data: ") and "[DONE]" not in line]
    return "".join(choice["text"] for event in events for choice in json.loads(event)["choices"])


def test_a_streamed_answer_is_the_whole_one(folder: Path) -> None:
    body = {"model": "fake", "prompt": PROMPTS[0], "frequency_penalty": -2, "seed": 3, "max_tokens": 60}
    engine = {"backend": "reference", "dtype": "float32", **SMALL}
    with live_server(str(folder), engine=engine) as server:
        status, want = server.post("/v1/completions", body)
        assert status == 200
        assert server_drafts(ApiClient(server.url, None, {})) is None
    with live_server(str(folder), engine=engine | {"speculative_config": NGRAM}) as server:
        assert server.post("/v1/completions", body)[1]["choices"] == want["choices"]
        raw = server.response("POST", "/v1/completions", body | {"stream": True}).body
        assert streamed(raw) == want["choices"][0]["text"]
        drafts = server_drafts(ApiClient(server.url, None, {}))
        assert drafts is not None
        assert drafts.num_accepted > 0
        assert drafts.tokens >= drafts.num_accepted


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"method": "eagle", "model": "a/b", "num_speculative_tokens": 2}, "a/b: a/b: no such folder here"),
        (NGRAM | {"num_speculative_tokens": 64}, "num_speculative_tokens is 64, but a step has 32 tokens; use fewer"),
    ],
)
def test_a_start_refuses(folder: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        LLM(folder, backend="reference", speculative_config=settings, **SMALL)
    assert str(error.value).startswith(f"--speculative-config: {message}")


def test_pooling_models_have_no_drafts(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"^--speculative-config: is not supported for pooling models"):
        LLM(folder, backend="reference", runner="pooling", speculative_config=NGRAM)


@pytest.mark.setting("--speculative-config")
def test_disable_by_batch_size(folder: Path) -> None:
    llm = LLM(folder, backend="reference", speculative_config=NGRAM | {"disable_by_batch_size": 2}, **SMALL)
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    try:
        llm.generate([PROMPTS[0]] * 4, params, use_tqdm=False)
        drafts = llm.llm_engine.stats.drafts
        assert drafts is not None
        assert (drafts.tokens, drafts.steps[-1] > 20) == (0, True), "four sequences run in every step"
        llm.generate(PROMPTS[0], params, use_tqdm=False)
        drafts = llm.llm_engine.stats.drafts
        assert drafts is not None
        assert drafts.tokens > 0
    finally:
        llm.shutdown()


def test_bench_reports_acceptance(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    load = ["--num-prompts", "2", "--input-len", "8", "--output-len", "40", "--backend", "reference"]
    small = [word for name, value in SMALL.items() for word in ("--" + name.replace("_", "-"), str(value))]
    words = ["bench", "throughput", "--model", str(folder), *load, *small, "--output-json", str(tmp_path / "out.json")]
    assert main([*words, "--speculative-config", json.dumps({"method": "suffix"})]) == 0
    results = json.loads((tmp_path / "out.json").read_text())
    assert {"spec_decode_num_drafts", "spec_decode_acceptance_length"} <= results.keys()
    assert "Acceptance length:" in capsys.readouterr().out
