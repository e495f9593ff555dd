"""Structured outputs over HTTP: every request field, streams, n, after reasoning, refusals."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.servers.live_server import LiveServer, live_server
from support.suite.rows import each_row

from pagoda.common.config.groups.structured_outputs import StructuredOutputsConfig
from pagoda.common.engine.structured_output.grammar import closes_safely
from pagoda.common.errors import ConfigError, RequestError
from pagoda.common.sampling_params import SamplingParams, StructuredOutputsParams
from pagoda.server.http.body import parse
from pagoda.server.http.fields import StructuredFields
from pagoda.server.outputs import CompletionOutput
from pagoda.server.parsers import answer_formats
from pagoda.server.parsers.registry import reasoning_format
from pagoda.server.processing import inputs
from pagoda.server.processing.inputs import OutputConstraints, grammar_of
from pagoda.server.settings.flags import EngineArgs

ABC = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
TAGS = {"structures": [{"begin": "<f>", "schema": ABC, "end": "</f>"}], "triggers": ["<f>"]}
FORM = {"type": "tag", "begin": "<f>", "content": {"type": "json_schema", "json_schema": ABC}, "end": "</f>"}
UNTYPED = {key: value for key, value in FORM.items() if key != "type"}
ONCE = {"at_least_one": True, "stop_after_first": True}
ONE_OF_UNTYPED = {"type": "tags_with_separator", "separator": ",", "tags": [UNTYPED], **ONCE}


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server(max_body_bytes=1 << 20) as server:
        yield server


def complete(server: LiveServer, **body: Any) -> Any:
    status, answer = server.post("/v1/completions", {"prompt": "a", "max_tokens": 20} | body)
    assert status == 200, answer
    return answer["choices"]


@each_row(
    ("path", "fields"),
    [
        ("/v1/completions", {"response_format": {"type": "json_object"}}),
        ("/v1/completions", {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": ABC}}}),
        ("/v1/completions", {"structured_outputs": {"regex": "[b-d]{2}x"}}),
        ("/v1/completions", {"structured_outputs": {"choice": ["no", "yes"]}}),
        ("/v1/completions", {"structured_outputs": {"grammar": 'root ::= "q" [0-9]'}}),
        ("/v1/completions", {"structured_outputs": {"structural_tag": json.dumps(TAGS)}, "stream": True}),
    ],
)
def test_without_the_library_constraints_are_refused_with_the_install_command(
    path: str, fields: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "llguidance.py").write_text("raise ImportError('not installed')")
    monkeypatch.syspath_prepend(tmp_path)  # for the process that tries grammars
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with live_server() as server:
        status, answer = server.post(path, {"prompt": "a", "max_tokens": 20} | fields)
        assert status == 400, answer
        assert "llguidance is not installed; pip install 'pagoda[structured]'" in answer["error"]["message"]
        assert answer["error"]["param"] == next(iter(fields))
        assert server.post(path, {"prompt": "a", "max_tokens": 2})[0] == 200


@pytest.mark.field(
    "CompletionRequest|ChatCompletionRequest.response_format|structured_outputs|guided_json|guided_whitespace_pattern"
    "|guided_choice|guided_regex|guided_grammar",
    "SamplingParams.structured_outputs",
)
@each_row(
    ("fields", "text"),
    [
        ({"response_format": {"type": "text"}}, "bcdefghijklmnopqrstu"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": ABC}}}, '{"a": 1}'),
        ({"response_format": {"type": "structural_tag", "format": FORM}}, '<f>{"a": 1}</f>'),
        ({"response_format": {"type": "structural_tag", "format": ONE_OF_UNTYPED}}, '<f>{"a": 1}</f>'),
        ({"response_format": {"type": "structural_tag", **TAGS}}, "bcdefghijklmnopqrstu"),
        ({"structured_outputs": {"json": ABC, "disable_any_whitespace": True}}, '{"a":1}'),
        ({"structured_outputs": {"json": json.dumps(ABC), "whitespace_pattern": " ?"}}, '{"a": 1}'),
        ({"structured_outputs": {"choice": ["no", "yes"]}}, "no"),
        ({"structured_outputs": {"regex": "[b-d]{2}x"}}, "bcx"),
        ({"structured_outputs": {"grammar": 'root ::= "q" [0-9]'}}, "q0"),
        ({"structured_outputs": {"grammar": 'start: "q" /[0-9]/'}}, "q0"),
        ({"structured_outputs": {"structural_tag": json.dumps({"format": FORM})}}, '<f>{"a": 1}</f>'),
        ({"guided_json": ABC, "guided_whitespace_pattern": " ?"}, '{"a": 1}'),
        ({"guided_choice": ["no", "yes"], "guided_decoding_backend": "auto"}, "no"),
        ({"guided_regex": "[b-d]{2}x"}, "bcx"),
        ({"guided_grammar": 'root ::= "q" [0-9]'}, "q0"),
    ],
)
def test_every_field_that_sets_a_constraint(server, fields, text):
    room = {"max_tokens": 20 if text.startswith("b") else 40}
    (choice,) = complete(server, **fields, **room)
    assert "".join(choice["text"].split()) == "".join(text.split())
    chat = {"messages": [{"role": "user", "content": "x"}]} | room | fields
    status, answer = server.post("/v1/chat/completions", chat)
    assert status == 200
    if not text.startswith("b"):  # else it depends on the prompt
        assert "".join(answer["choices"][0]["message"]["content"].split()) == "".join(text.split())
        assert answer["choices"][0]["finish_reason"] == "stop"


def pair(second: int) -> dict[str, Any]:
    """A schema of [1, second], whose items are no enumerations."""
    items = [{"type": "integer", "minimum": number, "maximum": number} for number in (1, second)]
    return {"type": "array", "prefixItems": items, "minItems": 2, "maxItems": 2, "uniqueItems": True}


@each_row("path", ["/v1/completions", "/v1/chat/completions"])
def test_an_answer_that_violates_what_only_a_check_shows_is_an_error(server, path):
    """Items that are to differ and are no enumeration: streamed, the answer ends with an error event."""
    given = {"prompt": "a"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "a"}]}
    body = given | {"max_tokens": 200, "n": 2, "structured_outputs": {"json": pair(2)}}
    status, answer = server.post(path, body)
    assert (status, [choice["finish_reason"] for choice in answer["choices"]]) == (200, ["stop", "stop"])
    body["structured_outputs"] = {"json": pair(1)}
    status, answer = server.post(path, body)
    assert (status, answer["error"]["message"]) == (500, "the answer violates the JSON schema (uniqueItems)")
    status, answer = server.post(path, body | {"max_tokens": 2})
    assert (status, answer["choices"][0]["finish_reason"]) == (200, "length"), "a part of an answer is not checked"
    status, events = server.post(path, body | {"stream": True})
    assert status == 200
    last = [line for line in events.decode().splitlines() if line.startswith("data: {")][-1]
    assert json.loads(last.removeprefix("data: "))["error"]["message"] == answer_message(server, path, body)


def answer_message(server: LiveServer, path: str, body: dict[str, Any]) -> str:
    return server.post(path, body)[1]["error"]["message"]


def test_offline_the_answer_ends_with_an_error():
    for second, ends in ((2, ("stop", None)), (1, ("error", "the answer violates the JSON schema (uniqueItems)"))):
        constraint = StructuredOutputsParams(json=pair(second))
        output = output_of(SamplingParams(max_tokens=200, structured_outputs=constraint))
        assert (output.finish_reason, output.stop_reason) == ends


def test_whitespace_options(server):
    plain, none, tabs = (
        complete(server, structured_outputs={"json": ABC} | how)[0]["text"]
        for how in ({}, {"disable_any_whitespace": True}, {"whitespace_pattern": "\t"})
    )
    assert none == '{"a":1}'
    assert tabs.startswith('{\t"a":\t1')
    assert plain not in (none, tabs)
    assert json.loads(plain) == json.loads(tabs) == {"a": 1}


def test_json_object(server):
    (choice,) = complete(server, response_format={"type": "json_object"}, max_tokens=3)
    assert choice["text"].startswith("{")
    (choice,) = complete(server, structured_outputs={"json": True}, max_tokens=1)
    assert choice["text"]


def test_streamed_equals_whole(server):
    fields = {"structured_outputs": {"choice": ["no", "yes"]}, "n": 3, "prompt": "a", "max_tokens": 9}
    whole = complete(server, **fields)
    status, raw = server.post("/v1/completions", fields | {"stream": True})
    assert status == 200
    texts = ["", "", ""]
    for line in raw.decode().split("\n\n"):
        if line.startswith("data: {"):
            for choice in json.loads(line[6:])["choices"]:
                texts[choice["index"]] += choice["text"]
    assert texts == [choice["text"] for choice in whole] == ["no"] * 3


BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"structured_outputs": {"json_object": False}}, "structured_outputs", "exactly one"),
    ({"structured_outputs": {}}, "structured_outputs", "exactly one"),
    ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs", "json, regex"),
    ({"structured_outputs": {"regex": "("}}, "structured_outputs", "unclosed"),
    ({"structured_outputs": {"json": "{"}}, "structured_outputs", "not JSON"),
    ({"structured_outputs": {"json": False}}, "structured_outputs", "allows no answer"),
    ({"structured_outputs": {"jason": {}}}, "structured_outputs", "exactly one"),
    ({"structured_outputs": {"choice": "no"}}, "structured_outputs.choice", "array"),
    ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs", "needs a format"),
    ({"structured_outputs": {"choice": ["a"]}, "min_tokens": 9}, "structured_outputs", "min_tokens is 9"),
    ({"response_format": {"type": "yaml"}}, "response_format", "yaml"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "required"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
        "response_format.json_schema.schema",
        "is missing",
    ),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "no"}}}}, "response_format", "no"),
    ({"response_format": {"type": "structural_tag"}}, "response_format", "needs a format"),
    ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex", "leave one of them out"),
    ({"guided_regex": "("}, "guided_regex", "unclosed"),
    ({"guided_choice": []}, "guided_choice", "empty"),
    ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern", "needs guided_json"),
    ({"thinking_token_budget": 3}, "thinking_token_budget", "--reasoning-parser"),
]


@each_row("stream", [False, True])
@each_row(("fields", "param", "words"), BAD)
def test_a_bad_constraint_is_a_400_that_names_its_field(server, fields, param, words, stream):
    status, answer = server.post("/v1/completions", {"prompt": "a", "max_tokens": 20, "stream": stream} | fields)
    if status == 200:  # it turned out while it was answered
        assert stream
        assert words == "min_tokens is 9"
        answer = json.loads(answer.decode().split("data: ")[-2])
    assert answer["error"]["type"] == "invalid_request_error", answer
    assert answer["error"]["param"] == param
    assert words in answer["error"]["message"]
    assert complete(server, max_tokens=2)[0]["text"] == "bc"


@each_row(
    "tag",
    [
        "[]",
        {"format": {"type": "banana"}},
        {"format": {"type": "tag", "begin": "<f>", "end": "</f>"}},
        {"format": {"type": "const_string", "value": 1}},
        {"format": {"type": "const_string", "value": "x", "more": 1}},
        {"format": {"type": "sequence", "elements": []}},
        {"format": {"type": "triggered_tags", "triggers": ["<g"], "tags": [FORM]}},
        {"format": {"type": "tags_with_separator", "separator": ",", "tags": [{"type": "any_text"}]}},
        {"structures": [{}], "triggers": ["<"]},
        {"structures": [], "triggers": "<"},
    ],
)
def test_bad_structural_tags(server, tag):
    text = tag if isinstance(tag, str) else json.dumps(tag)
    status, answer = server.post("/v1/completions", {"prompt": "a", "structured_outputs": {"structural_tag": text}})
    assert (status, answer["error"]["param"]) == (400, "structured_outputs")


def form_of(**body: Any) -> StructuredOutputsParams | None:
    return parse(StructuredFields, json.dumps(body).encode()).structure()


def test_no_constraint():
    assert form_of() is None
    assert form_of(response_format={"type": "text"}) is None
    assert form_of(response_format=None, structured_outputs=None) is None


# --- thinking ---


class Spoken:
    starts, ends = ("<",), (">",)

    def thinks(self, prompt: str) -> bool:
        return prompt.endswith("<")


@pytest.fixture
def thinker(monkeypatch) -> Iterator[LiveServer]:
    monkeypatch.setattr(inputs, "reasoning_format", lambda *names: Spoken())
    monkeypatch.setattr(answer_formats, "reasoning_format", lambda *names: Spoken())
    with live_server("fake", engine={"reasoning_parser": "fake"}) as server:
        yield server


@pytest.mark.field("CompletionRequest|ChatCompletionRequest|SamplingParams.thinking_token_budget")
def test_a_grammar_applies_after_the_thinking_budget(thinker):
    fields = {"thinking_token_budget": 3, "guided_choice": ["no", "yes"]}
    assert complete(thinker, prompt="b<", **fields)[0]["text"] == "=>no"
    assert complete(thinker, prompt="<a", **fields)[0]["text"] == "no"
    assert complete(thinker, prompt="a<", thinking_token_budget=0, max_tokens=3)[0]["text"].startswith(">")
    free = complete(thinker, prompt="a", thinking_token_budget=3, max_tokens=4)[0]["text"]
    assert free == "bcde"


@pytest.mark.setting("--reasoning-config")
def test_the_configured_end_of_reasoning_is_forced(monkeypatch):
    monkeypatch.setattr(inputs, "reasoning_format", lambda *names: Spoken())
    monkeypatch.setattr(answer_formats, "reasoning_format", lambda *names: Spoken())
    config = {"reasoning_parser": "fake", "reasoning_end_str": "So>", "reasoning_start_str": "["}
    with live_server("fake", engine={"reasoning_config": config}) as server:
        text = complete(server, prompt="b<", thinking_token_budget=2, guided_choice=["no"])[0]["text"]
        assert text == "=>no", "the parser's own end still ends it"
        assert complete(server, prompt="b<", thinking_token_budget=1, guided_choice=["no"])[0]["text"] == "=So>no"
    from support.checkpoints.byte_text import byte_tokenizer

    forms = OutputConstraints(StructuredOutputsConfig(reasoning_config=config), byte_tokenizer(), Spoken())
    reasoning = forms.thinking(SamplingParams(thinking_token_budget=1), "a", [])
    assert reasoning is not None
    assert (reasoning.starts, reasoning.ends) == (((ord("["),), (ord("<"),)), (tuple(b"So>"), (ord(">"),)))


@pytest.mark.parametrize(
    ("config", "parser"),
    [({"reasoning_end": "x"}, ""), ({"reasoning_end_str": 1}, ""), ({"reasoning_parser": "qwen3"}, "granite")],
)
def test_an_invalid_reasoning_config(config, parser):
    with pytest.raises(ConfigError, match="--reasoning-config"):
        StructuredOutputsConfig(reasoning_config=config, reasoning_parser=parser)
    assert StructuredOutputsConfig(reasoning_config={"reasoning_parser": "qwen3"}).reasoning_parser == "qwen3"


def test_engine_parameters_of_reasoning():
    from support.checkpoints.byte_text import byte_tokenizer

    forms = OutputConstraints(StructuredOutputsConfig(), byte_tokenizer(), Spoken())
    params = SamplingParams(structured_outputs=StructuredOutputsParams(regex="a"))
    reasoning = forms.thinking(params, None, list(b"a<"))
    assert reasoning is not None
    assert (reasoning.open, reasoning.starts, reasoning.ends) == (True, (), ((ord(">"),),))
    assert forms.thinking(params, "a<b>", []) is None, "the prompt has closed it"
    maybe = forms.thinking(params, "a", [])
    assert maybe is not None
    assert (maybe.open, maybe.starts) == (False, ((ord("<"),),))
    prompt = "<|im_start|>user\nwhat is </think>?<|im_end|>\n<|im_start|>assistant\n"
    forms = OutputConstraints(StructuredOutputsConfig(), byte_tokenizer(), reasoning_format("qwen3"))
    assert forms.thinking(params, prompt, []) is not None, "users may write tags"
    assert forms.thinking(params, prompt + "<think>\n\n</think>\n\n" + "It is. " * 20, []) is None, "it is over"
    assert forms.thinking(SamplingParams(), "a<", []) is None
    with pytest.raises(RequestError, match="thinking_token_budget"):
        SamplingParams(thinking_token_budget=-2)


# --- settings ---


def test_settings_are_checked():
    for stated, words in (
        ({"banana": 1}, "banana is unknown"),
        ({"backend": "outlines"}, "use guidance"),
        ({"backend": "lm-format-enforcer"}, "use guidance"),
        ({"backend": "other"}, "unknown"),
        ({"disable_any_whitespace": "yes"}, "true or false"),
        ({"reasoning_parser": "qwen3"}, "--reasoning-parser"),
    ):
        with pytest.raises(ConfigError, match=words):
            StructuredOutputsConfig(structured_outputs_config=stated)
    StructuredOutputsConfig(
        structured_outputs_config={"backend": "auto", "disable_fallback": True, "reasoning_parser": ""}
    )


OPEN_OBJECT = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}


@pytest.mark.setting("--structured-outputs-config")
def test_settings_of_the_server(monkeypatch):
    """Whitespace, additional properties, and whether the grammar covers the reasoning."""
    bare = {"disable_any_whitespace": True}
    assert text_of(LLM_TEXT, {}) != '{"a":1}'
    assert text_of(LLM_TEXT, bare) == '{"a":1}'
    assert '"close_objects":"no"' in grammar_text({"disable_additional_properties": False})
    assert '"close_objects":"yes"' in grammar_text({"disable_additional_properties": True})
    assert '"close_objects":"safe"' in grammar_text({})
    assert text_of(LLM_TEXT, {"disable_any_whitespace": True, "disable_additional_properties": True}) == '{"a":1}'
    forms = OutputConstraints(StructuredOutputsConfig(structured_outputs_config={"enable_in_reasoning": True}), None)
    assert forms.thinking(SamplingParams(), "a", []) is None


@each_row(
    ("schema", "safe"),
    [
        (OPEN_OBJECT, True),
        ({"$defs": {"x": OPEN_OBJECT}, "anyOf": [{"$ref": "#/$defs/x"}, {"type": "null"}]}, True),
        ({"allOf": [{"$ref": "#/$defs/x"}], "$defs": {"x": OPEN_OBJECT}}, True),
        ({"allOf": [OPEN_OBJECT, {"properties": {"b": {}}}]}, False),
        ({"items": {**OPEN_OBJECT, "oneOf": [{"required": ["b"]}]}}, False),
        ({"properties": {"anyOf": OPEN_OBJECT, "properties": OPEN_OBJECT}}, True),
        ({"const": {"properties": {}, "allOf": [1, 2]}}, True),
    ],
)
def test_schemas_that_close_safely(schema: dict[str, Any], safe: bool) -> None:
    assert closes_safely(schema) == safe


LLM_TEXT = SamplingParams(max_tokens=20, structured_outputs=StructuredOutputsParams(json=OPEN_OBJECT))


def grammar_text(settings: dict[str, Any]) -> str:
    params = StructuredOutputsParams(json=OPEN_OBJECT)
    return grammar_of(params, StructuredOutputsConfig(structured_outputs_config=settings), {}).text


def text_of(params: SamplingParams, settings: dict[str, Any]) -> str:
    return output_of(params, settings).text


def output_of(params: SamplingParams, settings: dict[str, Any] | None = None) -> CompletionOutput:
    from support.checkpoints.byte_text import byte_tokenizer
    from support.engines.fake_engine import build

    from pagoda.server.llm_engine import LLMEngine

    config = EngineArgs("fake", structured_outputs_config=settings or {}).create_engine_config()
    engine = LLMEngine(config, build=build, open_text=lambda _: byte_tokenizer())
    engine.add_request("r", "a", params)
    while engine.has_unfinished_requests():
        for output in engine.step():
            last = output.outputs[0]
    return last
