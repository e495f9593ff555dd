"""A real model on a GPU: its answers, and its tokens compared with the reference backend on this machine's CPU.

In float32 greedy tokens must agree for at least nine of ten prompts (two logits may tie within rounding), and so must
sampled tokens. For bfloat16 the agreement with float32 is reported, without a limit. Without a model file: random
weights.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path

import pagoda
from pagoda.benchmarks.gpu import model
from pagoda.benchmarks.gpu.measure import Bench, Number

SMALL = model.CONFIG | {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "vocab_size": 49152,
    "rope_scaling": None,
    "rope_theta": 100000.0,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""The shapes of the small model."""
TEXTS = (
    "The capital of France is",
    "Water boils at a temperature of",
    "Once upon a time, in a small village by the sea,",
    "The three primary colours are",
    "def fibonacci(n):",
    "In 1969, for the first time in history,",
    "Dear Sir or Madam,",
    "Photosynthesis is the process by which plants",
    "To bake bread you need flour, water,",
    "The old king looked out of the window and",
)
QUESTION, ANSWER = "What is the capital of France?", "Paris"


def checks(bench: Bench) -> Iterator[Number]:
    """Yield the comparisons; each starts its own engines."""
    for dtype in ("float32", "bfloat16"):
        yield Number(f"tokens_{dtype}", partial(compare, bench, dtype), 240)
    if bench.model is not None:
        yield Number("answer", partial(answers_question, bench), 240)


def compare(bench: Bench, dtype: str) -> dict:
    """Compare the tokens of torch_cuda in `dtype` with those of reference in float32."""
    ours, theirs = (
        answers(bench, backend, kind) for backend, kind in (("torch_cuda", dtype), ("reference", "float32"))
    )
    if bench.spoil:
        ours = [[token + 1 for token in one] for one in ours]
    count = len(ours) // 2
    equal = [one == other for one, other in zip(ours, theirs)]
    same = [agreed(one, other) for one, other in zip(ours, theirs)]
    greedy, drawn = sum(equal[:count]), sum(equal[count:])
    right = {"right": min(greedy, drawn) >= 0.9 * count} if dtype == "float32" else {}
    shares = {"greedy_tokens_until_a_difference": sum(same[:count]) / count, "of_tokens": len(ours[0])}
    return right | {"greedy_equal": greedy, "drawn_equal": drawn, "of": count} | shares


def agreed(one: list[int], other: list[int]) -> int:
    """Return the number of tokens before the first difference."""
    return next((at for at, (a, b) in enumerate(zip(one, other)) if a != b), len(one))


@cache
def answers(bench: Bench, backend: str, dtype: str) -> list[list[int]]:
    """Return the token ids of each prompt, greedy, then seeded at temperature 0.8 with filters and penalties."""
    llm = start(bench, backend, dtype)
    count, tokens = bench.choose((len(TEXTS), 48), (2, 6))
    inputs = list(TEXTS[:count])
    if bench.model is None:
        inputs = [
            {"prompt_token_ids": [5 + (7 * at + 31 * number) % 900 for at in range(5 + 9 * number)]}
            for number in range(count)
        ]
    common = {"max_tokens": tokens, "ignore_eos": True, "detokenize": False}
    greedy = [pagoda.SamplingParams(temperature=0.0, **common)] * count
    rules = {"temperature": 0.8, "top_p": 0.9, "top_k": 50, "repetition_penalty": 1.1, "frequency_penalty": 0.1}
    drawn = [pagoda.SamplingParams(**rules, seed=number, **common) for number in range(count)]
    done = llm.generate([*inputs, *inputs], [*greedy, *drawn], use_tqdm=False)
    tokens_of = [list(one.outputs[0].token_ids) for one in done]
    llm.shutdown()
    return tokens_of


def start(bench: Bench, backend: str, dtype: str) -> pagoda.LLM:
    settings = {"backend": backend, "dtype": dtype, "max_model_len": 512, "max_num_seqs": 32}
    if bench.model is not None:
        return pagoda.LLM(str(bench.model), **settings)
    folder = model.write(Path(tempfile.mkdtemp()) / "model", bench.choose(SMALL, model.TINY))
    return pagoda.LLM(str(folder), load_format="dummy", skip_tokenizer_init=True, **settings)


def answers_question(bench: Bench) -> dict:
    """Answer a question in bfloat16; right if the answer names the city."""
    llm = start(bench, "torch_cuda", "bfloat16")
    rules = pagoda.SamplingParams(temperature=0.0, max_tokens=24)
    text = llm.chat([{"role": "user", "content": QUESTION}], rules, use_tqdm=False)[0].outputs[0].text
    llm.shutdown()
    return {"right": ANSWER in text and not bench.spoil, "question": QUESTION, "answer": text}
