"""Settings of the engine change the outputs of a tiny random model, or of a fake one."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.checkpoints import tiny_folder
from support.checkpoints.byte_text import byte_tokenizer
from support.engines.fake_engine import build as build_fake
from support.servers.live_server import live_server

from pagoda.common.config.engine import EngineConfig
from pagoda.common.engine.messages import EngineRequest
from pagoda.common.engine.scheduling.scheduler import Scheduler
from pagoda.common.engine.structured_output.token_mask import TokenMaskState
from pagoda.common.errors import RequestError
from pagoda.common.sampling_params import RequestOutputKind, SamplingParams
from pagoda.server.llm_engine import LLMEngine
from pagoda.server.outputs import RequestOutput
from pagoda.server.settings.flags import EngineArgs

VOCAB = 96
CONFIG = tiny_folder.CONFIG | {"vocab_size": VOCAB, "eos_token_id": 2}
PROMPT = [5, 6, 7]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    (path / "config.json").write_text(json.dumps(CONFIG))
    return path


class Tiny:
    """An engine with the tiny model."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        usual = {"load_format": "dummy", "skip_tokenizer_init": True, "num_gpu_blocks_override": 16, "max_logprobs": -1}
        self.engine = LLMEngine.from_engine_args(EngineArgs(folder, **usual | settings))

    def __enter__(self) -> "Tiny":
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.shutdown()

    def answer(self, **params: Any) -> RequestOutput:
        """Return the output of PROMPT, greedy by default."""
        usual = {"temperature": 0.0, "max_tokens": 3, "ignore_eos": True, "detokenize": False}
        self.engine.add_request("r", PROMPT, SamplingParams(**usual | params))
        last = None
        while self.engine.has_unfinished_requests():
            for output in self.engine.step():
                last = output
        assert last is not None
        return last


# --- logprobs ---


def values(position: Any) -> dict[int, float]:
    return {token: each.logprob for token, each in position.items()}


def array(position: Any) -> np.ndarray:
    """Return the logprobs of a position, float64 [V]."""
    by_token = values(position)
    return np.array([by_token[token] for token in range(VOCAB)])


def log_softmax(logits: np.ndarray) -> np.ndarray:
    return logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())


@pytest.mark.setting("--logprobs-mode")
def test_logprobs_modes(folder: Path) -> None:
    params = {"logprobs": -1, "max_tokens": 1, "temperature": 0.5, "top_k": 4, "seed": 3, "logit_bias": {9: 5.0}}
    shown = {}
    for mode in ("raw_logits", "raw_logprobs", "processed_logits", "processed_logprobs"):
        with Tiny(folder, logprobs_mode=mode) as tiny:
            output = tiny.answer(**params, prompt_logprobs=-1).outputs[0]
            assert output.logprobs is not None
            shown[mode] = array(output.logprobs[0])
    raw = shown["raw_logits"]
    np.testing.assert_allclose(shown["raw_logprobs"], log_softmax(raw), atol=1e-5)
    scaled = (raw + 5.0 * (np.arange(VOCAB) == 9)) / 0.5
    kept = scaled >= np.sort(scaled)[-4]
    np.testing.assert_allclose(shown["processed_logits"], np.where(kept, scaled, -np.inf), atol=1e-4)
    np.testing.assert_allclose(np.exp(shown["processed_logprobs"]).sum(), 1.0, atol=1e-5)
    np.testing.assert_allclose(shown["processed_logprobs"][kept], log_softmax(scaled[kept]), atol=1e-4)


@pytest.mark.setting("--logprobs-mode")
def test_prompt_logprobs_as_logits(folder: Path) -> None:
    shown = {}
    for mode in ("raw_logits", "raw_logprobs", "processed_logits"):
        with Tiny(folder, logprobs_mode=mode) as tiny:
            positions = tiny.answer(prompt_logprobs=-1).prompt_logprobs
            assert positions is not None
            shown[mode] = array(positions[1])
    np.testing.assert_allclose(shown["raw_logprobs"], log_softmax(shown["raw_logits"]), atol=1e-5)
    np.testing.assert_array_equal(shown["processed_logits"], shown["raw_logits"])
    assert abs(shown["raw_logprobs"] - shown["raw_logits"]).max() > 0.1


# --- processors, schedulers, seeds ---


class Only:
    """Allows one token: that of --additional-config, or of the request's extra_args."""

    def __init__(self, config: EngineConfig) -> None:
        self.token = config.extension.additional_config["token"]

    def apply(self, logits: Any, token_ids: Any, num_prompt: int, extra_args: Any) -> None:
        assert list(token_ids[:num_prompt]) in (PROMPT, [0]), "the prompt, or that of the warm-up"
        token = extra_args.get("token", self.token)
        kept = logits[token]
        logits[:] = -np.inf
        logits[token] = kept


class Then:
    """Runs after `Only`: replaces the allowed token by the next one."""

    def __init__(self, config: EngineConfig) -> None:
        pass

    def apply(self, logits: Any, token_ids: Any, num_prompt: int, extra_args: Any) -> None:
        if len(token_ids) > num_prompt:
            logits[:] = np.roll(logits, 1)


@pytest.mark.setting("--logits-processors", "--additional-config")
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_processors_run_in_order_on_every_token(folder: Path, temperature: float) -> None:
    names = [f"{__name__}.Only", f"{__name__}.Then"]
    with Tiny(folder, logits_processors=names, additional_config={"token": 11}) as tiny:
        assert tiny.answer(temperature=temperature).outputs[0].token_ids == [11, 12, 12]
        asked = tiny.answer(temperature=temperature, extra_args={"token": 20})
        assert asked.outputs[0].token_ids == [20, 21, 21]


def test_extra_args_that_no_processor_reads_are_logged_once(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Tiny(folder) as tiny:
        for _ in range(2):
            tiny.answer(extra_args={"token": 20})
        with pytest.raises(RequestError, match=r"--logits-processors typical_p$") as error:
            tiny.answer(extra_args={"typical_p": 0.5})
    assert error.value.field == "typical_p"
    assert [each.getMessage() for each in caplog.records if "extra_args" in each.getMessage()] == [
        "extra_args have no effect, no logits processor reads them: 'token'"
    ]


@pytest.mark.setting("--logits-processors")
def test_extra_samplers_are_loaded_by_name(folder: Path) -> None:
    with Tiny(folder, logits_processors=["no_repeat_ngram_size", "typical_p"]) as tiny:
        plain = tiny.answer(temperature=0.0, max_tokens=12).outputs[0].token_ids
        varied = (
            tiny.answer(temperature=0.0, max_tokens=12, extra_args={"no_repeat_ngram_size": 1}).outputs[0].token_ids
        )
        assert len(set(varied)) == 12 > len(set(plain))
        with pytest.raises(RequestError, match=r"^typical_p is 2; it must be from 0 to 1$"):
            tiny.answer(extra_args={"typical_p": 2})
        with pytest.raises(RequestError, match=r"--logits-processors xtc$"):
            tiny.answer(extra_args={"xtc_probability": 0.5})


class Doorkeeper(Scheduler):
    """Refuses prompts longer than --additional-config allows."""

    def add(self, asked: EngineRequest, mask_state: TokenMaskState | None = None) -> None:
        if len(asked.prompt_token_ids) > self.settings["longest"]:
            raise RequestError("prompt", "the doorkeeper says no")
        super().add(asked, mask_state)


@pytest.mark.setting("--scheduler-cls", "--additional-config")
def test_scheduler_cls(folder: Path) -> None:
    name = f"{__name__}.Doorkeeper"
    with Tiny(folder, scheduler_cls=name, additional_config={"longest": 3}) as tiny:
        assert len(tiny.answer().outputs[0].token_ids) == 3
    with (
        Tiny(folder, scheduler_cls=name, additional_config={"longest": 2}) as tiny,
        pytest.raises(RequestError, match="doorkeeper"),
    ):
        tiny.answer()


@pytest.mark.setting("--seed")
def test_seed_applies_to_requests_without_one(folder: Path) -> None:
    def run(seed: int) -> list[list[int]]:
        with Tiny(folder, seed=seed, load_format="dummy") as tiny:
            return [list(tiny.answer(temperature=5.0, max_tokens=8).outputs[0].token_ids) for _ in range(2)]

    first, again, other = run(1), run(1), run(2)
    assert first == again
    assert first[0] != first[1]
    assert first != other


# --- streams ---


def deltas(**settings: Any) -> Iterator[RequestOutput]:
    config = EngineArgs("fake", **settings).create_engine_config()
    engine = LLMEngine(config, build=build_fake, open_text=lambda _: byte_tokenizer())
    params = SamplingParams(max_tokens=8, temperature=0, logprobs=0, output_kind=RequestOutputKind.DELTA)
    engine.add_request("r", "a", params)
    while engine.has_unfinished_requests():
        yield from engine.step()


@pytest.mark.setting("--stream-interval")
@pytest.mark.parametrize(
    ("interval", "texts"),
    [(1, list("bcdefghi")), (3, ["b", "cde", "fgh", "i"]), (100, ["b", "cdefghi"])],
)
def test_stream_interval(interval: int, texts: list[str]) -> None:
    outputs = [output.outputs[0] for output in deltas(stream_interval=interval)]
    assert [output.text for output in outputs] == texts
    assert [len(output.token_ids) for output in outputs] == list(map(len, texts))
    assert [len(output.logprobs or []) for output in outputs] == list(map(len, texts))
    assert outputs[-1].finish_reason == "length"


@pytest.mark.setting("--stream-interval")
def test_abort_returns_buffered_tokens() -> None:
    config = EngineArgs("fake", stream_interval=100).create_engine_config()
    engine = LLMEngine(config, build=build_fake, open_text=lambda _: byte_tokenizer())
    kind = RequestOutputKind.DELTA
    engine.add_request("r", "a", SamplingParams(max_tokens=20, temperature=0, output_kind=kind))
    seen = [output for _ in range(4) for output in engine.step()]
    seen += engine.abort_request("r")
    assert [output.outputs[0].text for output in seen] == ["b", "cde"]
    assert seen[-1].outputs[0].token_ids == list(b"cde")


@pytest.mark.setting("--stream-interval")
def test_messages_of_a_server() -> None:
    with live_server("fake:slow", engine={"stream_interval": 4}) as server:
        raw = server.post("/v1/completions", {"prompt": "a", "max_tokens": 9, "stream": True})[1]
    events = [json.loads(line[6:]) for line in raw.split(b"\n\n") if line.startswith(b"data: {")]
    texts = [event["choices"][0]["text"] for event in events]
    assert "".join(texts) == "bcdefghij"
    assert len(texts) <= 3
    assert texts[0] == "b"
