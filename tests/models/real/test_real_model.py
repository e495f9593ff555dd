"""A real model, end to end through the Python API, in float32 against what transformers answers with the same file.

Loading that file in transformers takes more time and memory than all other tests here: its answers are kept as data.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from pagoda import LLM, SamplingParams

pytestmark = pytest.mark.model

KEPT = json.loads((Path(__file__).parents[2] / "data" / "smollm2_answers.json").read_text(encoding="utf-8"))
"""Prompts, and the tokens that transformers answers greedily with the same file in float32."""
PROMPTS = [row["prompt"] for row in KEPT]
NEW = 18
"""Tokens of an answer: with its prompt they fill more than one block of the cache."""
FEW = 3
"""Prompts that share a long beginning."""
CACHE = 48 << 20
"""Bytes for 1,000 tokens."""
GREEDY = SamplingParams(temperature=0.0, max_tokens=NEW, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(model_file: Path) -> Iterator[LLM]:
    engine = LLM(str(model_file), dtype="float32", max_model_len=1024, kv_cache_memory_bytes=CACHE)
    yield engine
    engine.shutdown()


@pytest.fixture(scope="module")
def alone(llm: LLM) -> list[list[int]]:
    """The answer to each prompt, one at a time."""
    return [list(llm.generate(prompt, GREEDY, use_tqdm=False)[0].outputs[0].token_ids) for prompt in PROMPTS]


def test_greedy_tokens_are_those_of_transformers(alone: list[list[int]]) -> None:
    assert alone == [row["token_ids"] for row in KEPT]


@pytest.mark.slow_matrix
def test_kept_tokens_are_those_of_transformers(llm: LLM, model_file: Path) -> None:
    """Each token is the likeliest after those before it."""
    import transformers

    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        model_file.parent, gguf_file=model_file.name, dtype=torch.float32
    )
    for row in KEPT:
        ids = llm.get_tokenizer().encode(row["prompt"])
        with torch.inference_mode():
            logits = theirs(torch.tensor([ids + row["token_ids"][:-1]])).logits[0, len(ids) - 1 :]
        assert logits.argmax(-1).tolist() == row["token_ids"], row["prompt"]


def test_a_batch_of_32_answers_like_one_at_a_time(llm: LLM, alone: list[list[int]]) -> None:
    prompts = (PROMPTS * 4)[:32]
    together = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert [list(one.outputs[0].token_ids) for one in together] == (alone * 4)[:32]


def test_the_prefix_cache_changes_nothing(llm: LLM) -> None:
    story = "Here is a list of facts about the planets of the solar system. " * 12
    prompts = [story + prompt for prompt in PROMPTS[:FEW]]
    want = []
    for prompt in prompts:
        assert llm.reset_prefix_cache()
        (answer,) = llm.generate(prompt, GREEDY, use_tqdm=False)
        assert answer.num_cached_tokens == 0
        want.append(list(answer.outputs[0].token_ids))
    again = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert all(one.num_cached_tokens for one in again), "now the prompts come from the cache"
    assert [list(one.outputs[0].token_ids) for one in again] == want


def test_a_seed_gives_the_same_answer_in_any_batch(llm: LLM) -> None:
    params = [SamplingParams(temperature=1.0, top_p=0.9, seed=seed, max_tokens=12) for seed in range(3)]
    one_by_one = [llm.generate(PROMPTS[0], p, use_tqdm=False)[0].outputs[0].text for p in params]
    together = llm.generate([PROMPTS[0]] * 3, params, use_tqdm=False)
    assert [one.outputs[0].text for one in together] == one_by_one
    assert len(set(one_by_one)) > 1


def test_chat_answers_the_question(llm: LLM) -> None:
    question = [{"role": "user", "content": "Name the capital of France."}]
    answer = llm.chat(question, SamplingParams(temperature=0.0, max_tokens=32), use_tqdm=False)
    assert answer[0].outputs[0].text == "The capital of France is Paris."
    assert answer[0].outputs[0].finish_reason == "stop"
