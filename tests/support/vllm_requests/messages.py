"""Requests of vLLM's tests of /v1/messages, Cohere's chat, adapters and media. "[[ ]]": what the fake model answers."""

from __future__ import annotations

import json
from typing import Any

from support.vllm_requests.case import (
    GIVEN,
    Expected,
    Sent,
    VllmCase,
    contains,
    fits,
    longer,
    one_of,
    post,
    refused,
    size,
)
from support.vllm_requests.responses import CALL, PATH, case
from support.vllm_requests.tools import DALLAS, WEATHER, hermes

MESSAGES = "entrypoints/anthropic/test_messages.py"
CONVERT = "entrypoints/anthropic/test_anthropic_messages_conversion.py"
TOOL = {"name": CALL, "description": "The weather", "input_schema": WEATHER["function"]["parameters"]}


def tell(said: str, expected: Expected | None = None, /, **more: Any) -> Sent:
    return post(
        "/v1/messages", {"max_tokens": 500, "messages": [{"role": "user", "content": f"[[{said}]]"}]} | more, expected
    )


def result(content: Any) -> list[dict[str, Any]]:
    return [
        {"role": "assistant", "content": [{"type": "tool_use", "id": "call_001", "name": CALL, "input": DALLAS}]},
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "call_001", "content": content},
                {"type": "text", "text": "[[ok]]"},
            ],
        },
    ]


ENDED: Expected = {"stop_reason": "end_turn", "role": "assistant", "content.0.text": "I am well."}
ANTHROPIC = (
    case(MESSAGES, "test_simple_messages", "a text", tell("I am well.", ENDED)),
    case(
        MESSAGES,
        "test_system_message",
        "a system prompt",
        tell("I am well.", ENDED, system="you are a helpful assistant"),
    ),
    case(
        MESSAGES,
        "test_anthropic_streaming",
        "events",
        tell("I am well.", {"types.0": "message_start", "types.-1": "message_stop"}, stream=True),
    ),
    case(
        MESSAGES,
        "test_anthropic_tool_call",
        "whole",
        tell(
            hermes(DALLAS),
            {"stop_reason": "tool_use", "role": "assistant", "content.0.type": "tool_use", "content.0.input": DALLAS},
            tools=[TOOL],
            stream=False,
        ),
    ),
    case(
        MESSAGES,
        "test_anthropic_tool_call_streaming",
        "streamed",
        tell(
            hermes(DALLAS),
            {
                "types.-1": "message_stop",
                "chunks": fits(
                    "deltas that make the input",
                    lambda chunks: (
                        json.loads(
                            "".join(
                                one["delta"]["partial_json"]
                                for one in chunks
                                if one["type"] == "content_block_delta" and one["delta"]["type"] == "input_json_delta"
                            )
                        )
                        == DALLAS
                    ),
                ),
            },
            tools=[TOOL],
            stream=True,
        ),
    ),
    *(
        case(CONVERT, test, "a history", tell("", {"content.0.text": "ok"}, messages=result(content)))
        for test, content in (
            ("test_tool_result_string_content", "file contents here"),
            ("test_tool_result_none_content", None),
            ("test_tool_result_text_blocks", [{"type": "text", "text": "line 1"}, {"type": "text", "text": "line 2"}]),
        )
    ),
    case(
        CONVERT,
        "test_billing_header_stripped_from_system",
        "a header",
        tell(
            "ok",
            {"content.0.text": "ok"},
            system=[
                {"type": "text", "text": "You help."},
                {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.37.abc; cc_entrypoint=cli;"},
            ],
        ),
    ),
    case(
        CONVERT,
        "test_vllm_xargs_passed_through",
        "an extension",
        tell("ok", {"content.0.text": "ok"}, vllm_xargs={"existing_extension": 7}),
    ),
    *(
        case(
            CONVERT,
            test,
            "an image",
            tell(
                "",
                {"content": longer(0)},
                messages=[
                    {
                        "role": "user",
                        "content": [{"type": "text", "text": "[[ok]]"}, {"type": "image", "source": source}],
                    }
                ],
            ),
        )
        for test, source in (
            (
                "test_base64_image_in_user_message",
                {"type": "base64", "media_type": "image/jpeg", "data": "iVBORw0KGgo="},
            ),
            ("test_url_image_in_user_message", {"type": "url", "url": "https://example.com/cat.png"}),
        )
    ),
)

COHERE = "entrypoints/cohere/test_chat_v2.py"
REASONS = one_of("COMPLETE", "MAX_TOKENS", "STOP_SEQUENCE", "TOOL_CALL", "ERROR")
COHERES = (
    case(
        COHERE,
        "test_cohere_v2_chat_non_streaming",
        "a message",
        post(
            "/cohere/v2/chat",
            {"messages": [{"role": "user", "content": "Say hi."}], "max_tokens": 16, "stream": False},
            {
                "message.role": "assistant",
                "message.content.0.type": "text",
                "usage.billed_units": GIVEN,
                "usage.tokens": GIVEN,
                "finish_reason": REASONS,
            },
        ),
        server="fake",
    ),
    case(
        COHERE,
        "test_cohere_v2_chat_streaming",
        "events",
        post(
            "/cohere/v2/chat",
            {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8, "stream": True},
            {"types.0": "message-start", "types.-1": "message-end", "done": True, "chunks.0.id": longer(0)},
        ),
        server="fake",
    ),
    case(
        COHERE,
        "test_cohere_v2_chat_validation_error_returns_400",
        "no messages",
        post("/cohere/v2/chat", {"messages": []}, {"status": 400}),
        server="fake",
    ),
    case(
        COHERE,
        "test_cohere_v2_chat_documents_field_accepted",
        "documents",
        post(
            "/cohere/v2/chat",
            {
                "messages": [{"role": "user", "content": "Sum."}],
                "documents": [{"id": "d1", "data": {"title": "T", "snippet": "S"}}],
                "max_tokens": 16,
            },
        ),
        server="fake",
    ),
)

ABSENT_LORA = (
    VllmCase(
        "entrypoints/serve/lora/test_lora_adapters.py::test_dynamic_lora_lineage",
        "load",
        "fake",
        (post("/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "/nope"}, {"raw": contains("success")}),),
    ),
    VllmCase(
        "entrypoints/serve/lora/test_lora_adapters.py::test_dynamic_lora_not_found",
        "load",
        "fake",
        (
            post(
                "/v1/load_lora_adapter", {"lora_name": "notfound", "lora_path": "/not/an/adapter"}, refused(status=404)
            ),
        ),
    ),
    VllmCase(
        "entrypoints/openai/chat_completion/test_chat_error.py::test_user_message_accepts_image",
        "an image",
        "fake",
        (
            post(
                "/v1/chat/completions",
                {
                    "messages": [
                        {
                            "role": "user",
                            "content": [
                                {"type": "text", "text": "What?"},
                                {"type": "image_url", "image_url": {"url": "https://example.com/image.jpg"}},
                            ],
                        }
                    ],
                    "max_tokens": 2,
                },
                {"choices": size(1)},
            ),
        ),
    ),
    VllmCase(
        "entrypoints/openai/chat_completion/test_audio.py::test_single_chat_session_audio",
        "audio",
        "fake",
        (
            post(
                "/v1/chat/completions",
                {
                    "messages": [
                        {
                            "role": "user",
                            "content": [{"type": "audio_url", "audio_url": {"url": "https://example.com/a.wav"}}],
                        }
                    ],
                    "max_tokens": 2,
                },
                {"choices": size(1)},
            ),
        ),
    ),
    VllmCase(
        "entrypoints/openai/chat_completion/test_video.py::test_single_chat_session_video",
        "video",
        "fake",
        (
            post(
                "/v1/chat/completions",
                {
                    "messages": [
                        {
                            "role": "user",
                            "content": [{"type": "video_url", "video_url": {"url": "https://example.com/a.mp4"}}],
                        }
                    ],
                    "max_tokens": 2,
                },
                {"choices": size(1)},
            ),
        ),
    ),
    VllmCase(
        "tool_use/test_responses_request_validations.py::test_input_image_accepts_chat_completions_format",
        "an image",
        "fake",
        (
            post(
                PATH,
                {
                    "input": [
                        {
                            "role": "user",
                            "content": [{"type": "input_image", "image_url": "https://example.com/image.png"}],
                        }
                    ]
                },
                {"output": GIVEN},
            ),
        ),
    ),
)

MESSAGES_AND_MEDIA = (*ANTHROPIC, *COHERES, *ABSENT_LORA)
