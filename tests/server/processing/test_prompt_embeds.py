"""Embeddings as prompts: rows of a model's own table say what its tokens say, however the engine takes them."""

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from support.checkpoints.drafter_folders import eagle
from support.checkpoints.tiny_folder import write_model
from support.suite.rows import each_row

from pagoda.common.beam_search import BeamSearchParams
from pagoda.common.engine.core import EngineCore
from pagoda.common.engine.media.items import MediaItem
from pagoda.common.engine.scheduling.scheduler import Scheduler
from pagoda.common.errors import ConfigError, RequestError
from pagoda.common.sampling_params import RequestOutputKind, SamplingParams
from pagoda.common.text.tokenizer import Detokenizer, Tokenizer
from pagoda.server.llm import LLM
from pagoda.server.outputs import CompletionOutput, RequestOutput
from pagoda.server.processing import output_processor

Make = Callable[..., LLM]

PROMPTS = [list(b"the quick brown fox jumps over the lazy dog"), list(b"the quick brown fox sleeps"), list(b"x")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def table(folder: Path) -> np.ndarray:
    return load_file(folder / "model.safetensors")["model.embed_tokens.weight"]


@pytest.fixture(scope="module", params=["reference", "torch_cuda"])
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PAGODA_TORCH_CUDA_DEVICE", "cpu")
        yield request.param


@pytest.fixture(scope="module")
def make(folder: Path, backend: str) -> Iterator[Make]:
    """Makes engines whose pages are of 8 tokens and whose steps of 16 at most."""
    made: list[LLM] = []

    def make(**args: Any) -> LLM:
        given = {"backend": backend, "max_num_batched_tokens": 16, "max_num_seqs": 4, "block_size": 8}
        given |= {"enable_prompt_embeds": True, "max_model_len": 64, "dtype": "float32"}
        made.append(LLM(str(folder), **(given | args)))
        return made[-1]

    yield make
    for llm in made:
        llm.shutdown()


@pytest.fixture(scope="module")
def llm(make: Make) -> LLM:
    return make()


def ask(llm: LLM, prompts: list[Any], **params: Any) -> list[RequestOutput]:
    asked = SamplingParams(**({"temperature": 0, "max_tokens": 6, "logprobs": 2, "ignore_eos": True} | params))
    return llm.generate(prompts, asked, use_tqdm=False)


def embedded(table: np.ndarray, prompts: list[list[int]] = PROMPTS) -> list[dict[str, Any]]:
    return [{"prompt_embeds": table[ids]} for ids in prompts]


def assert_same(found: list[RequestOutput], expected: list[RequestOutput]) -> None:
    """The same tokens and logprobs."""
    assert len(found) == len(expected)
    for one, other in zip(found, expected):
        assert [each.token_ids for each in one.outputs] == [each.token_ids for each in other.outputs]
        np.testing.assert_allclose(
            [logprobs(each) for each in one.outputs], [logprobs(each) for each in other.outputs], atol=1e-4
        )


def logprobs(answer: CompletionOutput) -> list[float]:
    assert answer.logprobs is not None
    return [position[token].logprob for position, token in zip(answer.logprobs, answer.token_ids)]


@pytest.mark.setting("--enable-prompt-embeds")
def test_rows_of_the_table_are_the_tokens(llm: LLM, table: np.ndarray) -> None:
    expected = ask(llm, PROMPTS)
    found = ask(llm, embedded(table))
    assert_same(found, expected)
    assert [len(output.prompt_token_ids or ()) for output in found] == [43, 26, 1]
    assert {token for output in found for token in output.prompt_token_ids or ()} == {0}
    assert [output.prompt for output in found] == [None] * 3
    assert_same(ask(llm, embedded(table) + PROMPTS), expected * 2)


def test_pages_are_shared_among_equal_rows_only(make: Make, table: np.ndarray) -> None:
    llm = make()
    prompts = embedded(table)
    expected = ask(llm, prompts[:1])
    assert expected[0].num_cached_tokens == 0
    again = ask(llm, prompts[:1])
    assert again[0].num_cached_tokens == 40
    assert_same(again, expected)
    assert ask(llm, prompts[1:2])[0].num_cached_tokens == 16  # of "the quick brown fox "
    assert ask(llm, PROMPTS[:1])[0].num_cached_tokens == 0  # tokens are no rows
    changed = table[PROMPTS[0]].copy()
    changed[21, 3] += 1e-3
    assert ask(llm, [{"prompt_embeds": changed}])[0].num_cached_tokens == 16
    assert ask(llm, [prompts[0] | {"cache_salt": "mine"}])[0].num_cached_tokens == 0


def test_a_whole_page_that_ends_the_prompt_is_computed_again(llm: LLM, table: np.ndarray) -> None:
    """Only its last row is left to compute, in a step that looks like decoding."""
    prompts = [list(b"abcdefgh"), list(b"abcdefghi")]
    expected = ask(llm, prompts)
    for _ in range(2):
        assert_same(ask(llm, embedded(table, prompts)), expected)


def test_preempted_requests_go_on(make: Make, llm: LLM, table: np.ndarray) -> None:
    """8 blocks of 8 tokens hold none of these beside another to its end."""
    tight = make(num_gpu_blocks_override=9)
    prompts = [list(b"first prompt, long enough"), list(b"the other prompt, longer yet")]
    expected = ask(llm, prompts, max_tokens=20)
    assert_same(ask(tight, embedded(table, prompts), max_tokens=20), expected)
    assert scheduler_of(tight).stats().preemptions


@each_row("kind", ["eagle", "draft_model", "ngram"])
def test_drafts_after_rows_are_those_of_a_model_that_cannot_see_them(
    make: Make, llm: LLM, table: np.ndarray, tmp_path: Path, kind: str
) -> None:
    """The answers are the same; a prompt is computed in chunks, and again from the prefix cache."""
    settings: dict[str, Any] = {"method": kind, "num_speculative_tokens": 3}
    if kind != "ngram":
        write = eagle if kind == "eagle" else write_model
        settings["model"] = str(write(tmp_path / kind))
    drafting = make(speculative_config=settings, kv_cache_memory_bytes=1 << 24)
    expected = ask(llm, PROMPTS, max_tokens=16)
    for _ in range(2):
        assert_same(ask(drafting, embedded(table), max_tokens=16), expected)
    assert scheduler_of(drafting).stats().drafts is not None


def test_several_answers_seeds_and_penalties(llm: LLM, table: np.ndarray) -> None:
    for params in (
        {"n": 3, "temperature": 1.0, "seed": 7},
        {"frequency_penalty": 1.0, "presence_penalty": 0.5},
        {"bad_words": ["b", "bc"], "min_tokens": 2},
    ):
        assert_same(ask(llm, embedded(table), **params), ask(llm, PROMPTS, **params))


def test_embeddings_are_no_tokens_to_a_repetition_penalty(llm: LLM, table: np.ndarray) -> None:
    """One far below 1 lets the model say what was said before, whatever that is."""
    prompts = embedded(table, PROMPTS[:1])
    (plain,) = ask(llm, prompts, max_tokens=1)
    (rows,), (tokens,) = (ask(llm, each, max_tokens=1, repetition_penalty=0.01) for each in (prompts, PROMPTS[:1]))
    assert rows.outputs[0].token_ids == plain.outputs[0].token_ids
    assert set(plain.outputs[0].token_ids).isdisjoint(PROMPTS[0])
    assert set(tokens.outputs[0].token_ids) <= set(PROMPTS[0])


def test_steps_of_the_engine_stream(llm: LLM, table: np.ndarray) -> None:
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
    engine = llm.llm_engine
    engine.add_request("one", {"prompt_embeds": torch.from_numpy(table[PROMPTS[0]])}, params)
    pieces = []
    while engine.has_unfinished_requests():
        pieces += [output.outputs[0].token_ids for output in engine.step()]
    (expected,) = ask(llm, PROMPTS[:1], max_tokens=4)
    assert pieces == [[token] for token in expected.outputs[0].token_ids]


@each_row("kind", [torch.bfloat16, torch.float16, torch.float64])
def test_numbers_of_other_types_are_taken_as_the_models(llm: LLM, table: np.ndarray, kind: torch.dtype) -> None:
    rows = torch.from_numpy(table[PROMPTS[1]]).to(kind)
    exact = ask(llm, [{"prompt_embeds": rows.float().numpy()}])
    assert_same(ask(llm, [{"prompt_embeds": rows}, {"prompt_embeds": rows[None]}]), exact * 2)


def test_truncation(llm: LLM, table: np.ndarray) -> None:
    for side, kept in (("left", PROMPTS[0][-9:]), ("right", PROMPTS[0][:9])):
        cut = ask(llm, embedded(table, PROMPTS[:1]), truncate_prompt_tokens=9, truncation_side=side)
        assert_same(cut, ask(llm, [kept]))
        assert cut[0].prompt_token_ids == [0] * 9


def test_the_zeros_are_no_text_before_the_answer(llm: LLM, table: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> None:
    before: list[list[int]] = []

    def noted(tokenizer: Tokenizer, prompt_token_ids: list[int], **options: Any) -> Detokenizer:
        before.append(list(prompt_token_ids))
        return Detokenizer(tokenizer, prompt_token_ids, **options)

    monkeypatch.setattr(output_processor, "Detokenizer", noted)
    ask(llm, [*embedded(table, PROMPTS[:1]), PROMPTS[2]])
    assert before == [[], PROMPTS[2]]


def test_rows_are_freed_with_their_request(llm: LLM, table: np.ndarray) -> None:
    engine, scheduler = llm.llm_engine, scheduler_of(llm)
    engine.add_request("held", {"prompt_embeds": table[PROMPTS[0]]}, SamplingParams(max_tokens=3, ignore_eos=True))
    engine.step()
    assert kept_items()
    while engine.has_unfinished_requests():
        engine.step()
    gc.collect()
    assert not kept_items()
    scheduler.check_integrity()


def kept_items() -> list[MediaItem]:
    """Items of this process with a payload."""
    return [each for each in gc.get_objects() if type(each) is MediaItem and each.payload]


def scheduler_of(llm: LLM) -> Scheduler:
    core = llm.llm_engine._built.core
    assert isinstance(core, EngineCore)
    assert isinstance(core._scheduler, Scheduler)
    return core._scheduler


def test_what_cannot_be_had_with_rows(llm: LLM, table: np.ndarray) -> None:
    prompt = {"prompt_embeds": table[PROMPTS[0]]}
    with pytest.raises(RequestError, match="prompt_logprobs need tokens") as error:
        ask(llm, [prompt], prompt_logprobs=1)
    assert error.value.field == "prompt_logprobs"
    with pytest.raises(RequestError, match="beam search needs tokens") as error:
        llm.beam_search([prompt], BeamSearchParams(beam_width=2, max_tokens=2))
    assert error.value.field == "prompt_embeds"
    with pytest.raises(RequestError, match="not both"):
        ask(llm, [prompt | {"prompt_token_ids": [1]}])


def test_the_setting_is_for_models_that_generate(make: Make) -> None:
    with pytest.raises(ConfigError, match="--enable-prompt-embeds: is not supported for pooling models"):
        make(runner="pooling")
