"""Pooling models over HTTP: every field and alias, errors, limits, disconnects."""

import base64
import json
import logging
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from support.engines import fake_pooling
from support.engines.fake_pooling import vector
from support.servers.api_bodies import LEAST, path_of
from support.servers.live_server import LiveServer, live_server
from support.suite.rows import each_row
from support.suite.watching import eventually

from pagoda.common.errors import QueueFullError
from pagoda.common.pooling_params import PoolingParams
from pagoda.common.text.tokenizer import Tokenizer
from pagoda.server.api.admin.sagemaker import pooling_handler
from pagoda.server.api.cohere import embed as cohere
from pagoda.server.api.pooling import fields as pooling_response
from pagoda.server.api.pooling import routes, scoring
from pagoda.server.http import generation
from pagoda.server.processing import scoring as pairs_module

CHAT = [{"role": "user", "content": "abc"}]
RENDERED = "user: abc;"

SCHEMAS = [
    "EmbeddingCompletionRequest",
    "EmbeddingChatRequest",
    "EmbeddingBatchChatRequest",
    "EmbeddingChatInputRequest",
    "EmbeddingBatchChatInputRequest",
    "ClassificationCompletionRequest",
    "ClassificationChatRequest",
    "PoolingCompletionRequest",
    "PoolingChatRequest",
    "ScoreDataRequest",
    "ScoreQueriesDocumentsRequest",
    "ScoreQueriesItemsRequest",
    "ScoreTextRequest",
    "RerankRequest",
]
CHATS = [schema for schema in SCHEMAS if "Chat" in schema]
EMBEDDINGS = SCHEMAS[:5] + SCHEMAS[7:9]
PAIRS = SCHEMAS[9:]
LONG = {"input": "abcdefgh", "messages": [{"role": "user", "content": "abcdefgh"}]}


@pytest.fixture(scope="module")
def embed() -> Iterator[LiveServer]:
    with live_server("fake:pool-embed", enable_request_id_headers=True) as server:
        yield server


@pytest.fixture(scope="module")
def classify() -> Iterator[LiveServer]:
    with live_server("fake:pool-classify") as server:
        yield server


@pytest.fixture(scope="module")
def cross() -> Iterator[LiveServer]:
    with live_server("fake:pool-cross") as server:
        yield server


@pytest.fixture(scope="module")
def template() -> Iterator[LiveServer]:
    source = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{{ instruction }}{{ word }}"
    with live_server("fake:pool-cross", chat_template=source) as server:
        yield server


@pytest.fixture
def post(embed: LiveServer, classify: LiveServer, cross: LiveServer) -> Callable[..., tuple[int, Any]]:
    """Send a body of a schema to a suitable model."""

    def send(schema: str, **fields: Any) -> tuple[int, Any]:
        server = classify if "Classif" in schema else cross if schema in PAIRS else embed
        return server.post(path_of(schema), LEAST[schema] | fields)

    return send


def long(schema: str) -> dict[str, Any]:
    """Return a body with texts of several tokens."""
    words = {name: _longer(value) for name, value in LEAST[schema].items()}
    return words


def _longer(value: Any) -> Any:
    if isinstance(value, str):
        return "abcdefghij"
    if isinstance(value, list):
        return [_longer(each) for each in value]
    return value | {"content": "abcdefghij"}


def numbers(answer: dict[str, Any]) -> Any:
    """Return the numbers in a response of any route."""
    if "results" in answer:
        return [result["relevance_score"] for result in answer["results"]]
    (entry,) = answer["data"]
    return next(entry[key] for key in ("embedding", "probs", "score", "data") if key in entry)


# --- common fields ---


@pytest.mark.parametrize("schema", SCHEMAS)
@pytest.mark.field(
    "EmbeddingCompletionRequest|EmbeddingChatRequest|EmbeddingBatchChatRequest|EmbeddingChatInputRequest|"
    "EmbeddingBatchChatInputRequest|ClassificationCompletionRequest|ClassificationChatRequest|"
    "PoolingCompletionRequest|PoolingChatRequest|ScoreDataRequest|ScoreQueriesDocumentsRequest|"
    "ScoreQueriesItemsRequest|ScoreTextRequest|RerankRequest.model|request_id|priority|cache_salt|use_activation|"
    "truncate_prompt_tokens|truncation_side"
)
def test_fields_of_all_requests(post: Callable[..., tuple[int, Any]], schema: str) -> None:
    status, plain = post(schema)
    assert status == 200, plain
    assert plain["model"] == "fake"
    assert (
        plain["usage"]["prompt_tokens"]
        == plain["usage"]["total_tokens"]
        == len(fake_pooling.requests[-1].prompt_token_ids)
    )
    status, answer = post(schema, model="other")
    assert (status, answer["error"]["param"]) == (404, "model")
    assert post(schema, request_id="mine")[1]["id"].endswith("-mine")
    status, answer = post(schema, priority=1)
    assert (status, answer["error"]["param"]) == (400, "priority")
    assert post(schema, priority=0)[0] == 200
    assert numbers(post(schema, cache_salt="x")[1]) == numbers(plain)  # there is no cache for a salt to separate
    assert post(schema, cache_salt="x" * 1025)[0] == 400
    assert numbers(post(schema, use_activation=False)[1]) != numbers(plain)
    assert numbers(post(schema, use_activation=True)[1]) == numbers(plain)

    whole = post(schema, **long(schema))[1]["usage"]["prompt_tokens"]
    prompts = {}
    for side in ("left", "right", None):
        fields = long(schema) | {"truncate_prompt_tokens": 7, "truncation_side": side}
        assert post(schema, **fields)[1]["usage"]["prompt_tokens"] == 7 < whole
        prompts[side] = fake_pooling.requests[-1].prompt_token_ids
    assert prompts["left"] != prompts["right"] == prompts[None]
    status, answer = post(schema, truncate_prompt_tokens=65)
    assert (status, answer["error"]["param"]) == (400, "truncate_prompt_tokens")
    assert post(schema, truncate_prompt_tokens=-1)[1]["usage"] == plain["usage"]


@pytest.mark.parametrize("schema", [name for name in SCHEMAS if not name.startswith(("Score", "Rerank"))])
@pytest.mark.field(
    "EmbeddingCompletionRequest|EmbeddingChatRequest|EmbeddingBatchChatRequest|EmbeddingChatInputRequest|"
    "EmbeddingBatchChatInputRequest|ClassificationCompletionRequest|ClassificationChatRequest|"
    "PoolingCompletionRequest|PoolingChatRequest.padding"
)
def test_padding(post: Callable[..., tuple[int, Any]], schema: str, monkeypatch: pytest.MonkeyPatch) -> None:
    status, answer = post(schema, padding="max_length")
    assert (status, answer["error"]["param"]) == (400, "padding"), "the tokenizer has no padding token"
    plain = post(schema, padding="do_not_pad")[1]["usage"]["prompt_tokens"]
    text = fake_pooling.requests[-1].prompt_token_ids
    monkeypatch.setattr(Tokenizer, "pad_token_id", property(lambda _: 7))
    status, answer = post(schema, padding="max_length")
    assert status == 200, answer
    assert answer["usage"]["prompt_tokens"] == 64 > plain
    assert fake_pooling.requests[-1].prompt_token_ids == [*text, *[7] * (64 - len(text))]


@pytest.mark.field("CohereEmbedRequest.priority", "*.priority")
def test_priority_reaches_the_engine() -> None:
    with live_server("fake:pool-embed", engine={"scheduling_policy": "priority"}) as server:
        assert server.post("/v1/embeddings", {"input": "a", "priority": -3})[0] == 200
        assert fake_pooling.requests[-1].priority == -3
        assert server.post("/v2/embed", {"texts": ["a"], "priority": 2})[0] == 200
        assert fake_pooling.requests[-1].priority == 2


@each_row("schema", SCHEMAS)
@pytest.mark.field(
    "EmbeddingCompletionRequest|EmbeddingChatRequest|EmbeddingBatchChatRequest|EmbeddingChatInputRequest|"
    "EmbeddingBatchChatInputRequest|ClassificationCompletionRequest|ClassificationChatRequest|"
    "PoolingCompletionRequest|PoolingChatRequest|ScoreDataRequest|ScoreQueriesDocumentsRequest|"
    "ScoreQueriesItemsRequest|ScoreTextRequest|RerankRequest.user"
)
def test_users_are_logged(schema: str, caplog: pytest.LogCaptureFixture) -> None:
    kind = "classify" if "Classif" in schema else "embed"
    logging.getLogger("pagoda").propagate = True
    with live_server(f"fake:pool-{kind}", engine={"enable_log_requests": True}) as server, caplog.at_level("INFO"):
        assert server.post(path_of(schema), LEAST[schema] | {"user": "ann"})[0] == 200
    assert "user 'ann'" in caplog.text


# --- inputs ---


@pytest.mark.field("EmbeddingCompletionRequest|PoolingCompletionRequest.input")
@each_row("path", ["/v1/embeddings", "/pooling"])
@each_row(
    ("value", "texts"),
    [
        ("abc", ["abc"]),
        (["abc"], ["abc"]),
        (["abc", "x", "yz"], ["abc", "x", "yz"]),
        ([97, 98, 99], ["abc"]),
        ([[97], [98, 99]], ["a", "bc"]),
    ],
)
def test_input_types(embed: LiveServer, path: str, value: Any, texts: list[str]) -> None:
    status, answer = embed.post(path, {"input": value})
    ids = isinstance(value, list) and not isinstance(value[0], str)
    assert status == 200
    assert [each["index"] for each in answer["data"]] == list(range(len(texts)))
    key = "embedding" if path == "/v1/embeddings" else "data"
    for entry, text in zip(answer["data"], texts, strict=True):
        assert entry[key] == pytest.approx(vector(text, special=not ids))
    count = sum(len(text) + (not ids) for text in texts)
    assert answer["usage"] == {"prompt_tokens": count, "total_tokens": count, "completion_tokens": 0}


@pytest.mark.field("EmbeddingChatRequest|PoolingChatRequest|EmbeddingBatchChatRequest.messages")
@pytest.mark.field("EmbeddingChatInputRequest|EmbeddingBatchChatInputRequest.input|messages")
def test_conversations(embed: LiveServer) -> None:
    other = [{"role": "user", "content": [{"type": "text", "text": "x"}]}]
    for body in ({"messages": CHAT}, {"input": CHAT}, {"messages": CHAT, "input": CHAT}):
        (entry,) = embed.post("/v1/embeddings", body)[1]["data"]
        assert entry["embedding"] == pytest.approx(vector(RENDERED, special=False))
    for body in ({"messages": [CHAT, other]}, {"input": [CHAT, other]}):
        answer = embed.post("/v1/embeddings", body)[1]
        assert [each["embedding"] for each in answer["data"]] == [
            pytest.approx(vector(text, special=False)) for text in (RENDERED, "user: x;")
        ]
    (entry,) = embed.post("/pooling", {"messages": CHAT})[1]["data"]
    assert entry["data"] == pytest.approx(vector(RENDERED, special=False))
    status, answer = embed.post("/v1/embeddings", {"input": CHAT, "messages": other})
    assert (status, answer["error"]["param"]) == (400, "input")
    assert embed.post("/pooling", {"messages": [CHAT, CHAT]})[0] == 400


@pytest.mark.field("ClassificationCompletionRequest.input", "ClassificationChatRequest.messages")
def test_classes(classify: LiveServer) -> None:
    answer = classify.post("/classify", {"input": ["a", "b" * 3]})[1]
    assert answer["object"] == "list"
    assert answer["id"].startswith("classify-")
    first, second = answer["data"]
    assert (first["label"], first["num_classes"], first["index"]) == ("bad", 3, 0)
    assert sum(first["probs"]) == pytest.approx(1)
    assert second["label"] == "good"
    (entry,) = classify.post("/classify", {"messages": CHAT})[1]["data"]
    assert entry["probs"] != first["probs"]


@pytest.mark.field(
    "EmbeddingCompletionRequest|ClassificationCompletionRequest|PoolingCompletionRequest.add_special_tokens"
)
@pytest.mark.field(
    "EmbeddingChatRequest|EmbeddingBatchChatRequest|EmbeddingChatInputRequest|EmbeddingBatchChatInputRequest|"
    "ClassificationChatRequest|PoolingChatRequest.add_special_tokens"
)
@pytest.mark.parametrize("schema", EMBEDDINGS + SCHEMAS[5:7])
def test_special_tokens(post: Callable[..., tuple[int, Any]], schema: str) -> None:
    counts = {value: post(schema, add_special_tokens=value)[1]["usage"]["prompt_tokens"] for value in (True, False)}
    assert counts[True] == counts[False] + 1
    assert post(schema)[1]["usage"]["prompt_tokens"] == counts[schema not in CHATS]


@pytest.mark.field(
    "EmbeddingChatRequest|EmbeddingBatchChatRequest|EmbeddingChatInputRequest|EmbeddingBatchChatInputRequest|"
    "ClassificationChatRequest|PoolingChatRequest.add_generation_prompt|continue_final_message|chat_template|"
    "chat_template_kwargs"
)
@each_row("schema", CHATS)
def test_templates(schema: str) -> None:
    kind = "classify" if "Classif" in schema else "embed"

    def read(**fields: Any) -> str:
        status, answer = server.post(path_of(schema), LEAST[schema] | fields)
        assert status == 200, answer
        return bytes(fake_pooling.requests[-1].prompt_token_ids).decode()

    with live_server(f"fake:pool-{kind}", trust_request_chat_template=True) as server:
        assert read() == "user: a;"
        assert read(add_generation_prompt=True) == "user: a;assistant:"
        assert read(continue_final_message=True) == "user: a"
        assert read(chat_template="{{ word }}!", chat_template_kwargs={"word": "so"}) == "so!"
        status, answer = server.post(path_of(schema), LEAST[schema] | {"chat_template_kwargs": {"messages": []}})
        assert (status, answer["error"]["param"]) == (400, "chat_template_kwargs")
    with live_server(f"fake:pool-{kind}") as server:
        status, answer = server.post(path_of(schema), LEAST[schema] | {"chat_template": "x"})
        assert (status, answer["error"]["param"]) == (400, "chat_template")


# --- vectors ---


@pytest.mark.field(
    "EmbeddingCompletionRequest|EmbeddingChatRequest|EmbeddingBatchChatRequest|EmbeddingChatInputRequest|"
    "EmbeddingBatchChatInputRequest|PoolingCompletionRequest|PoolingChatRequest.encoding_format|embed_dtype|endianness|"
    "dimensions"
)
@pytest.mark.parametrize("schema", EMBEDDINGS)
def test_encodings_and_dimensions(embed: LiveServer, post: Callable[..., tuple[int, Any]], schema: str) -> None:
    plain = np.array(numbers(post(schema)[1]))
    sent = base64.b64decode(numbers(post(schema, encoding_format="base64")[1]))
    assert np.frombuffer(sent, np.float32) == pytest.approx(plain)
    sent = base64.b64decode(numbers(post(schema, encoding_format="base64", embed_dtype="float16", endianness="big")[1]))
    assert np.frombuffer(sent, ">f2") == pytest.approx(plain, abs=1e-3)
    half = np.array(numbers(post(schema, dimensions=4)[1]))
    assert half == pytest.approx(plain[:4] / np.linalg.norm(plain[:4]))
    status, answer = post(schema, dimensions=9)
    assert (status, answer["error"]["param"]) == (400, "dimensions")


@pytest.mark.parametrize("path", ["/v1/embeddings", "/pooling"])
def test_bytes(embed: LiveServer, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    body = {"input": ["abc", "x"], "encoding_format": "bytes", "embed_dtype": "float16", "endianness": "little"}
    answer = embed.response("POST", path, body)
    assert answer.headers["content-type"] == "application/octet-stream"
    metadata = json.loads(answer.headers["metadata"])
    assert metadata["usage"] == {"prompt_tokens": 6, "total_tokens": 6}
    for item, text in zip(metadata["data"], ("abc", "x"), strict=True):
        assert (item["embed_dtype"], item["endianness"], item["shape"]) == ("float16", "little", [8])
        sent = np.frombuffer(answer.body[item["start"] : item["end"]], "<f2")
        assert sent == pytest.approx(np.array(vector(text)), abs=1e-3)
    only = embed.response("POST", path, body | {"encoding_format": "bytes_only"})
    assert only.body == answer.body
    assert "metadata" not in only.headers
    monkeypatch.setattr(pooling_response, "MAX_METADATA", 1)
    status, refused = embed.post(path, body)
    assert (status, refused["error"]["param"]) == (400, "encoding_format")


def test_dimensions_need_a_matryoshka_model() -> None:
    with live_server("fake:pool-plain") as server:
        status, answer = server.post("/v1/embeddings", {"input": "a", "dimensions": 4})
        assert (status, answer["error"]["param"]) == (400, "dimensions")
        assert "Matryoshka" in answer["error"]["message"]


@pytest.mark.field("PoolingCompletionRequest|PoolingChatRequest.task")
def test_tasks(embed: LiveServer, classify: LiveServer) -> None:
    for body in ({"input": "ab", "add_special_tokens": False}, {"messages": CHAT}):
        answer = embed.post("/pooling", body | {"task": "token_embed"})[1]
        (item,) = answer["data"]
        assert answer["id"].startswith("pooling-")
        assert item["object"] == "pooling"
        assert len(item["data"]) == answer["usage"]["prompt_tokens"]
        assert all(sum(row) == 1 for row in item["data"])
        (item,) = classify.post("/pooling", body | {"task": "token_classify"})[1]["data"]
        assert len(item["data"][0]) == 3
        for task in ("classify", "plugin", "embed&token_classify"):
            status, refused = embed.post("/pooling", body | {"task": task})
            assert (status, refused["error"]["param"]) == (400, "task")


# --- Cohere ---


@pytest.mark.field(
    "CohereEmbedRequest.model|texts|inputs|input_type|output_dimension|embedding_types|truncate|max_tokens"
)
def test_cohere(embed: LiveServer) -> None:
    def ask(**fields: Any) -> Any:
        return embed.post("/v2/embed", {"model": "fake", "texts": ["abc"]} | fields)

    status, answer = ask()
    assert status == 200
    assert set(answer) == {"response_type", "id", "embeddings", "texts", "meta"}
    assert answer["response_type"] == "embeddings_by_type"
    assert answer["texts"] == ["abc"]
    assert answer["embeddings"] == {"float": [pytest.approx(vector("abc"))]}
    assert answer["meta"] == {
        "api_version": {"version": "2"},
        "billed_units": {"input_tokens": 4, "image_tokens": 0},
        "tokens": {"input_tokens": 4},
    }
    parts = [{"content": [{"type": "text", "text": "abc"}]}]
    assert embed.post("/v2/embed", {"inputs": parts})[1]["embeddings"] == answer["embeddings"]
    assert ask(input_type="query")[1]["embeddings"] == {"float": [pytest.approx(vector("query: abc"))]}
    assert ask(input_type="document")[1]["embeddings"] == answer["embeddings"]
    assert len(ask(output_dimension=4)[1]["embeddings"]["float"][0]) == 4

    embeddings = ask(embedding_types=["binary", "ubinary", "base64"])[1]["embeddings"]
    bits = int("".join("1" if number >= 0 else "0" for number in vector("abc")), 2)
    assert (embeddings["ubinary"], embeddings["binary"]) == ([[bits]], [[bits - 128]])
    assert np.frombuffer(base64.b64decode(embeddings["base64"][0]), "<f4") == pytest.approx(np.array(vector("abc")))

    def kept(**fields: Any) -> list[int]:
        assert ask(texts=["abcdef"], **fields)[0] == 200
        return fake_pooling.requests[-1].prompt_token_ids

    assert kept(max_tokens=3) == [*b"ab", 256]
    assert kept(max_tokens=3, truncate="START") == [*b"ef", 256]
    assert kept() == kept(truncate="NONE", max_tokens=7) == [*b"abcdef", 256]
    for wrong, field in [
        ({"truncate": "NONE", "max_tokens": 6, "texts": ["abcdef"]}, "max_tokens"),
        ({"truncate": "NONE", "texts": ["a" * 100]}, "texts"),
        ({"input_type": "haiku"}, "input_type"),
        ({"texts": []}, "texts"),
        ({"texts": None}, "texts"),
        ({"inputs": parts}, "texts"),
        ({"images": ["data:"]}, "images"),
        ({"output_dimension": 9}, "output_dimension"),
        ({"output_dimension": 4, "embedding_types": ["binary"]}, "embedding_types"),
        ({"max_tokens": 65}, "max_tokens"),
        ({"texts": None, "inputs": [{"content": [{"type": "image_url"}]}]}, "inputs[0]"),
    ]:
        status, answer = ask(**wrong)
        assert (status, answer["error"]["param"]) == (400, field), (wrong, answer)
    assert ask(texts=["a" * 100])[1]["meta"]["tokens"] == {"input_tokens": 64}
    assert ask(model="other")[0] == 404


# --- pairs ---

FIELD_PAIRS = [("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2")]


@pytest.mark.field("ScoreTextRequest.text_1|text_2", "ScoreDataRequest.data_1|data_2")
@pytest.mark.field("ScoreQueriesDocumentsRequest.queries|documents", "ScoreQueriesItemsRequest.queries|items")
@each_row("path", ["/score", "/v1/score"])
@each_row(("one", "two"), FIELD_PAIRS)
def test_scores(embed: LiveServer, cross: LiveServer, path: str, one: str, two: str) -> None:
    def scores(server: LiveServer, first: Any, second: Any) -> list[float]:
        status, answer = server.post(path, {one: first, two: second})
        assert status == 200, answer
        assert (answer["object"], answer["id"][:6]) == ("list", "score-")
        assert [each["object"] for each in answer["data"]] == ["score"] * len(answer["data"])
        return [each["score"] for each in answer["data"]]

    def logistic(shared: int) -> float:
        return 1 / (1 + np.exp(-shared))

    def cosine(first: str, second: str) -> float:
        return float(np.dot(vector(first), vector(second)))

    part = {"content": [{"type": "text", "text": "ab"}]}
    assert scores(cross, "abc", "ab") == [pytest.approx(logistic(3))]  # <eos> is in both
    assert scores(cross, "abc", ["ab", "xyz"]) == pytest.approx([logistic(3), logistic(1)])
    assert scores(cross, ["abc", "x"], ["ab", "x"]) == pytest.approx([logistic(3), logistic(2)])
    assert scores(cross, "abc", [part, "xyz"]) == pytest.approx([logistic(3), logistic(1)])
    assert scores(embed, "abc", "ab") == [pytest.approx(cosine("abc", "ab"))]
    assert scores(embed, "abc", ["ab", "xyz"]) == pytest.approx([cosine("abc", "ab"), cosine("abc", "xyz")])
    assert scores(embed, ["abc", "x"], [part, "x"]) == pytest.approx([cosine("abc", "ab"), 1.0])
    for wrong, field in [
        ({one: ["a", "b"], two: ["a", "b", "c"]}, one),
        ({one: "a"}, two),
        ({one: "a", two: []}, two),
        ({one: "a", two: ["a", 3]}, f"{two}[1]"),
        ({one: "a", two: {"content": [{"type": "image_url"}]}}, two),
        ({one: "a" * 100, two: "b"}, one),
        ({one: "a", two: ["b", "b" * 100]}, two),
    ]:
        status, answer = cross.post(path, wrong)
        assert status == 400
        if not (wrong == {one: "a"} and one == "queries"):
            assert answer["error"]["param"] == field, (wrong, answer)


@pytest.mark.field("RerankRequest.query|documents|top_n|return_documents")
@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_rankings(embed: LiveServer, cross: LiveServer, path: str) -> None:
    part = {"content": [{"type": "text", "text": "abc"}]}
    body = {"query": "abc", "documents": ["xyz", part, "ab"]}
    for server in (embed, cross):
        answer = server.post(path, body)[1]
        assert answer["id"].startswith("rerank-")
        assert [each["index"] for each in answer["results"]] == [1, 2, 0]
        scores = [each["relevance_score"] for each in answer["results"]]
        assert scores == sorted(scores, reverse=True)
        assert answer["results"][0]["document"] == {"text": None, "multi_modal": part["content"]}
        assert answer["results"][1]["document"] == {"text": "ab", "multi_modal": None}
        assert set(answer) == {"id", "model", "usage", "results"}
        assert [each["index"] for each in server.post(path, body | {"top_n": 2})[1]["results"]] == [1, 2]
        bare = server.post(path, body | {"return_documents": False})[1]["results"]
        assert {tuple(each) for each in bare} == {("index", "relevance_score")}
        assert len(server.post(path, {"query": "a", "documents": "b"})[1]["results"]) == 1
    for wrong, field in [
        ({"query": ["a"], "documents": ["b"]}, "query"),
        ({"documents": ["b"]}, "query"),
        ({"query": "a"}, "documents"),
        ({"query": "a", "documents": []}, "documents"),
        ({"query": "a", "documents": ["b"], "top_n": -1}, "top_n"),
        ({"query": "a", "documents": ["b" * 100]}, "documents"),
        ({"query": "a" * 100, "documents": ["b"]}, "query"),
    ]:
        status, answer = cross.post(path, wrong)
        assert (status, answer["error"]["param"]) == (400, field)


@pytest.mark.field(
    "ScoreDataRequest|ScoreQueriesDocumentsRequest|ScoreQueriesItemsRequest|ScoreTextRequest|RerankRequest."
    "max_tokens_per_query|max_tokens_per_doc|instruction|chat_template_kwargs"
)
@each_row("schema", PAIRS)
def test_prompts_of_pairs(embed: LiveServer, cross: LiveServer, template: LiveServer, schema: str) -> None:
    def prompts_of(server: LiveServer, **fields: Any) -> list[list[int]]:
        before = len(fake_pooling.requests)
        status, answer = server.post(path_of(schema), long(schema) | fields)
        assert status == 200, answer
        return [request.prompt_token_ids for request in fake_pooling.requests[before:]]

    word = b"abcdefghij"
    assert prompts_of(cross, max_tokens_per_query=2) == [[*b"ab", 256, *word, 256]]
    assert prompts_of(cross, max_tokens_per_doc=3) == [[*word, 256, *b"abc", 256]]
    assert prompts_of(embed, max_tokens_per_query=2, max_tokens_per_doc=3) == [[*b"ab", 256], [*b"abc", 256]]
    pair = b"[query]abcdefghij[document]abcdefghij"
    assert prompts_of(template) == [[*pair, 256]]
    assert prompts_of(template, instruction="!") == [[*pair, *b"!", 256]]
    assert prompts_of(template, chat_template_kwargs={"word": "?"}, instruction="!") == [[*pair, *b"!?", 256]]
    for server in (cross, embed):
        for field, value in (("instruction", "!"), ("chat_template_kwargs", {"word": "?"})):
            status, answer = server.post(path_of(schema), LEAST[schema] | {field: value})
            assert (status, answer["error"]["param"]) == (400, field)


def test_models_without_scores_are_refused(classify: LiveServer) -> None:
    status, answer = classify.post("/score", {"text_1": "a", "text_2": "b"})
    assert (status, answer["error"]["param"]) == (400, "model")
    assert "one label; this one has 3" in answer["error"]["message"]


def test_late_interaction() -> None:
    with live_server("fake:pool-tokens") as server:
        answer = server.post("/score", {"text_1": "abc", "text_2": ["abx", "l"]})[1]
    assert [each["score"] for each in answer["data"]] == [3, 1]  # tokens of the query (a, b, c, <eos>) in the document


# --- errors, limits, disconnects ---


def test_generative_models_are_refused() -> None:
    with live_server() as server:
        for schema in [*SCHEMAS, "CohereEmbedRequest"]:
            status, answer = server.post(path_of(schema), LEAST[schema])
            assert status == 400
            assert "--runner pooling" in answer["error"]["message"]
        assert server.post("/v1/completions", {"prompt": "a"})[0] == 200


def test_pooling_models_do_not_generate(embed: LiveServer) -> None:
    chat = {"messages": CHAT, "chat_template": "x"}  # the template is not the reported error
    bodies = [("/v1/completions", {"prompt": "a"}), ("/v1/chat/completions", chat), ("/v1/responses", {"input": "a"})]
    for path, body in bodies:
        status, answer = embed.post(path, body)
        assert status == 400
        assert "--runner generate" in answer["error"]["message"]


@each_row(
    ("path", "body", "field"),
    [
        ("/v1/embeddings", b"{", None),
        ("/v1/embeddings", {}, "input"),
        ("/v1/embeddings", {"input": None}, "input"),
        ("/v1/embeddings", {"input": "", "add_special_tokens": False}, "input"),
        ("/v1/embeddings", {"input": []}, "input"),
        ("/v1/embeddings", {"input": ["a", 1]}, "input"),
        ("/v1/embeddings", {"input": [["a"]]}, "input"),
        ("/v1/embeddings", {"input": [257]}, "input"),
        ("/v1/embeddings", {"input": [-1]}, "input"),
        ("/v1/embeddings", {"input": "a" * 65}, "input"),
        ("/v1/embeddings", {"input": "\ud800"}, None),
        ("/v1/embeddings", {"input": "a", "dimensions": 0}, "dimensions"),
        ("/v1/embeddings", {"input": "a", "encoding_format": "hex"}, "encoding_format"),
        ("/v1/embeddings", {"input": "a", "truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ("/v1/embeddings", {"input": "a", "truncate_prompt_tokens": 0}, None),
        ("/v1/embeddings", {"input": "abc", "truncate_prompt_tokens": 1}, "truncate_prompt_tokens"),
        ("/v1/embeddings", {"input": "a", "padding": "max_length"}, "padding"),
        ("/v1/embeddings", {"input": ["a"] * 4097}, "input"),
        ("/v1/embeddings", {"messages": []}, "messages"),
        (
            "/v1/embeddings",
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content[0].type",
        ),
        ("/v1/embeddings", {"input": ["a", "a" * 100]}, "input[1]"),
        ("/pooling", {"data": "x"}, "data"),
        ("/pooling", {"messages": CHAT * 30}, "messages"),
        ("/classify", {"input": "a"}, "task"),
        ("/score", {"text_1": "a", "data_2": "b"}, None),
        ("/rerank", {"query": "a", "documents": ["a"] * 4097}, "documents"),
    ],
)
def test_bad_requests_name_the_field_and_the_server_continues(
    embed: LiveServer, path: str, body: Any, field: str | None
) -> None:
    status, answer = embed.post(path, body)
    assert status == 400, answer
    if field is not None:
        assert answer["error"]["param"] == field, answer
    assert embed.post("/v1/embeddings", {"input": "a"})[0] == 200


def test_all_tokens_together_are_bounded(embed: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "MAX_TOKENS", 10)
    assert embed.post("/v1/embeddings", {"input": ["abcd", "abcd"]})[0] == 200
    status, answer = embed.post("/v1/embeddings", {"input": ["abcd", "abcde"]})
    assert (status, answer["error"]["param"]) == (400, "input")


def test_vectors_of_all_tokens_are_bounded(embed: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "MAX_NUMBERS", 4 * fake_pooling.SIZE)
    body = {"task": "token_embed", "add_special_tokens": False}
    assert embed.post("/pooling", body | {"input": ["ab", "cd"]})[0] == 200
    status, answer = embed.post("/pooling", body | {"input": ["ab", "cde"]})
    assert (status, answer["error"]["param"]) == (400, "input")
    assert embed.post("/pooling", {"task": "embed", "input": ["ab", "cde"]})[0] == 200


def test_characters_of_all_pairs_are_bounded(cross: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pairs_module, "MAX_CHARACTERS", 10)
    assert cross.post("/rerank", {"query": "abc", "documents": ["de", "fg"]})[0] == 200
    status, answer = cross.post("/rerank", {"query": "abc", "documents": ["de", "fg", "h"]})
    assert (status, answer["error"]["param"]) == (400, "documents"), answer


def test_repeated_types_are_encoded_once(embed: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    encoded: list[str] = []
    encode = cohere._encoded
    monkeypatch.setattr(cohere, "_encoded", lambda kind, each: encoded.append(kind) or encode(kind, each))
    kinds = ["float", "base64"] * 8
    assert embed.post("/v2/embed", {"texts": ["abc"], "embedding_types": kinds})[0] == 200
    assert encoded == ["float", "base64"]


def test_a_full_queue_is_429_and_too_many_prompts_400() -> None:
    with live_server("fake:pool-slow", engine={"max_num_queued_reqs": 2}) as server:
        status, answer = server.post("/v1/embeddings", {"input": ["a", "b", "c"]})
        assert (status, answer["error"]["param"]) == (400, "input")
        assert "--max-num-queued-reqs" in answer["error"]["message"]

        async def ask_twice() -> QueueFullError | None:
            prompt = server.llm.pooling_inputs.parse("a")
            for name in "xy":
                await server.llm.add_request(name, prompt, PoolingParams())
            try:
                await server.llm.add_request("z", prompt, PoolingParams())
            except QueueFullError as error:
                return error
            finally:
                await server.llm.abort(["x", "y"])
            return None

        assert server.call(ask_twice()) is not None
        assert server.post("/v1/embeddings", {"input": ["a", "b"]})[0] == 200


def test_request_ids_are_in_the_header(embed: LiveServer) -> None:
    answer = embed.response("POST", "/v1/embeddings", {"input": "a"}, {"x-request-id": "seven"})
    assert answer.headers["x-request-id"] == "seven"
    assert json.loads(answer.body)["id"] == "embd-seven"


def test_many_inputs_keep_their_order(embed: LiveServer) -> None:
    texts = [chr(97 + number % 26) * (1 + number % 7) for number in range(300)]
    data = embed.post("/v1/embeddings", {"input": texts})[1]["data"]
    assert [each["embedding"] for each in data] == [pytest.approx(vector(text)) for text in texts]


def test_a_disconnect_frees_the_requests() -> None:
    with live_server("fake:pool-slow") as server:
        connection = server.raw("POST", "/v1/embeddings", {"input": ["a"] * 500})
        eventually(lambda: server.llm.num_unfinished > 0)
        connection.close()
        eventually(lambda: server.llm.num_unfinished == 0)
        assert server.post("/v1/embeddings", {"input": "a"})[0] == 200
        eventually(lambda: server.llm.stats.waiting == 0)
        assert server.llm.stats.steps < 400  # the engine was notified
        lines = server.get("/metrics")[1].decode().splitlines()
    ends = {
        reason: float(line.rpartition(" ")[2])
        for line in lines
        for reason in ("stop", "abort")
        if line.startswith("vllm:request_success_total") and f'"{reason}"' in line
    }
    assert ends["abort"] > 0
    assert ends["abort"] + ends["stop"] == 501


def test_two_requests_with_the_same_id() -> None:
    with live_server("fake:pool-slow") as server:
        body = {"input": ["a"] * 50, "request_id": "same"}
        connection = server.raw("POST", "/v1/embeddings", body)
        eventually(lambda: server.llm.num_unfinished > 0)
        assert server.post("/v1/embeddings", {"input": "a", "request_id": "same"})[0] == 200
        connection.close()


def test_metrics_count_what_was_pooled() -> None:
    with live_server("fake:pool-embed") as server:
        server.post("/v1/embeddings", {"input": ["abc", "x"]})
        server.post("/v1/embeddings", {"input": "a" * 100})
        lines = server.get("/metrics")[1].decode().splitlines()
    value = {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")}
    labels = '{engine="0",model_name="fake"}'
    assert value[f"vllm:prompt_tokens_total{labels}"] == 6
    assert value[f"vllm:generation_tokens_total{labels}"] == 0
    assert value[f"vllm:e2e_request_latency_seconds_count{labels}"] == 2
    assert value[f"vllm:request_prompt_tokens_count{labels}"] == 2
    assert value[f"vllm:request_prefill_kv_computed_tokens_sum{labels}"] == 6
    for interval in ("queue", "prefill", "inference"):
        assert value[f"vllm:request_{interval}_time_seconds_count{labels}"] == 2
    run = value[f"vllm:request_inference_time_seconds_sum{labels}"]
    assert 0 < run <= value[f"vllm:e2e_request_latency_seconds_sum{labels}"]
    assert value[f"vllm:time_to_first_token_seconds_count{labels}"] == 0
    assert value['vllm:request_success_total{engine="0",finished_reason="stop",model_name="fake"}'] == 2


def test_a_dead_engine_is_reported() -> None:
    with live_server("fake:pool-crash") as server:
        assert server.post("/v1/embeddings", {"input": "a"})[0] == 200
        status, answer = server.post("/v1/embeddings", {"input": ["a"] * 9})
        assert status == 500
        assert "the engine has ended" in answer["error"]["message"]
        errors = [line for line in server.get("/metrics")[1].decode().splitlines() if '"error"' in line]
        [counted] = [float(line.rpartition(" ")[2]) for line in errors if "success_total" in line]
        assert 1 <= counted <= 9  # those in flight when it died
        assert server.post("/v1/embeddings", {"input": "a"})[0] in (500, 503)


def test_invocations_dispatch() -> None:
    infos = fake_pooling.INFOS
    assert pooling_handler({"input"}, infos["embed"]) is routes.handle_embeddings
    assert pooling_handler({"messages"}, infos["classify"]) is routes.handle_classify
    assert pooling_handler({"input"}, infos["tokens"]) is routes.handle_pooling
    assert pooling_handler({"input", "task"}, infos["embed"]) is routes.handle_pooling
    assert pooling_handler({"query", "documents"}, infos["cross"]) is scoring.handle_rerank
    for one, _ in FIELD_PAIRS:
        assert pooling_handler({one}, infos["cross"]) is scoring.handle_score
