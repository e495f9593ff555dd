"""An encoder-decoder model through the Python API and over HTTP."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from models.cases import tiny
from support.checkpoints.byte_text import framed_tokenizer
from support.servers.live_server import live_server
from support.suite.rows import each_row

from pagoda.common.beam_search import BeamSearchParams
from pagoda.common.errors import ConfigError, ModelError, RequestError
from pagoda.common.sampling_params import SamplingParams
from pagoda.server.llm import LLM
from pagoda.server.settings.flags import EngineArgs
from pagoda.server.settings.resolve import Resolved, resolve

START, EOS = 3, 256
CONFIG: dict[str, Any] = {
    **{"vocab_size": 257, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "n_positions": 48},
    **{"relative_attention_num_buckets": 8, "relative_attention_max_distance": 20, "eos_token_id": EOS},
    **{"decoder_start_token_id": START, "dtype": "float32"},
}
ENCODE = framed_tokenizer().encode
"""It ends texts with the token EOS, as the tokenizers of such models do."""


@dataclass(frozen=True)
class Saved:
    folder: Path
    model: transformers.PreTrainedModel

    def greedy(self, encoder: list[int], decoder: list[int], count: int) -> list[int]:
        """What transformers generates."""
        ids = self.model.generate(
            torch.tensor([encoder]), decoder_input_ids=torch.tensor([decoder]), max_new_tokens=count, do_sample=False
        )
        return ids[0, len(decoder) :].tolist()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    folder = tmp_path_factory.mktemp("t5")
    model = tiny.Tiny("t5", "T5ForConditionalGeneration", base=CONFIG).save(folder)
    framed_tokenizer().backend.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.role }}: {{ m.content }};{% endfor %}")
    return Saved(folder, model)


def settings(**more: Any) -> dict[str, Any]:
    return {"backend": "reference", "dtype": "float32", "max_model_len": 40, "max_num_seqs": 4} | more


@pytest.fixture(scope="module")
def llm(saved: Saved) -> Iterator[LLM]:
    llm = LLM(str(saved.folder), **settings())
    yield llm
    llm.shutdown()


GREEDY = SamplingParams(temperature=0, max_tokens=6)


def test_a_prompt_is_what_the_encoder_reads(saved: Saved, llm: LLM) -> None:
    texts = ["abc", "a longer text for the encoder"]
    outputs = llm.generate(texts, GREEDY, use_tqdm=False)
    for text, output in zip(texts, outputs):
        assert (output.encoder_prompt, output.encoder_prompt_token_ids) == (text, ENCODE(text))
        assert (output.prompt, output.prompt_token_ids) == (None, [START])
        assert output.outputs[0].token_ids == saved.greedy(ENCODE(text), [START], 6)
    (cut,) = llm.generate("abcdef", SamplingParams(max_tokens=1, truncate_prompt_tokens=4), use_tqdm=False)
    assert cut.encoder_prompt_token_ids == ENCODE("abcdef")[-4:]


@each_row(
    ("decoder", "ids"),
    [
        (None, [START]),
        ("xy", [START, ord("x"), ord("y")]),
        ({"prompt_token_ids": [7, 8]}, [START, 7, 8]),
        ({"prompt_token_ids": [START, 9]}, [START, 9]),
    ],
)
def test_explicit_prompts_of_encoder_and_decoder(saved: Saved, llm: LLM, decoder: Any, ids: list[int]) -> None:
    for encoder in ("abc", {"prompt": "abc"}, {"prompt_token_ids": ENCODE("abc")}):
        prompt = {"encoder_prompt": encoder, "decoder_prompt": decoder}
        (output,) = llm.generate([prompt], GREEDY, use_tqdm=False)
        assert output.encoder_prompt_token_ids == ENCODE("abc")
        assert output.prompt_token_ids == ids
        assert output.outputs[0].token_ids == saved.greedy(ENCODE("abc"), ids, 6)


@each_row(
    ("prompt", "field", "words"),
    [
        (
            [5] * 49,
            "prompt",
            "maximum context length is 48 tokens for the encoder.* 49 tokens; shorten it to 48 or set",
        ),
        ("x" * 100_000, "prompt", "maximum context length is 48 tokens.* truncate_prompt_tokens"),
        ([], "prompt", "the encoder's prompt is empty"),
        ([999], "prompt", "token id 999 is out of vocabulary"),
        ({"encoder_prompt": "a", "decoder_prompt": [5] * 40}, "prompt", "maximum context length is 40 tokens"),
        ({"encoder_prompt": "a", "multi_modal_data": {}}, "multi_modal_data", "beside 'encoder_prompt' and 'deco"),
    ],
    ids=["long", "text", "empty", "unknown token", "long decoder prompt", "unknown key"],
)
def test_bad_prompts(llm: LLM, prompt: Any, field: str, words: str) -> None:
    with pytest.raises(RequestError, match=words) as error:
        llm.generate([prompt], GREEDY, use_tqdm=False)
    assert error.value.field == field


def test_beam_search_is_refused(llm: LLM) -> None:
    with pytest.raises(RequestError, match="beam search does not support encoder-decoder models"):
        llm.beam_search(["abc"], BeamSearchParams(beam_width=2, max_tokens=2))


def test_over_http(saved: Saved) -> None:
    expected = saved.greedy(ENCODE("abc"), [START], 5)
    chat = "user: abc;"
    with live_server(str(saved.folder), engine=settings()) as server:
        body = {"model": "fake", "temperature": 0, "max_tokens": 5, "return_token_ids": True}
        _, answer = server.post("/v1/completions", body | {"prompt": "abc"})
        assert answer["choices"][0]["token_ids"] == expected
        assert answer["usage"]["prompt_tokens"] == len("abc") + 2
        messages = [{"role": "user", "content": "abc"}]
        _, answer = server.post("/v1/chat/completions", body | {"messages": messages})
        assert answer["choices"][0]["token_ids"] == saved.greedy([*chat.encode()], [START], 5)
        assert answer["usage"]["prompt_tokens"] == len(chat) + 1
        status, refused = server.post("/v1/completions", body | {"prompt": [5] * 49})
        assert "48 tokens for the encoder" in refused["error"]["message"]
        assert (status, refused["error"]["param"]) == (400, "prompt")


def resolved(folder: Path, **more: Any) -> Resolved:
    return resolve(EngineArgs(str(folder), **settings(**more)).create_engine_config(), "llm")


def test_defaults_and_what_is_lost(saved: Saved, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "pagoda"):
        found = resolved(saved.folder, max_num_seqs=None)
    assert "T5ForConditionalGeneration" in caplog.text
    assert "Lost: prefix caching, prompt embeddings, beam search, speed" in caplog.text
    assert not found.limits.prefix_caching
    assert found.limits.max_num_seqs == 32


@each_row(
    ("words", "more"),
    [
        ("--enable-prefix-caching: ", {"enable_prefix_caching": True}),
        ("--enable-prompt-embeds: ", {"enable_prompt_embeds": True}),
        ("is an encoder-decoder model", {"runner": "pooling"}),
        ("is an encoder-decoder model", {"convert": "embed"}),
        ("--backend: ", {"backend": "torch_cuda"}),
    ],
)
def test_refused_settings(saved: Saved, words: str, more: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGODA_TORCH_CUDA_DEVICE", "cpu")
    with pytest.raises((ConfigError, ModelError), match=words):
        resolved(saved.folder, **more)
