"""Requests of vLLM's tests of rendering, of generation from token ids, and of scores of labels."""

from __future__ import annotations

from support.vllm_requests.case import (
    ABSENT,
    BODY,
    GIVEN,
    NUMBERS,
    Expected,
    fits,
    longer,
    one_of,
    post,
    refused,
    same,
    size,
    starts,
)
from support.vllm_requests.serving import case

RENDER = "serve/render/test_render.py"
GENERATE: Expected = {"token_ids": longer(0), "sampling_params": BODY, "model": "fake"}
MESSAGES = [{"role": "user", "content": "Render this."}]

RENDERED = (
    case(
        RENDER,
        "test_completion_render_basic",
        "a text",
        post(
            "/v1/completions/render",
            {"prompt": "When?"},
            {
                "": size(1),
                "0.token_ids": longer(0),
                "0.sampling_params": BODY,
                "0.model": "fake",
                "0.request_id": starts("cmpl-"),
            },
        ),
    ),
    case(
        RENDER,
        "test_completion_render_multiple_prompts",
        "two texts",
        post(
            "/v1/completions/render",
            {"prompt": ["Hello world", "Goodbye world"]},
            {"": size(2), "*.request_id": starts("cmpl-")},
        ),
    ),
    case(
        RENDER,
        "test_chat_completion_render_basic",
        "a message",
        post("/v1/chat/completions/render", {"messages": MESSAGES}, {"token_ids": NUMBERS}),
    ),
    case(
        RENDER,
        "test_chat_completion_render_multi_turn",
        "three turns",
        post(
            "/v1/chat/completions/render",
            {
                "messages": [
                    {"role": "user", "content": "a"},
                    {"role": "assistant", "content": "b"},
                    {"role": "user", "content": "c"},
                ]
            },
            {"token_ids": longer(0)},
        ),
    ),
    case(
        RENDER,
        "test_chat_completion_render_with_stream_true",
        "kept fields",
        post(
            "/v1/chat/completions/render",
            {
                "messages": MESSAGES,
                "stream": True,
                "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            },
            {
                "headers.content-type": starts("application/json"),
                "token_ids": longer(0),
                "stream": True,
                "stream_options.include_usage": True,
                "stream_options.continuous_usage_stats": True,
            },
        ),
    ),
    case(
        RENDER,
        "test_completion_render_error_invalid_model",
        "another model",
        post("/v1/completions/render", {"model": "invalid-model-name", "prompt": "Hello"}, refused(status=404)),
    ),
    case(
        RENDER,
        "test_chat_completion_render_error_invalid_model",
        "another model",
        post("/v1/chat/completions/render", {"model": "invalid-model-name", "messages": MESSAGES}, refused(status=404)),
    ),
    case(
        RENDER,
        "test_chat_completion_render_with_sampling_params",
        "three parameters",
        post(
            "/v1/chat/completions/render",
            {"messages": MESSAGES, "temperature": 0.123, "top_p": 0.456, "frequency_penalty": 1.1},
            {
                "sampling_params.temperature": 0.123,
                "sampling_params.top_p": 0.456,
                "sampling_params.frequency_penalty": 1.1,
                "sampling_params._all_stop_token_ids": ABSENT,
            },
        ),
    ),
    case(
        RENDER,
        "test_messages_render_basic",
        "a message",
        post("/v1/messages/render", {"max_tokens": 16, "messages": MESSAGES}, GENERATE),
    ),
    case(
        RENDER,
        "test_messages_render_system_and_multi_turn",
        "a system prompt",
        post(
            "/v1/messages/render", {"max_tokens": 16, "system": "Help.", "messages": MESSAGES}, {"token_ids": longer(0)}
        ),
    ),
    case(
        RENDER,
        "test_messages_render_error_invalid_model",
        "another model",
        post(
            "/v1/messages/render",
            {"model": "invalid-model-name", "max_tokens": 16, "messages": MESSAGES},
            refused(status=404),
        ),
    ),
)

INFER = "/inference/v1/generate"
TOKENS = "serve/disagg/test_serving_tokens.py"
ABC = [97, 98, 99]

GENERATED = (
    case(
        TOKENS,
        "test_generate_endpoint",
        "token ids",
        post(
            INFER,
            {"token_ids": ABC, "sampling_params": {"max_tokens": 5}, "stream": False},
            {"choices": size(1), "choices.0.token_ids": size(5)},
        ),
    ),
    case(
        TOKENS,
        "test_generate_defaults_max_tokens_when_omitted",
        "no max_tokens",
        post(
            INFER,
            {"token_ids": ABC, "sampling_params": {"temperature": 0.0, "ignore_eos": True}, "stream": False},
            {"choices.0.token_ids": longer(16)},
        ),
    ),
    case(
        TOKENS,
        "test_generate_stream",
        "token ids",
        post(
            INFER,
            {"token_ids": ABC, "sampling_params": {"max_tokens": 5}, "stream": True},
            {"chunks.*.choices": size(1), "token_ids": size(5), "reasons": size(1), "done": True},
        ),
    ),
    *(
        case(
            TOKENS,
            "test_generate_logprobs",
            str(number),
            post(
                INFER,
                {
                    "token_ids": ABC,
                    "sampling_params": {"max_tokens": 5, "temperature": 0.0, "logprobs": number},
                    "stream": False,
                },
                {
                    "choices.0.logprobs.content": size(5),
                    "choices.0.logprobs.content.*.top_logprobs": size(max(number, 1)),
                },
            ),
            server="smol",
        )
        for number in (0, 1, 5)
    ),
    case(
        TOKENS,
        "test_stop_string_workflow",
        "a stop string",
        post(
            INFER,
            {
                "token_ids": ABC,
                "sampling_params": {"max_tokens": 24, "temperature": 0.0, "detokenize": False, "stop": ["xyz"]},
                "stream": False,
            },
            {"status": one_of(400, 422)},
        ),
    ),
    case(
        TOKENS,
        "test_generate_with_kv_transfer_params",
        "kv_transfer_params",
        post(
            INFER,
            {
                "token_ids": ABC,
                "sampling_params": {"max_tokens": 5},
                "kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False},
                "stream": False,
            },
            {"choices": size(1)},
        ),
    ),
)

SCORING = "generate/generative_scoring/test_generative_scoring_e2e.py"
LABELLED = {"query": "Is this a capital? ", "items": ["Paris", "London"], "label_token_ids": [100, 200]}

LABELS = (
    case(
        SCORING,
        "test_basic_score_and_response_structure",
        "two items",
        post(
            "/generative_scoring",
            LABELLED,
            {
                "id": starts("generative-scoring-"),
                "object": "list",
                "model": GIVEN,
                "data": size(2),
                "data.1.index": 1,
                "data.*.object": "score",
                "data.*.score": fits("0 to 1", lambda score: 0 <= score <= 1),
                "usage": fits(
                    "a sum", lambda usage: usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
                ),
            },
        ),
        server="smol",
    ),
    case(
        SCORING,
        "test_multiple_items",
        "five items",
        post(
            "/generative_scoring",
            LABELLED | {"items": ["Paris", "London", "Berlin", "New York", "Tokyo"]},
            {"data": size(5)},
        ),
        server="smol",
    ),
    case(
        SCORING,
        "test_validation_missing_label_token_ids",
        "no labels",
        post("/generative_scoring", {"query": "Test query", "items": ["item1"]}, {"status": 400}),
    ),
    case(
        SCORING,
        "test_validation_empty_items",
        "no items",
        post("/generative_scoring", LABELLED | {"items": []}, {"status": 400}),
    ),
    case(
        SCORING,
        "test_validation_errors",
        "labels past the vocabulary",
        post("/generative_scoring", LABELLED | {"label_token_ids": [9999999999, 9999999998]}, {"status": 400}),
    ),
    case(
        SCORING,
        "test_score_consistency",
        "twice",
        post("/generative_scoring", LABELLED),
        post("/generative_scoring", LABELLED, {"data.0.score": same("0.data.0.score")}),
        server="smol",
    ),
)

RENDERING = (*RENDERED, *GENERATED, *LABELS)
