"""Requests of vLLM's tests of /v1/chat/completions that need no tools."""

from __future__ import annotations

import json
from posixpath import normpath
from typing import Any

import jsonschema
import regex
from support.vllm_requests.case import (
    GIVEN,
    NULL,
    TEXT,
    Expected,
    Ref,
    Sent,
    VllmCase,
    between,
    fits,
    longer,
    one_of,
    other,
    post,
    refused,
    same,
    size,
)
from support.vllm_requests.completions import BROKEN_GRAMMAR, BROKEN_SCHEMA, NO_USAGE, USAGE_LAST, rises

PATH = "/v1/chat/completions"
SUM = [{"role": "system", "content": "you are a helpful assistant"}, {"role": "user", "content": "what is 1+1?"}]
FRANCE = [
    {"role": "system", "content": "You are a helpful assistant."},
    {"role": "user", "content": "What is the capital of France?"},
]
SERIES = [
    {"role": "system", "content": "You are a helpful assistant."},
    {"role": "user", "content": "Who won the world series in 2020?"},
    {"role": "assistant", "content": "The Los Angeles Dodgers won the World Series in 2020."},
    {"role": "user", "content": "Where was it played?"},
]
HI = [{"role": "user", "content": "Hello"}]
LANGUAGE = [SUM[0], {"role": "user", "content": "The best language for type-safe systems programming is "}]
SAYING = "Here is a common saying about apple. An apple a day, keeps"
CONTINUED = {
    "messages": [{"role": "user", "content": "tell me a common saying"}, {"role": "assistant", "content": SAYING}],
    "continue_final_message": True,
    "add_generation_prompt": False,
    "max_tokens": 20,
    "temperature": 0.0,
}
CHOICES = ["Python", "Java", "JavaScript", "C++", "C#", "PHP", "TypeScript", "Ruby", "Swift", "Kotlin"]
ADDRESS = r"((25[0-5]|(2[0-4]|1\d|[1-9]|)\d)\.){3}(25[0-5]|(2[0-4]|1\d|[1-9]|)\d)"
EMPLOYEE = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 10},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "skills": {"type": "array", "items": {"type": "string", "maxLength": 10}, "minItems": 3, "maxItems": 3},
    },
    "required": ["name", "age", "skills"],
    "additionalProperties": False,
}
RESULT = {
    "type": "object",
    "properties": {"result": {"type": "integer", "maximum": 99}},
    "required": ["result"],
    "additionalProperties": False,
}


def ask(messages: Any, expected: Expected | None = None, /, **more: Any) -> Sent:
    return post(PATH, {"messages": messages} | more, expected)


def case(test: str, what: str, *sent: Sent, server: str = "smol", file: str = "test_chat.py") -> VllmCase:
    path = normpath(f"entrypoints/openai/chat_completion/{file}")
    return VllmCase(f"{path}::{test}", what, server, sent)


def valid(schema: dict[str, Any]) -> Any:
    return fits("JSON of the schema", lambda text: jsonschema.validate(json.loads(text), schema) is None)


def user(text: Any, **more: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text} | more]


def counts_up(last: int) -> Any:
    def holds(chunks: Any) -> bool:
        counted = [chunk["usage"]["completion_tokens"] for chunk in chunks]
        sums = all(
            c["usage"]["total_tokens"] == c["usage"]["prompt_tokens"] + c["usage"]["completion_tokens"] for c in chunks
        )
        steps = zip(chunks[1:], counted, counted[1:])
        rises = all(
            before == 0 or now > before or (not chunk["choices"] and now == before) for chunk, before, now in steps
        )
        return sums and rises and counted[-1] == last

    return fits(f"counts that rise to {last}", holds)


GREEDY = {"max_completion_tokens": 10, "temperature": 0.0}

LOGPROBS = (
    case("test_no_logprobs_chat", "false", ask(SUM, {"choices.0.logprobs": NULL}, logprobs=False, **GREEDY)),
    case(
        "test_zero_logprobs_chat",
        "0",
        ask(SUM, {"choices.0.logprobs.content.0.top_logprobs": size(0)}, logprobs=True, top_logprobs=0, **GREEDY),
    ),
    case(
        "test_some_logprobs_chat",
        "5",
        ask(SUM, {"choices.0.logprobs.content.0.top_logprobs": size(5)}, logprobs=True, top_logprobs=5, **GREEDY),
    ),
    case(
        "test_too_many_chat_logprobs",
        "21, streamed",
        ask(SUM, refused(), logprobs=True, top_logprobs=21, stream=True),
        ask(SUM, {"choices.0.message.content": TEXT}, max_completion_tokens=10),
    ),
    case("test_too_many_chat_logprobs", "30", ask(SUM, refused(), logprobs=True, top_logprobs=30)),
    *(
        case(
            "test_prompt_logprobs_chat",
            str(number),
            ask(SERIES, {"prompt_logprobs": longer(0)}, prompt_logprobs=number, max_tokens=5),
        )
        for number in (1, 0)
    ),
    case("test_prompt_logprobs_chat", "-1", ask(SERIES, refused(), prompt_logprobs=-1)),
    case("test_prompt_logprobs_chat", "not asked for", ask(SERIES, {"prompt_logprobs": NULL}, max_tokens=5)),
    case(
        "test_more_than_one_prompt_logprobs_chat",
        "1 and 2",
        ask(SERIES, {"prompt_logprobs.2": size(1)}, prompt_logprobs=1, max_tokens=5),
        ask(SERIES, {"prompt_logprobs.2": size(2)}, prompt_logprobs=2, max_tokens=5),
    ),
    case(
        "test_prompt_logprobs",
        "-1 with --max-logprobs -1",
        ask(user("abc"), {"prompt_logprobs": longer(0)}, prompt_logprobs=-1, max_tokens=2),
        server="all-logprobs",
        file="test_chat_echo.py",
    ),
    case(
        "test_top_logprobs",
        "-1 and logprobs as a text",
        ask(
            user("abc"),
            {"choices.0.logprobs.content": longer(0), "choices.0.logprobs.content.0.top_logprobs": size(257)},
            max_tokens=1,
            top_logprobs=-1,
            logprobs="true",
        ),
        server="all-logprobs",
        file="test_chat_echo.py",
    ),
    case(
        "test_logprob_token_ids_returns_requested_ids",
        "three ids",
        ask(
            HI,
            {
                "choices.0.logprobs.content.0.top_logprobs": fits(
                    "with two of the ids at least",
                    lambda tops: (
                        len({"token_id:100", "token_id:1000", "token_id:5000"} & {top["token"] for top in tops}) >= 2
                    ),
                ),
                "choices.0.logprobs.content.0.top_logprobs.*.logprob": between(-1e30, 0),
            },
            max_tokens=1,
            temperature=0,
            logprobs=True,
            top_logprobs=3,
            logprob_token_ids=[100, 1000, 5000],
            return_tokens_as_token_ids=True,
        ),
        file="test_logprob_token_ids.py",
    ),
    case(
        "test_logprob_token_ids_default_behavior_unchanged",
        "top 5",
        ask(
            HI,
            {
                "choices.0.logprobs.content.0.top_logprobs": size(5),
                "choices.0.logprobs.content.0.top_logprobs.*.logprob": between(-1e30, 0),
            },
            max_tokens=1,
            temperature=0,
            logprobs=True,
            top_logprobs=5,
        ),
        file="test_logprob_token_ids.py",
    ),
    case(
        "test_structured_outputs_choice_chat_logprobs",
        "a choice",
        ask(
            LANGUAGE,
            {"choices.0.logprobs.content.0.top_logprobs.*.logprob": between(-9999.0, 0)},
            max_completion_tokens=10,
            logprobs=True,
            top_logprobs=5,
            structured_outputs={"choice": CHOICES},
        ),
    ),
)

SESSIONS = (
    case(
        "test_single_chat_session",
        "two turns",
        ask(
            SUM,
            {
                "id": GIVEN,
                "choices": size(1),
                "choices.0.finish_reason": "length",
                "usage.completion_tokens": 5,
                "usage.prompt_tokens": 26,
                "usage.total_tokens": 31,
                "choices.0.message.role": "assistant",
                "choices.0.message.content": longer(4),
            },
            max_completion_tokens=5,
            logprobs=True,
            top_logprobs=5,
        ),
        ask(
            [
                *SUM,
                {"role": "assistant", "content": Ref("0.choices.0.message.content")},
                {"role": "user", "content": "express your result in json"},
            ],
            {"choices.0.message.content": TEXT},
            max_completion_tokens=5,
        ),
    ),
    case(
        "test_chat_streaming",
        "text",
        ask(SUM, **GREEDY),
        ask(
            SUM,
            {
                "roles": ["assistant"],
                "reasons": size(1),
                "reasons.0": same("0.choices.0.finish_reason"),
                "choices.-1.finish_reason": same("0.choices.0.finish_reason"),
                "choices.-1.delta.content": longer(0),
                "texts.0": same("0.choices.0.message.content"),
            },
            stream=True,
            **GREEDY,
        ),
    ),
    case(
        "test_chat_completion_stream_options",
        "no usage",
        ask(FRANCE, NO_USAGE, stream=True, stream_options={"include_usage": False}, **GREEDY),
    ),
    case(
        "test_chat_completion_stream_options",
        "usage at the end",
        ask(
            FRANCE,
            USAGE_LAST,
            stream=True,
            stream_options={"include_usage": True, "continuous_usage_stats": False},
            **GREEDY,
        ),
    ),
    *(
        case(
            "test_chat_completion_stream_options",
            f"include_usage: {value}, not streamed",
            ask(FRANCE, refused(), stream=False, stream_options={"include_usage": value}, **GREEDY),
        )
        for value in (None, True)
    ),
    case(
        "test_chat_completion_stream_options",
        "usage always",
        ask(
            FRANCE,
            {"chunks": counts_up(10)},
            stream=True,
            min_tokens=10,
            stream_options={"include_usage": True, "continuous_usage_stats": True},
            **GREEDY,
        ),
    ),
    case(
        "test_chat_completion_stream_options",
        "an unknown field min_characters",
        ask(
            user("Tell me a long story about a cat."),
            {"texts.0": longer(9), "choices.*.delta.content": TEXT},
            stream=True,
            min_characters=10,
            stream_options={"include_usage": False},
            **GREEDY,
        ),
    ),
    case(
        "test_chat_with_enable_force_include_usage",
        "usage in each chunk",
        ask(HI, {"chunks": counts_up(10)}, stream=True, min_tokens=10, **GREEDY),
        server="force-usage",
        file="test_enable_force_include_usage.py",
    ),
    case(
        "test_chat_completion_stream_options_and_logprobs_with_long_prompts",
        "usage, logprobs, chunks",
        ask(
            [FRANCE[0], {"role": "user", "content": "What is the capital of France?" * 100}],
            {
                "chunks": fits(
                    "the role without tokens, then usage that counts up to 5 tokens",
                    lambda chunks: (
                        chunks[0]["usage"]["completion_tokens"] == 0
                        and rises(chunks[:-1], 5)
                        and chunks[0]["choices"][0]["logprobs"] is None
                    ),
                )
            },
            max_tokens=5,
            temperature=0.0,
            stream=True,
            logprobs=True,
            top_logprobs=5,
            stream_options={"include_usage": True, "continuous_usage_stats": True},
        ),
        file="../test_chunked_prompt.py",
    ),
    case(
        "test_extra_fields_allowed",
        "in a message",
        ask(
            user("what is 1+1?", extra_field="0"),
            {"choices.0.message.content": TEXT},
            temperature=0,
            seed=0,
            max_tokens=5,
        ),
    ),
    case(
        "test_complex_message_content",
        "a list of one text",
        ask(user("what is 1+1?"), temperature=0, seed=0, max_tokens=10),
        ask(
            user([{"type": "text", "text": "what is 1+1?"}]),
            {"choices.0.message.content": same("0.choices.0.message.content")},
            temperature=0,
            seed=0,
            max_tokens=10,
        ),
    ),
    case(
        "test_custom_role",
        "a text and a list of one text",
        ask([{"role": "my-custom-role", "content": "what is 1+1?"}], temperature=0, seed=0, max_tokens=10),
        ask(
            [{"role": "my-custom-role", "content": [{"type": "text", "text": "what is 1+1?"}]}],
            {"choices.0.message.content": same("0.choices.0.message.content")},
            temperature=0,
            seed=0,
            max_tokens=10,
        ),
    ),
    *(
        case("test_long_seed", str(seed), ask([FRANCE[0]], refused("seed"), temperature=0, seed=seed))
        for seed in (-(2**63) - 1, 2**63)
    ),
    case(
        "test_invocations",
        "as the chat",
        ask(SUM, max_completion_tokens=5, temperature=0.0, logprobs=False),
        post(
            "/invocations",
            {"messages": SUM, "max_completion_tokens": 5, "temperature": 0.0, "logprobs": False},
            {
                "choices": same("0.choices"),
                "": fits(
                    "the same keys",
                    lambda body: (
                        {"id", "object", "created", "model", "choices", "usage", "prompt_logprobs"} <= set(body)
                    ),
                ),
            },
        ),
    ),
    case(
        "test_chat_completion_n_parameter_non_streaming",
        "n = 3",
        ask(
            user("What is the opposite of big?"),
            {
                "choices": size(3),
                "choices.1.index": 1,
                "choices.2.index": 2,
                "choices.*.message.content": longer(0),
                "choices.0.message.content": other("0.choices.1.message.content"),
            },
            max_completion_tokens=20,
            temperature=1.0,
            n=3,
            seed=1,
        ),
    ),
    case(
        "test_chat_completion_n_parameter_streaming",
        "n = 2",
        ask(
            FRANCE,
            {"texts": size(2), "texts.0": longer(0), "texts.1": longer(0)},
            max_completion_tokens=15,
            temperature=0.7,
            n=2,
            stream=True,
        ),
    ),
    case(
        "test_chat_completion_n_with_seed",
        "n = 2",
        ask(
            user("Say hello."),
            {"choices": size(2), "choices.1.index": 1, "choices.*.message.content": longer(0)},
            max_completion_tokens=10,
            temperature=0.8,
            n=2,
            seed=42,
        ),
    ),
    case(
        "test_chat_completion_n_equals_1",
        "n = 1",
        ask(
            user("Hello!"),
            {"choices": size(1), "choices.0.message.content": TEXT},
            max_completion_tokens=10,
            temperature=0.7,
            n=1,
        ),
    ),
    *(
        case(
            "test_chat_session_with_echo_and_continue_final_message",
            f"echo: {echo}",
            post(
                PATH,
                CONTINUED | {"echo": echo},
                {
                    "choices": size(1),
                    "choices.0.message.role": "assistant",
                    "choices.0.message.content": fits(
                        f"with the beginning: {echo}", lambda text, echo=echo: (SAYING in text) is echo
                    ),
                },
            ),
            file="test_chat_echo.py",
        )
        for echo in (True, False)
    ),
    case(
        "test_chat_completion_truncation_side_controls_prompt_truncation",
        "both sides",
        ask(
            user("Summarize truncation."),
            {"prompt_token_ids": longer(4)},
            max_tokens=1,
            temperature=0.0,
            return_token_ids=True,
        ),
        ask(
            user("Summarize truncation."),
            {
                "prompt_token_ids.0": same("0.prompt_token_ids.0"),
                "prompt_token_ids.3": same("0.prompt_token_ids.3"),
                "prompt_token_ids": size(4),
            },
            max_tokens=1,
            temperature=0.0,
            return_token_ids=True,
            truncate_prompt_tokens=4,
            truncation_side="right",
        ),
        ask(
            user("Summarize truncation."),
            {
                "prompt_token_ids.0": same("0.prompt_token_ids.-4"),
                "prompt_token_ids.3": same("0.prompt_token_ids.-1"),
                "prompt_token_ids": size(4),
            },
            max_tokens=1,
            temperature=0.0,
            return_token_ids=True,
            truncate_prompt_tokens=4,
            truncation_side="left",
        ),
        file="test_chat_completion.py",
    ),
)

STRUCTURED = (
    case(
        "test_structured_outputs_choice_chat",
        "two turns",
        ask(
            LANGUAGE,
            {"choices.0.message.content": one_of(*CHOICES)},
            max_completion_tokens=10,
            temperature=0.7,
            structured_outputs={"choice": CHOICES},
        ),
        ask(
            [
                *LANGUAGE,
                {"role": "assistant", "content": Ref("0.choices.0.message.content")},
                {"role": "user", "content": "I disagree, pick another one"},
            ],
            {"choices.0.message.content": one_of(*CHOICES)},
            max_completion_tokens=10,
            temperature=0.7,
            structured_outputs={"choice": CHOICES},
        ),
    ),
    case(
        "test_structured_outputs_json_chat",
        "a schema",
        ask(
            user("Give an example JSON for an employee profile."),
            {"choices.0.message.content": valid(EMPLOYEE)},
            max_completion_tokens=200,
            seed=3,
            structured_outputs={"json": EMPLOYEE},
        ),
    ),
    case(
        "test_structured_outputs_regex_chat",
        "an address",
        ask(
            user("Give an example IP address."),
            {"choices.0.message.content": fits("an address", lambda text: regex.fullmatch(ADDRESS, text) is not None)},
            max_completion_tokens=20,
            structured_outputs={"regex": ADDRESS},
        ),
    ),
    case(
        "test_structured_outputs_type_error",
        "a regex that is an object",
        ask(LANGUAGE, refused(), structured_outputs={"regex": {"1": "Python", "2": "C++"}}),
    ),
    case(
        "test_response_format_json_object",
        "an object",
        ask(
            user('what is 1+1? please respond with a JSON object, the format is {"result": 2}'),
            {"choices.0.message.content": fits("JSON", lambda text: isinstance(json.loads(text), dict))},
            response_format={"type": "json_object"},
            temperature=0.0,
            max_tokens=300,
        ),
    ),
    case(
        "test_response_format_json_schema",
        "a schema",
        ask(
            user('what is 1+1? The format is "result": 2'),
            {"choices.0.message.content": valid(RESULT)},
            max_tokens=100,
            response_format={"type": "json_schema", "json_schema": {"name": "foo_test", "schema": RESULT}},
        ),
    ),
    case(
        "test_response_format_text",
        "text",
        ask(
            user("what is 1+1?"),
            {"choices.0.message.content": TEXT},
            max_completion_tokens=10,
            response_format={"type": "text"},
        ),
    ),
    *(
        case(
            test,
            what,
            ask(user("Say hello"), refused(), structured_outputs=outputs, **more),
            file="test_chat_completion.py",
        )
        for test, what, outputs, more in (
            ("test_invalid_json_schema", "a property that is no schema", {"json": BROKEN_SCHEMA}, {}),
            ("test_invalid_regex", "an open bracket", {"regex": "[.*"}, {"stop": ["\n"]}),
            ("test_invalid_grammar", "a rule without a body", {"grammar": BROKEN_GRAMMAR}, {}),
            ("test_empty_grammar", "an empty text", {"grammar": ""}, {}),
        )
    ),
    case(
        "test_json_schema_response_format_missing_schema",
        "no json_schema",
        ask(HI, refused("json_schema"), response_format={"type": "json_schema"}),
        server="fake",
        file="test_chat_error.py",
    ),
)

CHATS = (*LOGPROBS, *SESSIONS, *STRUCTURED)
