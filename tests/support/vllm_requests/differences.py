"""Where the answers differ from what vLLM's tests want, each with the reason and what is answered instead.

The driver fails when a request that is listed here is answered as vLLM's test wants: then its row goes. The guide
docs/guides/coming-from-vllm.md lists the same rows, by `name`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from support.vllm_requests.case import GIVEN, GONE, Expected, contains, refused, size

OPENAI = "entrypoints/openai"
CHAT = f"{OPENAI}/chat_completion"
TEXTS = f"{OPENAI}/completion"
POOLING = "entrypoints/pooling"
RESPONSES = f"{OPENAI}/responses"


@dataclass(frozen=True)
class Difference:
    """`cases`: beginnings of ids; `instead`: what the answer to the last request of each is."""

    name: str
    cases: tuple[str, ...]
    instead: Expected = field(default_factory=dict)


NO_IMAGES: Expected = {"status": 400, "error": GIVEN}

DIFFERENCES = (
    Difference(
        "texts of errors",
        (
            f"{TEXTS}/test_prompt_validation.py::test_empty_prompt[",
            f"{TEXTS}/test_completion_error.py::test_negative_prompt_token_ids_",
            f"{POOLING}/embed/test_online.py::test_params_not_supported",
            f"{POOLING}/pooling/test_online.py::test_params_not_supported",
            f"{POOLING}/basic/test_truncation.py::test_bigger_truncation_size",
            f"{POOLING}/classify/test_online.py::test_pooling_not_supported[token_classify]",
            f"{POOLING}/classify/test_online.py::test_pooling_not_supported[plugin]",
            f"{POOLING}/scoring/test_cross_encoder_online.py::test_rerank_api_max_model_len",
            f"{POOLING}/scoring/test_cross_encoder_online.py::test_score_api_max_model_len",
            f"{POOLING}/scoring/test_bi_encoder_online.py::test_rerank_api_max_model_len",
            f"{POOLING}/scoring/test_bi_encoder_online.py::test_score_api_max_model_len",
            f"{RESPONSES}/test_stateful.py::test_background_error",
            f"{RESPONSES}/test_stateful.py::test_cancel_completed",
        ),
        refused() | {"error.type": "BadRequestError"},
    ),
    Difference(
        "a response that was not stored",
        (f"{RESPONSES}/test_stateful.py::test_store[store: false]",),
        refused("there is no response", status=404),
    ),
    Difference(
        "stream_options without a stream",
        (
            f"{TEXTS}/test_completion.py::test_completion_stream_options[include_usage: None, not streamed]",
            f"{TEXTS}/test_completion.py::test_completion_stream_options[include_usage: True, not streamed]",
            f"{TEXTS}/test_completion.py::test_completion_stream_options[continuous_usage_stats: None, not streamed]",
            f"{TEXTS}/test_completion.py::test_completion_stream_options[continuous_usage_stats: True, not streamed]",
            f"{CHAT}/test_chat.py::test_chat_completion_stream_options[include_usage: None, not streamed]",
            f"{CHAT}/test_chat.py::test_chat_completion_stream_options[include_usage: True, not streamed]",
        ),
        {"choices": size(1), "headers.x-pagoda-ignored": contains("stream_options")},
    ),
    Difference(
        "no tools",
        (
            "tool_use/test_chat_completion_request_validations.py::test_chat_completion_request_with_no_tools[an empty",
            "tool_use/test_chat_completion_request_validations.py::"
            "test_chat_completion_request_with_tool_choice_but_no_tools[auto",
            f"{CHAT}/test_tool_choice_null.py::test_invalid_tool_choice_is_still_rejected[auto",
        ),
        {"choices": size(1), "choices.0.message.tool_calls": GONE},
    ),
    Difference(
        "a schema beside a named tool",
        (
            "tool_use/test_chat_completion_request_validations.py::"
            "test_structured_outputs_with_named_tool_choice_rejected",
        ),
        {"choices": size(1)},
    ),
    Difference(
        "the content beside a call",
        (f"{CHAT}/test_completion_with_function_calling.py::test_named_tool_use[content is a text]",),
        {"choices.0.message.content": None, "choices.0.message.tool_calls": size(1)},
    ),
    Difference(
        "scores of a model with three labels",
        (f"{POOLING}/classify/test_online.py::test_score[", f"{POOLING}/classify/test_online.py::test_rerank["),
        refused(),
    ),
    Difference(
        "the tool_choice of a response without tools",
        (
            "tool_use/test_responses_request_validations.py::test_responses_request_with_no_tools",
            "tool_use/test_responses_request_validations.py::test_responses_request_no_tools_tool_choice_auto",
            "tool_use/test_responses_request_validations.py::test_responses_request_empty_tools_tool_choice_auto",
        ),
        {"tool_choice": "auto", "tools": []},
    ),
    Difference(
        "arguments that nothing reads",
        ("entrypoints/anthropic/test_anthropic_messages_conversion.py::test_vllm_xargs_passed_through",),
        refused("--logits-processors"),
    ),
    Difference(
        "transfer of caches",
        ("entrypoints/serve/disagg/test_serving_tokens.py::test_generate_with_kv_transfer_params",),
        refused("kv_transfer_params"),
    ),
    Difference(
        "documents that the template does not read",
        ("entrypoints/cohere/test_chat_v2.py::test_cohere_v2_chat_documents_field_accepted",),
        refused("documents"),
    ),
    Difference(
        "raw messages of a response",
        (f"{RESPONSES}/test_simple.py::test_enable_response_messages",),
        refused("enable_response_messages"),
    ),
    Difference(
        "memory of a cache alone",
        ("entrypoints/serve/dev/test_sleep.py::test_release_kv_cache_memory_route",),
        refused("/sleep", status=501),
    ),
    Difference(
        "adapters",
        (
            "entrypoints/serve/lora/test_lora_adapters.py::test_dynamic_lora_lineage",
            "entrypoints/serve/lora/test_lora_adapters.py::test_dynamic_lora_not_found",
        ),
        refused("VLLM_ALLOW_RUNTIME_LORA_UPDATING", status=403),
    ),
    Difference(
        "images, audio and video",
        (
            f"{CHAT}/test_chat_error.py::test_user_message_accepts_image",
            f"{CHAT}/test_audio.py::",
            f"{CHAT}/test_video.py::",
            "tool_use/test_responses_request_validations.py::test_input_image_accepts_chat_completions_format",
            "entrypoints/anthropic/test_anthropic_messages_conversion.py::test_base64_image_in_user_message",
            "entrypoints/anthropic/test_anthropic_messages_conversion.py::test_url_image_in_user_message",
        ),
        NO_IMAGES,
    ),
)
