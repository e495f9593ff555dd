"""Requests of vLLM's tests of /v1/responses. "[[ ]]": what the fake model answers."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
from support.vllm_requests.case import (
    GIVEN,
    NULL,
    Expected,
    Ref,
    Sent,
    VllmCase,
    between,
    fits,
    get,
    longer,
    one_of,
    post,
    refused,
    size,
)
from support.vllm_requests.tools import DALLAS, WEATHER, hermes

PATH = "/v1/responses"
FUNCTION = {"type": "function"} | WEATHER["function"]
NAMED = {"type": "function", "name": "get_current_weather"}
EVENT = {
    "type": "object",
    "properties": {"event_name": {"type": "string", "maxLength": 9}, "date": {"type": "string", "maxLength": 9}},
    "required": ["event_name", "date"],
    "additionalProperties": False,
}
PAIRS = {
    "response.completed": "response.created",
    "response.output_item.done": "response.output_item.added",
    "response.output_text.done": "response.output_text.delta",
    "response.content_part.done": "response.content_part.added",
    "response.reasoning_text.done": "response.reasoning_text.delta",
    "response.reasoning_part.done": "response.reasoning_part.added",
    "response.function_call_arguments.done": "response.function_call_arguments.delta",
}


def case(file: str, test: str, what: str, *sent: Sent, server: str = "say") -> VllmCase:
    return VllmCase(f"{file}::{test}", what, server, sent)


def ask(said: Any, expected: Expected | None = None, /, **more: Any) -> Sent:
    """Ask for a text, or send items."""
    return post(PATH, {"input": f"[[{said}]]" if isinstance(said, str) else said} | more, expected)


def paired(types: Any) -> bool:
    """Whether each event that ends something has one that began it, innermost first."""
    stack: list[str] = []
    for kind in types:
        if kind == "response.created" or kind.endswith("added"):
            stack.append(kind)
        elif kind.endswith("delta"):
            if stack[-1] != kind:
                stack.append(kind)
        elif kind.endswith("done") or kind == "response.completed":
            if stack[-1] != PAIRS[kind]:
                return False
            stack.pop()
    return not stack


def item(kind: str) -> Any:
    return fits(f"with an item {kind}", lambda output: kind in [one["type"] for one in output])


def text_of(*parts: str) -> Any:
    return fits(
        f"a message with {parts}", lambda output: all(part in output[-1]["content"][0]["text"] for part in parts)
    )


def typed(text: str, role: str = "user", kind: str = "input_text", **more: Any) -> dict[str, Any]:
    return {"type": "message", "role": role, "content": [{"type": kind, "text": text}]} | more


def thought(**more: Any) -> dict[str, Any]:
    return {"type": "reasoning", "summary": [], "encrypted_content": None} | more


DONE: Expected = {"status": 200, "": fits("completed", lambda body: body["status"] == "completed")}
BASIC = "entrypoints/openai/responses/test_basic.py"
SIMPLE = "entrypoints/openai/responses/test_simple.py"
STATE = "entrypoints/openai/responses/test_stateful.py"
CALLS = "entrypoints/openai/responses/test_function_call.py"
HISTORY = typed("[[Short.]]")

RESPONDED = (
    case(
        BASIC,
        "test_simple_input",
        "reasoning and a message",
        ask(
            "<think>13 times 24</think>It is 312.",
            {
                "output.0.type": "reasoning",
                "output.0.content.0.text": longer(0),
                "output.1.type": "message",
                "output.1.content.0.text": "It is 312.",
            },
        ),
    ),
    case(
        BASIC,
        "test_instructions",
        "instructions",
        ask("312. QED", {"output": text_of("312", "QED")}, instructions="Finish with QED."),
    ),
    case(
        BASIC,
        "test_chat",
        "four turns",
        ask(
            [
                {"role": "system", "content": "Finish with QED."},
                {"role": "user", "content": "5 * 3?"},
                {"role": "assistant", "content": "15. QED."},
                {"role": "user", "content": "[[30. QED]]"},
            ],
            {"output": text_of("30", "QED")},
        ),
    ),
    case(
        BASIC,
        "test_chat_with_input_type",
        "input_text",
        ask([{"role": "user", "content": [{"type": "input_text", "text": "[[Hello!]]"}]}], DONE),
    ),
    case(
        BASIC,
        "test_logprobs",
        "5",
        post(
            PATH,
            {
                "input": "What is 13 * 24?",
                "include": ["message.output_text.logprobs"],
                "top_logprobs": 5,
                "max_output_tokens": 5,
            },
            {"output.0.content.0.logprobs": size(5), "output.0.content.0.logprobs.0.top_logprobs": size(5)},
        ),
        server="smol",
    ),
    case(
        BASIC,
        "test_streaming",
        "events",
        ask(
            "312",
            {
                "types.0": "response.created",
                "types.-1": "response.completed",
                "types": fits("with deltas", lambda types: "response.output_text.delta" in types),
            },
            stream=True,
        ),
    ),
    case(
        SIMPLE,
        "test_basic",
        "no effort",
        ask("56088", DONE | {"incomplete_details": NULL}, reasoning={"effort": "none"}),
    ),
    case(
        SIMPLE,
        "test_enable_response_messages",
        "the messages",
        ask(
            "Hello to you, too",
            DONE
            | {
                "input_messages.0.type": "raw_message_tokens",
                "input_messages.0.message": longer(10),
                "input_messages.0.tokens": longer(0),
                "output_messages.0.message": longer(10),
                "output_messages.0.tokens": longer(0),
            },
            enable_response_messages=True,
        ),
    ),
    case(
        SIMPLE,
        "test_reasoning_item",
        "an item of reasoning",
        ask(
            [
                {"type": "message", "content": "[[<think>so</think>Hi.]]", "role": "user"},
                {
                    "type": "reasoning",
                    "id": "lol",
                    "content": [{"type": "reasoning_text", "text": "We greet."}],
                    "summary": [],
                },
            ],
            DONE | {"output.0.type": "reasoning", "output.1.type": "message", "output.1.content.0.text": "Hi."},
            temperature=0.0,
        ),
    ),
    case(
        SIMPLE,
        "test_input_history_openai_shape_e2e",
        "ids and status",
        ask(
            [
                typed("You are concise."),
                typed("Acknowledged.", "assistant", "output_text", id="msg_1", status="completed"),
                thought(id="rs_1", status="completed"),
                HISTORY,
            ],
            DONE | {"output": text_of("Short.")},
        ),
    ),
    case(
        SIMPLE,
        "test_input_history_openresponses_shape_e2e",
        "no ids",
        ask([typed("You are concise."), typed("Acknowledged.", "assistant", "output_text"), thought(), HISTORY], DONE),
    ),
    case(
        SIMPLE,
        "test_multiturn_history_replay_without_ids_e2e",
        "two turns",
        ask("MARKER-729", DONE),
        ask([typed("Remember."), typed("Yes.", "assistant", "output_text"), thought(), HISTORY], DONE),
    ),
    case(
        SIMPLE,
        "test_streaming_output_consistency",
        "deltas and the text",
        ask(
            "Hello in one sentence.",
            {
                "types.-1": "response.completed",
                "chunks": fits(
                    "deltas that make the text",
                    lambda chunks: (
                        "".join(one["delta"] for one in chunks if one["type"] == "response.output_text.delta")
                        == chunks[-1]["response"]["output"][-1]["content"][0]["text"]
                        == "Hello in one sentence."
                    ),
                ),
            },
            stream=True,
        ),
    ),
    case(
        SIMPLE,
        "test_streaming_logprobs",
        "3",
        post(
            PATH,
            {
                "input": "Say hello.",
                "stream": True,
                "top_logprobs": 3,
                "max_output_tokens": 5,
                "include": ["message.output_text.logprobs"],
            },
            {
                "chunks": fits(
                    "three alternatives in each delta",
                    lambda chunks: all(
                        one["logprobs"]
                        and all(log["logprob"] <= 0 and len(log["top_logprobs"]) == 3 for log in one["logprobs"])
                        for one in chunks
                        if one["type"] == "response.output_text.delta"
                    ),
                )
            },
        ),
        server="smol",
    ),
    *(
        case(
            SIMPLE,
            f"test_{'' if stream else 'non_'}streaming_reasoning_tokens_e2e",
            "low",
            ask(
                "<think>17 times 19</think>323",
                {"chunks.-1.response.usage.output_tokens_details.reasoning_tokens": between(1, 100)}
                if stream
                else {"usage.output_tokens_details.reasoning_tokens": between(1, 100)},
                reasoning={"effort": "low"},
                stream=stream,
            ),
        )
        for stream in (True, False)
    ),
    case(
        SIMPLE,
        "test_max_tokens",
        "30",
        ask(
            "Call me Ishmael. Some years ago, never mind how long",
            {
                "": fits("incomplete", lambda body: body["status"] == "incomplete"),
                "incomplete_details.reason": "max_output_tokens",
            },
            reasoning={"effort": "low"},
            max_output_tokens=30,
        ),
    ),
    case(
        SIMPLE,
        "test_extra_sampling_params",
        "top_k, repetition_penalty, seed",
        post(
            PATH,
            {
                "input": "Write a short sentence",
                "max_output_tokens": 50,
                "temperature": 0.7,
                "top_p": 0.9,
                "top_k": 40,
                "repetition_penalty": 1.2,
                "seed": 42,
            },
            {"output": longer(0), "output.0.content.0.text": longer(0)},
        ),
        server="smol",
    ),
    case(
        SIMPLE,
        "test_streaming_types",
        "reasoning and text",
        ask(
            "<think>a cat</think>A cat sat.",
            {"types": fits("pairs", paired)},
            reasoning={"effort": "low"},
            tools=[],
            stream=True,
            background=False,
        ),
    ),
    case(
        "entrypoints/openai/responses/test_structured_output.py",
        "test_structured_output",
        "a schema",
        post(
            PATH,
            {
                "input": [
                    {"role": "system", "content": "Extract the event."},
                    {"role": "user", "content": "A fair on Friday."},
                ],
                "max_output_tokens": 200,
                "temperature": 0,
                "text": {
                    "format": {
                        "type": "json_schema",
                        "name": "event",
                        "schema": EVENT,
                        "description": "An event.",
                        "strict": True,
                    }
                },
            },
            {
                "output.-1.content.0.text": fits(
                    "JSON of the schema", lambda text: jsonschema.validate(json.loads(text), EVENT) is None
                )
            },
        ),
        server="smol",
    ),
    case(
        "entrypoints/openai/responses/test_count_tokens.py",
        "test_count_responses_input_tokens",
        "a text",
        post(f"{PATH}/input_tokens", {"input": "Hello world, this is a test!"}, {"input_tokens": between(5, 60)}),
        server="fake",
    ),
    case(
        "entrypoints/openai/responses/test_errors.py",
        "test_is_model_supported_skip_name_validation_env",
        "another model",
        post(PATH, {"model": "not-a-registered-model", "input": "a"}, refused(status=404)),
        server="fake",
    ),
)

STORED = (
    case(STATE, "test_store", "kept by default", ask("Hello!", DONE), get("/v1/responses/{0.id}", DONE)),
    case(
        STATE,
        "test_store",
        "store: false",
        ask("Hello!", DONE, store=False),
        get("/v1/responses/{0.id}", refused("not found", status=404)),
    ),
    case(
        STATE,
        "test_background",
        "queued",
        ask("b" * 500, {"": fits("queued", lambda body: body["status"] in ("queued", "in_progress"))}, background=True),
    ),
    case(
        STATE,
        "test_background_error",
        "background without store",
        ask("312", refused("background can only be used when `store` is true"), background=True, store=False),
    ),
    case(
        STATE,
        "test_background_cancel",
        "cancelled",
        ask("b" * 500, background=True),
        post("/v1/responses/{0.id}/cancel", None, {"": fits("cancelled", lambda body: body["status"] == "cancelled")}),
        get("/v1/responses/{0.id}", {"": fits("cancelled", lambda body: body["status"] == "cancelled")}),
    ),
    case(
        STATE,
        "test_cancel_completed",
        "not in the background",
        ask("Hello"),
        post("/v1/responses/{0.id}/cancel", None, refused("Cannot cancel a synchronous response.")),
    ),
    case(
        STATE,
        "test_previous_response_id",
        "three turns",
        ask("Hello John", DONE, instructions="Retrieve."),
        ask("Mark", DONE, previous_response_id=Ref("0.id")),
        post(PATH, {"input": "My name?", "previous_response_id": Ref("1.id")}, DONE),
    ),
    case(
        STATE,
        "test_two_responses_with_same_prev_id",
        "two branches",
        ask("Hello John", DONE),
        ask("Mark", DONE, previous_response_id=Ref("0.id")),
        post(PATH, {"input": "My name?", "previous_response_id": Ref("0.id")}, DONE | {"output": text_of("John")}),
    ),
    case(
        "entrypoints/openai/responses/test_serving_stateless.py",
        "test_cancel_without_store_unknown_id_returns_404",
        "an unknown id",
        post("/v1/responses/resp_123/cancel", None, refused(status=404)),
    ),
    case(
        "entrypoints/openai/responses/test_serving_stateless.py",
        "test_previous_response_id_without_store_returns_400",
        "an unknown id",
        ask("hello", {"status": one_of(400, 404), "error": GIVEN}, previous_response_id="resp_old", store=False),
    ),
)

VALID = "tool_use/test_responses_request_validations.py"
CALL = "get_current_weather"

FUNCTIONS = (
    case(
        CALLS,
        "test_function_tool_use",
        "auto",
        ask(
            f"<think>so</think>{hermes(DALLAS)}",
            {
                "output": item("function_call"),
                "output.0.type": "reasoning",
                "output.-1.arguments": fits("JSON", lambda text: json.loads(text) == DALLAS),
            },
            tools=[FUNCTION],
            temperature=0.0,
        ),
    ),
    case(
        CALLS,
        "test_function_tool_use",
        "required",
        post(
            PATH,
            {
                "input": "The weather in Berlin?",
                "tools": [FUNCTION],
                "tool_choice": "required",
                "temperature": 0.0,
                "max_output_tokens": 150,
            },
            {"output": item("function_call")},
        ),
        server="smol",
    ),
    case(
        CALLS,
        "test_max_tokens_with_tool_choice_required",
        "10",
        post(
            PATH,
            {"input": "The weather in Berlin?", "tools": [FUNCTION], "tool_choice": "required", "max_output_tokens": 3},
            {
                "output": fits(
                    "no call", lambda output: len(output) >= 1 and all(one["type"] != "function_call" for one in output)
                ),
                "incomplete_details.reason": "max_output_tokens",
            },
        ),
        server="smol",
    ),
    case(
        CALLS,
        "test_named_tool_use",
        "a call and its result",
        post(
            PATH,
            {
                "input": "The weather in Paris?",
                "tools": [FUNCTION],
                "tool_choice": NAMED,
                "temperature": 0,
                "max_output_tokens": 150,
            },
            {"output.-1.type": "function_call", "output.-1.name": CALL},
        ),
        post(
            PATH,
            {
                "input": [
                    {"role": "user", "content": "The weather in Paris?"},
                    Ref("0.output.-1"),
                    {"type": "function_call_output", "call_id": Ref("0.output.-1.call_id"), "output": "20 degrees"},
                ],
                "max_output_tokens": 10,
            },
            {"output.-1.content.0.text": longer(0)},
        ),
        server="smol",
    ),
    case(
        CALLS,
        "test_function_calling_with_streaming_expected_arguments",
        "auto",
        ask(
            hermes(DALLAS),
            {
                "chunks": fits(
                    "deltas that make the arguments",
                    lambda chunks: (
                        json.loads(
                            "".join(
                                one["delta"]
                                for one in chunks
                                if one["type"] == "response.function_call_arguments.delta"
                            )
                        )
                        == DALLAS
                    ),
                )
            },
            tools=[FUNCTION],
            stream=True,
        ),
    ),
    case(
        CALLS,
        "test_function_calling_with_streaming_types",
        "auto",
        ask(f"<think>so</think>{hermes(DALLAS)}", {"types": fits("pairs", paired)}, tools=[FUNCTION], stream=True),
    ),
    *(
        case(VALID, test, what, ask("Hi", DONE | expected, **more))
        for test, what, expected, more in (
            ("test_responses_request_with_no_tools", "no key", {"tool_choice": "none"}, {}),
            ("test_responses_request_with_no_tools", "empty", {"tool_choice": "none"}, {"tools": []}),
            (
                "test_responses_request_no_tools_tool_choice_none",
                "none",
                {"tool_choice": "none"},
                {"tool_choice": "none"},
            ),
            (
                "test_responses_request_no_tools_tool_choice_auto",
                "auto",
                {"tool_choice": "none"},
                {"tool_choice": "auto"},
            ),
            (
                "test_responses_request_with_tools_default_tool_choice",
                "tools",
                {"tool_choice": "auto"},
                {"tools": [FUNCTION]},
            ),
            (
                "test_responses_request_with_tools_tool_choice_none",
                "none",
                {"tool_choice": "none"},
                {"tools": [FUNCTION], "tool_choice": "none"},
            ),
            (
                "test_responses_request_with_tools_tool_choice_auto",
                "auto",
                {"tool_choice": "auto"},
                {"tools": [FUNCTION], "tool_choice": "auto"},
            ),
            (
                "test_responses_request_empty_tools_tool_choice_auto",
                "auto",
                {"tool_choice": "none"},
                {"tools": [], "tool_choice": "auto"},
            ),
            (
                "test_responses_response_parallel_tool_calls_null_resolves_to_default",
                "null",
                {"parallel_tool_calls": True},
                {"parallel_tool_calls": None},
            ),
            (
                "test_responses_response_parallel_tool_calls_null_resolves_to_default",
                "false",
                {"parallel_tool_calls": False},
                {"parallel_tool_calls": False},
            ),
        )
    ),
    *(
        case(VALID, test, what, ask("Hi", refused(part), **more))
        for test, what, part, more in (
            ("test_responses_request_required_without_tools", "no key", "tool", {"tool_choice": "required"}),
            (
                "test_responses_request_required_without_tools",
                "empty",
                "tool",
                {"tool_choice": "required", "tools": []},
            ),
            ("test_responses_request_named_tool_choice_without_tools", "no key", "tools", {"tool_choice": NAMED}),
            (
                "test_responses_request_named_tool_choice_not_matching",
                "a name",
                "tools",
                {"tools": [FUNCTION], "tool_choice": NAMED | {"name": "nonexistent"}},
            ),
            (
                "test_responses_request_named_tool_choice_missing_name",
                "no name",
                "",
                {"tools": [FUNCTION], "tool_choice": {"type": "function"}},
            ),
            (
                "test_responses_request_named_tool_choice_missing_name",
                "an empty name",
                "",
                {"tools": [FUNCTION], "tool_choice": {"type": "function", "name": ""}},
            ),
            (
                "test_responses_request_empty_tools_named_tool_choice",
                "empty",
                "tools",
                {"tools": [], "tool_choice": NAMED},
            ),
        )
    ),
)

RESPONSES = (*RESPONDED, *STORED, *FUNCTIONS)
