"""Embeddings through the official client, and the exact raw responses of the other routes."""

import asyncio
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from support.engines.fake_pooling import vector
from support.servers.live_server import LiveServer, live_server


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server("fake:pool-embed") as server:
        yield server


@pytest.fixture(scope="module")
def client(server: LiveServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


@pytest.mark.parametrize("options", [{}, {"encoding_format": "float"}, {"encoding_format": "base64"}])
def test_embeddings(client: openai.OpenAI, options: dict[str, Any]) -> None:
    answer = client.embeddings.create(model="fake", input=["abc", "x"], **options)
    assert (answer.object, answer.model) == ("list", "fake")
    assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (6, 6)
    assert [(each.index, each.object) for each in answer.data] == [(0, "embedding"), (1, "embedding")]
    for each, text in zip(answer.data, ("abc", "x"), strict=True):
        if options.get("encoding_format") == "base64":
            assert isinstance(each.embedding, str)
        else:
            assert each.embedding == pytest.approx(vector(text))


def test_inputs_of_the_client(client: openai.OpenAI) -> None:
    ids: Any
    for ids in ([97, 98, 99], [[97, 98, 99]]):
        (entry,) = client.embeddings.create(model="fake", input=ids, encoding_format="float").data
        assert entry.embedding == pytest.approx(vector("abc", special=False))
    (entry,) = client.embeddings.create(model="fake", input="abc", dimensions=4, user="ann").data
    assert len(entry.embedding) == 4
    answer = client.embeddings.create(model="fake", input="abcdef", extra_body={"truncate_prompt_tokens": 3})
    assert answer.usage.prompt_tokens == 3


def test_many_at_once(server: LiveServer) -> None:
    async def ask() -> list[Any]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            calls = [client.embeddings.create(model="fake", input="a" * number) for number in range(1, 21)]
            return await asyncio.gather(*calls)

    answers = asyncio.run(ask())
    assert [answer.usage.prompt_tokens for answer in answers] == list(range(2, 22))
    assert [answer.data[0].embedding for answer in answers] == [
        pytest.approx(vector("a" * number)) for number in range(1, 21)
    ]


def test_errors_of_the_client(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.embeddings.create(model="fake", input="a" * 100)
    assert caught.value.param == "input"
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="other", input="a")
    with live_server() as generator:
        other = openai.OpenAI(base_url=f"{generator.url}/v1", api_key="none", max_retries=0)
        with pytest.raises(openai.BadRequestError, match="--runner pooling"):
            other.embeddings.create(model="fake", input="a")


def test_raw_answers(server: LiveServer) -> None:
    usage = {"prompt_tokens": 2, "total_tokens": 2, "completion_tokens": 0}
    numbers = [pytest.approx(number) for number in vector("a")]

    def response_of(path: str, body: Any, prefix: str) -> Any:
        status, answer = server.post(path, body)
        assert status == 200
        assert answer.pop("id").startswith(prefix)
        assert isinstance(answer.pop("created", 0), int)
        return answer

    frame = {"object": "list", "model": "fake", "usage": usage}
    assert response_of("/v1/embeddings", {"input": "a"}, "embd-") == frame | {
        "data": [{"index": 0, "object": "embedding", "embedding": numbers}]
    }
    assert response_of("/pooling", {"input": "a"}, "pooling-") == frame | {
        "data": [{"index": 0, "object": "pooling", "data": numbers}]
    }
    usage = {"prompt_tokens": 4, "total_tokens": 4, "completion_tokens": 0}
    assert response_of("/score", {"text_1": "a", "text_2": "a"}, "score-") == frame | {
        "usage": usage,
        "data": [{"index": 0, "object": "score", "score": pytest.approx(1.0)}],
    }
    assert response_of("/rerank", {"query": "a", "documents": ["a"]}, "rerank-") == {
        "model": "fake",
        "usage": {"prompt_tokens": 4, "total_tokens": 4},
        "results": [
            {"index": 0, "document": {"text": "a", "multi_modal": None}, "relevance_score": pytest.approx(1.0)}
        ],
    }
    with live_server("fake:pool-classify") as other:
        answer = other.post("/classify", {"input": "a"})[1]
    assert set(answer) == {"id", "object", "created", "model", "data", "usage"}
    assert set(answer["data"][0]) == {"index", "label", "probs", "num_classes"}
