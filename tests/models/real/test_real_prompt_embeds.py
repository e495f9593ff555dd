"""Prompt embeddings taken from a real model's embedding table give the same output as the text."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pagoda import LLM, SamplingParams
from pagoda.common.models.registry import spec_from_config
from pagoda.common.models.shapes import params
from pagoda.common.text.tokenizer import load_tokenizer
from pagoda.common.weights.checkpoint import open_checkpoint
from pagoda.common.weights.quantization.tensors import QuantizedTensor
from pagoda.common.weights.rules import apply_rules

pytestmark = pytest.mark.model

PROMPTS = [
    "The three laws of thermodynamics are",
    "Here is a list of facts about the planets of the solar system. " * 4,
    "Once upon a time, in a small village by the sea, there lived a fisherman who",
]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, logprobs=1, ignore_eos=True)


def embeddings(file: Path, prompts: list[list[int]]) -> list[np.ndarray]:
    """Return the rows of the embedding table of each prompt's tokens."""
    checkpoint = open_checkpoint(str(file), "auto", weights=True)
    spec, family = spec_from_config(checkpoint.config())
    family = checkpoint.family(family)
    weights = apply_rules(family.rules, params(spec), checkpoint.tensors(), family.ignored)
    embed = next(value for name, value in weights if name == "embed")
    table = embed.dequantize() if isinstance(embed, QuantizedTensor) else np.asarray(embed, np.float32)
    return [table[prompt] for prompt in prompts]


def test_embeddings_of_tokens_give_the_answer_of_the_text(model_file: Path) -> None:
    """Prompts in chunks of 32, then from the prefix cache, with a cache too small for all of them at once."""
    tokenizer = load_tokenizer(model_file)
    rows = [{"prompt_embeds": each} for each in embeddings(model_file, [tokenizer.encode(each) for each in PROMPTS])]
    llm = LLM(
        str(model_file),
        dtype="float32",
        max_model_len=160,
        max_num_seqs=4,
        max_num_batched_tokens=32,
        num_gpu_blocks_override=6,
        enable_prompt_embeds=True,
    )
    try:
        texts = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        for _ in range(2):
            for output, expected in zip(llm.generate(rows, GREEDY, use_tqdm=False), texts):
                (ours,), (theirs,) = output.outputs, expected.outputs
                assert (ours.token_ids, ours.text) == (theirs.token_ids, theirs.text)
                assert ours.cumulative_logprob == pytest.approx(theirs.cumulative_logprob, abs=1e-3)
                assert len(output.prompt_token_ids or ()) == len(expected.prompt_token_ids or ())
    finally:
        llm.shutdown()
