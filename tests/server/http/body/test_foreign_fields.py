"""Fields of other servers: honoured under another name, refused by name, or accepted and named."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from support.servers.live_server import LiveServer, live_server

TEXT: dict[str, Any] = {"prompt": "a"}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}]}
BOTH = [("/v1/completions", TEXT), ("/v1/chat/completions", CHAT)]
each_api = pytest.mark.parametrize(("path", "body"), BOTH, ids=["text", "chat"])


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server() as server:
        yield server


@pytest.fixture(scope="module")
def strict() -> Iterator[LiveServer]:
    with live_server(strict_requests=True) as server:
        yield server


def rendered(server: LiveServer, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """The sampling parameters that a request has."""
    status, answer = server.post(f"{path}/render", body)
    assert status == 200, answer
    answer = answer[0] if isinstance(answer, list) else answer
    return answer["sampling_params"]


@pytest.mark.field("CompletionRequest|ChatCompletionRequest.n_predict|max_new_tokens|max_length")
@pytest.mark.parametrize("name", ["n_predict", "max_new_tokens", "max_length"])
@each_api
def test_other_names_of_max_tokens(server: LiveServer, path: str, body: dict[str, Any], name: str) -> None:
    status, answer = server.post(path, body | {name: 3})
    assert (status, answer["usage"]["completion_tokens"]) == (200, 3)
    assert server.post(path, body | {name: 2, "max_tokens": 2})[1]["usage"]["completion_tokens"] == 2
    status, answer = server.post(path, body | {name: 0})
    assert (status, answer["error"]["param"]) == (400, name)
    answered = server.response("POST", path, body | {name: 3, "max_tokens": 2})
    if name == "max_length":  # elsewhere the length of the context
        assert (answered.status, answered.headers["x-pagoda-ignored"]) == (200, name)
        return
    assert answered.status == 400
    assert json.loads(answered.body)["error"]["message"].startswith(
        f"{name} and max_tokens are the same field and differ"
    )
    assert rendered(server, path, body | {name: 3, "max_tokens": -1})["max_tokens"] == 3
    assert server.post(path, body | {name: -1, "max_tokens": 0})[1]["error"]["param"] == "max_tokens"


@each_api
def test_unlimited_n_predict(server: LiveServer, path: str, body: dict[str, Any]) -> None:
    limits = [rendered(server, path, body | {"n_predict": number})["max_tokens"] for number in (-1, -2)]
    assert limits == [rendered(server, path, body | {"max_tokens": -1})["max_tokens"]] * 2
    assert rendered(server, path, body | {"n_predict": -1, "max_tokens": 2})["max_tokens"] == 2
    assert server.post(path, body | {"max_new_tokens": -2})[1]["error"]["param"] == "max_new_tokens"


@pytest.mark.field("CompletionRequest|ChatCompletionRequest.repeat_penalty|rep_pen|do_sample")
@each_api
def test_other_names_of_sampling_rules(server: LiveServer, path: str, body: dict[str, Any]) -> None:
    for name in ("repeat_penalty", "rep_pen"):
        assert rendered(server, path, body | {name: 1.25})["repetition_penalty"] == 1.25
        assert rendered(server, path, body | {name: 1.0, "repetition_penalty": 1.5})["repetition_penalty"] == 1.5
        assert rendered(server, path, body | {name: 1.5, "repetition_penalty": 1})["repetition_penalty"] == 1.5
        refused = server.post(path, body | {name: 1.0, "repetition_penalty": -1.0})[1]
        assert refused["error"]["param"] == "repetition_penalty"
        status, answer = server.post(path, body | {name: 1.25, "repetition_penalty": 1.5})
        assert (status, answer["error"]["param"]) == (400, name)
        assert server.post(path, body | {name: -1.0})[1]["error"]["param"] == name
    assert rendered(server, path, body | {"do_sample": False, "temperature": 0.7})["temperature"] == 0.0
    assert rendered(server, path, body | {"do_sample": True, "temperature": 0.7})["temperature"] == 0.7


@pytest.mark.field("*.add_bos_token")
def test_add_bos_token(server: LiveServer) -> None:
    def length(**more: Any) -> int:
        return len(server.post("/v1/completions/render", TEXT | more)[1][0]["token_ids"])

    assert length(add_bos_token=False) == length(add_special_tokens=False)
    assert length(add_bos_token=True) == length()


REFUSED: dict[str, tuple[Any, Any]] = {
    "typical_p": (0.5, 1),
    "typical": (0.5, 1),
    "mirostat": (2, 0),
    "mirostat_mode": (2, 0),
    "dry_multiplier": (0.8, 0),
    "xtc_probability": (0.5, 0),
    "no_repeat_ngram_size": (3, 0),
    "tfs_z": (0.9, 1),
    "tfs": (0.9, 1),
    "top_n_sigma": (1.5, -1),
    "nsigma": (1.5, 0.0),
    "dynatemp_range": (0.5, 0),
    "smoothing_factor": (0.3, 0),
    "top_a": (0.2, 0),
    "epsilon_cutoff": (3.0, 0),
    "eta_cutoff": (3.0, 0),
    "penalty_alpha": (0.6, 0),
    "encoder_repetition_penalty": (1.2, 1),
    "skew": (0.1, 0),
}
"""Sampler -> a value that changes the answer, and one without effect."""


@pytest.mark.field(
    "CompletionRequest|ChatCompletionRequest.typical_p|xtc_probability|xtc_threshold|no_repeat_ngram_size"
)
@pytest.mark.parametrize("name", REFUSED)
def test_samplers_that_are_not_there_are_refused(server: LiveServer, name: str) -> None:
    changing, neutral = REFUSED[name]
    for path, body in BOTH:
        status, answer = server.post(path, body | {"max_tokens": 1, name: changing})
        assert (status, answer["error"]["param"]) == (400, name), answer
        assert f"{name} is not supported" in answer["error"]["message"]
        assert server.post(path, body | {"max_tokens": 1, name: neutral})[0] == 200


def test_the_name_of_a_limit_in_an_error_is_the_clients(server: LiveServer) -> None:
    asked = CHAT | {"max_completion_tokens": 5, "n_predict": 6}
    message = server.post("/v1/chat/completions", asked)[1]["error"]["message"]
    assert message.startswith("n_predict and max_completion_tokens are the same field and differ")


def test_numbers_without_effect_are_those_whatever_their_type(server: LiveServer) -> None:
    for number in (0, 0.0):
        assert server.post("/v1/completions", TEXT | {"max_tokens": 1, "mirostat": number})[0] == 200
    assert server.post("/v1/completions", TEXT | {"max_tokens": 1, "mirostat": 1.0})[0] == 400


def test_samplers_in_xargs_are_refused_by_their_name(server: LiveServer, strict: LiveServer) -> None:
    for each in (server, strict):
        status, answer = each.post("/v1/completions", TEXT | {"vllm_xargs": {"typical_p": 0.5}})
        assert (status, answer["error"]["param"]) == (400, "typical_p")


def test_zero_is_not_without_effect(server: LiveServer) -> None:
    assert server.post("/v1/completions", TEXT | {"typical_p": 0})[1]["error"]["param"] == "typical_p"


NAMED: dict[str, Any] = {
    "cache_prompt": False,
    "guided_decoding_backend": "outlines",
    "kv_transfer_params": {"do_remote_decode": False, "remote_host": None, "remote_block_ids": []},
    "ec_transfer_params": {"a": False},
    "vllm_xargs": {"a": 1},
    "dry_base": 1.75,
    "xtc_threshold": 0.1,
}
"""Fields that ask for nothing, or for what does not change an answer."""


@pytest.mark.field("CompletionRequest|ChatCompletionRequest.vllm_xargs")
@pytest.mark.parametrize("name", [name for name in NAMED if name != "xtc_threshold"])
@each_api
def test_what_asks_for_nothing_is_named(
    server: LiveServer, strict: LiveServer, path: str, body: dict[str, Any], name: str
) -> None:
    asked = body | {"max_tokens": 1, name: NAMED[name]}
    answer = server.response("POST", path, asked)
    assert (answer.status, answer.headers["x-pagoda-ignored"]) == (200, name)
    status, answer = strict.post(path, asked)
    assert (status, answer["error"]["param"]) == (400, name)


@each_api
def test_a_transfer_is_refused(server: LiveServer, path: str, body: dict[str, Any]) -> None:
    status, answer = server.post(path, body | {"kv_transfer_params": {"do_remote_decode": True}})
    assert (status, answer["error"]["param"]) == (400, "kv_transfer_params")


@pytest.mark.field("ChatCompletionRequest.documents")
def test_documents_that_the_template_does_not_show_are_named(server: LiveServer, strict: LiveServer) -> None:
    asked = CHAT | {"max_tokens": 1, "documents": [{"text": "a"}]}
    answer = server.response("POST", "/v1/chat/completions", asked)
    assert (answer.status, answer.headers["x-pagoda-ignored"]) == (200, "documents")
    assert strict.post("/v1/chat/completions", asked)[1]["error"]["param"] == "documents"


def test_null_content_of_a_user_is_empty(server: LiveServer) -> None:
    asked = {"messages": [{"role": "user", "content": None}], "max_tokens": 1}
    assert server.post("/v1/chat/completions", asked)[0] == 200


@pytest.mark.field("ResponsesRequest.input")
def test_outputs_of_calls_that_older_versions_of_codex_send(server: LiveServer) -> None:
    def rendered_with(output: Any) -> list[int]:
        items = [
            {"role": "user", "content": "a"},
            {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "1", "output": output},
        ]
        status, answer = server.post("/v1/responses/render", {"input": items})
        assert status == 200, answer
        return answer["token_ids"]

    assert rendered_with({"content": "done", "success": True}) == rendered_with("done")
    assert rendered_with({"success": False}) == rendered_with('{"success": false}')
