"""Requests of vLLM's tests of tools and reasoning. "[[ ]]" encloses what the fake model answers."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
from support.vllm_requests.case import (
    GONE,
    Expected,
    Sent,
    VllmCase,
    between,
    fits,
    longer,
    one_of,
    post,
    refused,
    same,
    size,
)

PATH = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Hello"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_current_weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 12},
                "state": {"type": "string", "maxLength": 2},
                "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
            },
            "required": ["city", "state", "unit"],
            "additionalProperties": False,
        },
    },
}
SEARCH = {
    "type": "function",
    "function": {
        "name": "web_search",
        "parameters": {
            "type": "object",
            "properties": {"search_term": {"type": "string"}},
            "required": ["search_term"],
        },
    },
}
BOTH = [WEATHER, SEARCH]
TIME = {
    "type": "function",
    "function": {"name": "get_current_time", "parameters": {"type": "object", "properties": {}, "required": []}},
}
NAMED = {"type": "function", "function": {"name": "get_current_weather"}}
SAMPLE = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {}}}}
DALLAS = {"city": "Dallas", "state": "TX", "unit": "fahrenheit"}
ORLANDO = {"city": "Orlando", "state": "FL", "unit": "fahrenheit"}


def case(file: str, test: str, what: str, *sent: Sent, server: str = "fake") -> VllmCase:
    return VllmCase(f"{file}::{test}", what, server, sent)


def ask(messages: Any, expected: Expected | None = None, /, **more: Any) -> Sent:
    return post(PATH, {"messages": messages} | more, expected)


def hermes(*calls: dict[str, Any]) -> str:
    return "".join(
        f"<tool_call>\n{json.dumps({'name': 'get_current_weather', 'arguments': call})}\n</tool_call>" for call in calls
    )


def say(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": f"[[{text}]]"}]


def arguments(value: Any) -> Any:
    return fits(f"JSON of {value}", lambda text: json.loads(text) == value)


def valid(tool: dict[str, Any]) -> Any:
    schema = tool["function"]["parameters"]
    return fits("arguments of the schema", lambda text: jsonschema.validate(json.loads(text), schema) is None)


OFF = {"chat_template_kwargs": {"enable_thinking": False}, "temperature": 0}
CALLED: Expected = {
    "choices.0.message.role": "assistant",
    "choices.0.message.tool_calls": size(1),
    "choices.0.message.tool_calls.0.type": "function",
    "choices.0.message.tool_calls.0.id": longer(8),
    "choices.0.message.tool_calls.0.function.name": "get_current_weather",
    "choices.0.message.tool_calls.0.function.arguments": arguments(DALLAS),
    "choices.0.finish_reason": "tool_calls",
}
STREAMED: Expected = {
    "roles": ["assistant"],
    "reasons": ["tool_calls"],
    "calls": size(1),
    "calls.0.names": 1,
    "calls.0.id": longer(8),
    "calls.0.name": "get_current_weather",
    "calls.0.arguments": arguments(DALLAS),
}
NO_CALLS = fits("no calls", lambda message: not message.get("tool_calls"))
RESULTS = [
    {"role": "user", "content": "What is the weather in Dallas, Texas in Fahrenheit?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {
                "id": "chatcmpl-tool-03e6481b146e408e9523d9c956696295",
                "type": "function",
                "function": {"name": "get_current_weather", "arguments": json.dumps(DALLAS)},
            }
        ],
    },
    {
        "role": "tool",
        "tool_call_id": "chatcmpl-tool-03e6481b146e408e9523d9c956696295",
        "content": "98 degrees, clear skies",
    },
]
SAID = [{"role": "user", "content": "[[It is 98 degrees.]]"}]

USE = (
    case(
        "tool_use/test_tool_calls.py",
        "test_tool_call_and_choice",
        "whole",
        ask(say(hermes(DALLAS)), CALLED, tools=BOTH, max_completion_tokens=300, logprobs=False, **OFF),
        server="say",
    ),
    case(
        "tool_use/test_tool_calls.py",
        "test_tool_call_and_choice",
        "streamed",
        ask(say(hermes(DALLAS)), STREAMED, tools=BOTH, max_completion_tokens=300, logprobs=False, stream=True, **OFF),
        server="say",
    ),
    case(
        "tool_use/test_tool_calls.py",
        "test_tool_call_with_results",
        "whole and streamed",
        ask(
            [*RESULTS, *SAID],
            {
                "choices.0.finish_reason": one_of("stop", "length"),
                "choices.0.message": NO_CALLS,
                "choices.0.message.content": "It is 98 degrees.",
            },
            tools=BOTH,
            max_completion_tokens=100,
            **OFF,
        ),
        ask(
            [*RESULTS, *SAID],
            {
                "roles": ["assistant"],
                "reasons": size(1),
                "calls": size(0),
                "texts.0": same("0.choices.0.message.content"),
            },
            tools=BOTH,
            max_completion_tokens=100,
            stream=True,
            **OFF,
        ),
        server="say",
    ),
    case(
        "tool_use/test_parallel_tool_calls.py",
        "test_parallel_tool_calls",
        "whole",
        ask(
            say(hermes(DALLAS, ORLANDO)),
            {
                "choices.0.message.tool_calls": size(2),
                "choices.0.finish_reason": "tool_calls",
                "choices.0.message.tool_calls.*.id": longer(8),
                "choices.0.message.tool_calls.0.function.arguments": arguments(DALLAS),
                "choices.0.message.tool_calls.1.function.arguments": arguments(ORLANDO),
            },
            tools=BOTH,
            max_tokens=500,
            **OFF,
        ),
        server="say",
    ),
    case(
        "tool_use/test_parallel_tool_calls.py",
        "test_parallel_tool_calls",
        "streamed",
        ask(
            say(hermes(DALLAS, ORLANDO)),
            {
                "reasons": ["tool_calls"],
                "calls": size(2),
                "calls.*.names": 1,
                "calls.*.id": longer(8),
                "calls.0.arguments": arguments(DALLAS),
                "calls.1.arguments": arguments(ORLANDO),
                "chunks": fits(
                    "one piece a chunk",
                    lambda chunks: all(
                        len(choice["delta"].get("tool_calls") or []) < 2
                        for chunk in chunks
                        for choice in chunk["choices"]
                    ),
                ),
            },
            tools=BOTH,
            max_tokens=500,
            stream=True,
            **OFF,
        ),
        server="say",
    ),
    *(
        case(
            "tool_use/test_chat_completions.py",
            test,
            "whole and streamed",
            ask(
                say("I am well."),
                {
                    "choices.0.message.content": "I am well.",
                    "choices.0.message": NO_CALLS,
                    "choices.0.finish_reason": "stop",
                },
                max_completion_tokens=150,
                **OFF,
                **more,
            ),
            ask(
                say("I am well."),
                {"roles": ["assistant"], "reasons": ["stop"], "calls": size(0), "texts.0": "I am well."},
                max_completion_tokens=150,
                stream=True,
                **OFF,
                **more,
            ),
            server="say",
        )
        for test, more in (
            ("test_chat_completion_without_tools", {}),
            ("test_chat_completion_with_tools", {"tools": [WEATHER]}),
        )
    ),
)

CALLING = "entrypoints/openai/chat_completion/test_completion_with_function_calling.py"

FORCED = (
    *(
        case(
            CALLING,
            "test_function_tool_use",
            f"{name}, whole",
            ask(
                [{"role": "user", "content": "What is the weather in Berlin, in fahrenheit?"}],
                {
                    "choices.0.message.tool_calls": longer(0),
                    "choices.0.message.tool_calls.0.function.arguments": valid(WEATHER),
                },
                tools=[WEATHER],
                tool_choice=choice,
                max_tokens=150,
                seed=7,
                temperature=0,
            ),
            server="smol",
        )
        for name, choice in (("required", "required"), ("named", NAMED))
    ),
    *(
        case(
            CALLING,
            "test_function_tool_use",
            f"{name}, streamed",
            ask(
                [{"role": "user", "content": "What is the weather in Berlin, in fahrenheit?"}],
                {"calls": longer(0), "calls.0.arguments": valid(WEATHER), "roles": ["assistant"], "reasons": size(1)},
                tools=[WEATHER],
                tool_choice=choice,
                max_tokens=150,
                seed=7,
                temperature=0,
                stream=True,
            ),
            server="smol",
        )
        for name, choice in (("required", "required"), ("named", NAMED))
    ),
    case(
        CALLING,
        "test_named_tool_use",
        "whole",
        ask(
            [{"role": "user", "content": "Use the tool."}],
            {
                "choices.0.message.content": fits("empty or null", lambda text: not text),
                "choices.0.message.tool_calls.0.function.arguments": valid(WEATHER),
            },
            tools=[WEATHER],
            tool_choice=NAMED,
            max_completion_tokens=150,
            temperature=0.0,
        ),
        server="smol",
    ),
    case(
        CALLING,
        "test_named_tool_use",
        "content is a text",
        ask(
            [{"role": "user", "content": "Use the tool."}],
            {"choices.0.message.content": ""},
            tools=[WEATHER],
            tool_choice=NAMED,
            max_completion_tokens=150,
            temperature=0.0,
        ),
        server="smol",
    ),
    case(
        CALLING,
        "test_named_tool_use",
        "streamed",
        ask(
            [{"role": "user", "content": "Use the tool."}],
            {"reasons": size(1), "calls.0.arguments": valid(WEATHER), "texts.0": ""},
            tools=[WEATHER],
            tool_choice=NAMED,
            max_completion_tokens=150,
            temperature=0.0,
            stream=True,
        ),
        server="smol",
    ),
    case(
        CALLING,
        "test_inconsistent_tool_choice_and_tools",
        "a name without tools",
        ask(HELLO, refused(), tool_choice=NAMED),
    ),
    case(
        CALLING,
        "test_inconsistent_tool_choice_and_tools",
        "an undefined name",
        ask(
            HELLO,
            refused(),
            tools=[SAMPLE],
            tool_choice={"type": "function", "function": {"name": "nondefined_function_name"}},
        ),
    ),
    case(
        CALLING,
        "test_inconsistent_tool_choice_and_tools",
        "an empty object",
        ask(HELLO, refused(), tools=[SAMPLE], tool_choice={}),
    ),
    *(
        case(
            CALLING,
            "test_max_tokens_with_tool_choice_required",
            name,
            ask(
                HELLO,
                {
                    "choices.0.finish_reason": "length",
                    "choices.0.message": NO_CALLS,
                    "choices.0.message.content": fits("empty or null", lambda text: not text),
                },
                tools=[WEATHER],
                tool_choice=choice,
                max_completion_tokens=1,
                temperature=0,
            ),
            server="smol",
        )
        for name, choice in (("required", "required"),)
    ),
    *(
        case(
            CALLING,
            "test_no_args_tool_call",
            f"arguments {text!r}",
            ask(
                [
                    {"role": "user", "content": "What time is it now?"},
                    {
                        "role": "assistant",
                        "content": None,
                        "tool_calls": [
                            {
                                "id": "call_1",
                                "type": "function",
                                "function": {"name": "get_current_time", "arguments": text},
                            }
                        ],
                    },
                    {"role": "tool", "tool_call_id": "call_1", "content": "2026-01-01T00:00:00"},
                    *say("It is midnight."),
                ],
                {"choices.0.message.content": "It is midnight."},
                tools=[TIME],
                tool_choice="auto",
                max_completion_tokens=128,
                **OFF,
            ),
            server="say",
        )
        for text in ("{}", "")
    ),
)

VALIDATED = "tool_use/test_chat_completion_request_validations.py"
NULLS = "entrypoints/openai/chat_completion/test_tool_choice_null.py"
SCHEMA = {"structured_outputs": {"json": {"type": "object"}}}

CHECKS = (
    case(
        VALIDATED,
        "test_chat_completion_request_with_no_tools",
        "no key",
        ask(HELLO, {"choices": size(1)}, max_tokens=2),
    ),
    case(
        VALIDATED,
        "test_chat_completion_request_with_no_tools",
        "null",
        ask(HELLO, {"choices": size(1)}, max_tokens=2, tools=None),
    ),
    case(
        VALIDATED,
        "test_chat_completion_request_with_no_tools",
        "an empty list",
        ask(HELLO, refused("tools"), max_tokens=2, tools=[]),
    ),
    *(
        case(
            VALIDATED,
            "test_chat_completion_request_with_tool_choice_but_no_tools",
            f"{choice}, {what}",
            ask(HELLO, refused("tools"), max_tokens=2, tool_choice=choice, **more),
        )
        for choice in ("auto", "required")
        for what, more in (("no key", {}), ("null", {"tools": None}))
    ),
    *(
        case(
            VALIDATED,
            test,
            "a history",
            ask(
                [
                    {"role": "user", "content": "2+2?"},
                    {"role": "assistant", "content": "4"} | more,
                    {"role": "user", "content": "Sure?"},
                ],
                {"choices": size(1)},
                max_tokens=2,
            ),
        )
        for test, more in (
            ("test_reasoning_content_normalized_to_reasoning", {"reasoning_content": "2+2 equals 4"}),
            (
                "test_reasoning_takes_precedence_over_reasoning_content",
                {"reasoning": "one", "reasoning_content": "two"},
            ),
            ("test_no_reasoning_fields_unchanged", {}),
        )
    ),
    case(
        VALIDATED,
        "test_structured_outputs_with_named_tool_choice_rejected",
        "both",
        ask(
            HELLO,
            refused(),
            tools=[SAMPLE],
            tool_choice={"type": "function", "function": {"name": "get_weather"}},
            **SCHEMA,
        ),
    ),
    case(
        VALIDATED,
        "test_structured_outputs_with_auto_tool_choice_allowed",
        "both",
        ask(say("{}"), {"choices": size(1)}, tools=[SAMPLE], tool_choice="auto", max_tokens=20, **SCHEMA),
        server="say",
    ),
    case(
        VALIDATED,
        "test_multiple_structured_outputs_rejected",
        "json and regex",
        ask(HELLO, refused(), structured_outputs={"json": {"type": "object"}, "regex": ".*"}),
    ),
    case(
        VALIDATED,
        "test_invalid_structured_outputs_type_rejected",
        "a number",
        ask(HELLO, refused("structured_outputs"), structured_outputs=3),
    ),
    case(
        NULLS,
        "test_null_tool_choice_defaults_to_auto_like_an_absent_one",
        "with tools",
        ask(say(hermes(DALLAS)), CALLED, tools=BOTH, tool_choice=None, max_tokens=300, **OFF),
        server="say",
    ),
    case(
        NULLS,
        "test_null_tool_choice_without_tools_matches_an_absent_one",
        "without",
        ask(HELLO, {"choices": size(1)}, max_tokens=2, tool_choice=None),
    ),
    case(
        NULLS,
        "test_null_tool_choice_does_not_conflict_with_structured_outputs",
        "both",
        ask(HELLO, {"choices": size(1)}, max_tokens=9, tool_choice=None, **SCHEMA),
    ),
    case(
        NULLS,
        "test_invalid_tool_choice_is_still_rejected",
        "a word",
        ask(HELLO, refused(), tools=[SAMPLE], tool_choice="bogus"),
    ),
    case(
        NULLS,
        "test_invalid_tool_choice_is_still_rejected",
        "auto and null",
        ask(HELLO, refused(), tools=None, tool_choice="auto"),
    ),
    case(
        NULLS,
        "test_explicit_none_tool_choice_is_untouched",
        "none",
        ask(
            say(hermes(DALLAS)), {"choices.0.message": NO_CALLS}, tools=BOTH, tool_choice="none", max_tokens=300, **OFF
        ),
        server="say",
    ),
)

INCLUDED = "entrypoints/openai/chat_completion/test_include_reasoning.py"
SUM = say("<think>one and one</think>It is 2.")
THINK = {"max_tokens": 100, "temperature": 0}

REASONING = (
    case(
        INCLUDED,
        "test_include_reasoning_true_non_streaming",
        "true",
        ask(
            SUM,
            {"choices.0.message.reasoning": "one and one", "choices.0.message.content": "It is 2."},
            include_reasoning=True,
            **THINK,
        ),
        server="say",
    ),
    case(
        INCLUDED,
        "test_include_reasoning_false_non_streaming",
        "false",
        ask(
            SUM,
            {
                "choices.0.message.reasoning": GONE,
                "choices.0.message.reasoning_content": GONE,
                "choices.0.message.content": "It is 2.",
            },
            include_reasoning=False,
            **THINK,
        ),
        server="say",
    ),
    case(
        INCLUDED,
        "test_reasoning_tokens_in_usage",
        "false",
        ask(
            SUM, {"usage.completion_tokens_details.reasoning_tokens": between(1, 100)}, include_reasoning=False, **THINK
        ),
        server="say",
    ),
    case(
        INCLUDED,
        "test_include_reasoning_true_streaming",
        "true",
        ask(SUM, {"reasoning.0": "one and one", "texts.0": "It is 2."}, include_reasoning=True, stream=True, **THINK),
        server="say",
    ),
    case(
        INCLUDED,
        "test_include_reasoning_false_streaming",
        "false",
        ask(SUM, {"reasoning.0": "", "texts.0": "It is 2."}, include_reasoning=False, stream=True, **THINK),
        server="say",
    ),
    case(
        INCLUDED,
        "test_default_includes_reasoning",
        "no key",
        ask(SUM, {"choices.0.message.reasoning": "one and one"}, **THINK),
        server="say",
    ),
)

TOOLS = (*USE, *FORCED, *CHECKS, *REASONING)
