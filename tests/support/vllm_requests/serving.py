"""Requests of vLLM's tests of tokenizers, models, keys, health, metrics, sleep and rendering."""

from __future__ import annotations

import re
from typing import Any

from support.vllm_requests.case import (
    ABSENT,
    GIVEN,
    NULL,
    NUMBERS,
    Expected,
    Ref,
    Sent,
    VllmCase,
    contains,
    fits,
    get,
    lacks,
    longer,
    one_of,
    post,
    refused,
    same,
    size,
    starts,
)

TALK = [
    {"role": "user", "content": "Hi there!"},
    {"role": "assistant", "content": "Nice to meet you!"},
    {"role": "user", "content": "Can I ask a question? vllm1"},
]
SURE = {"role": "assistant", "content": "Sure,"}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"location": {"type": "string"}}},
    },
}
CHATML = "<|im_start|>{}\n{}<|im_end|>\n"
SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
TOKENIZED: Expected = {"tokens": NUMBERS, "max_model_len": 2048, "token_strs": NULL}


def case(file: str, test: str, what: str, *sent: Sent, server: str = "fake") -> VllmCase:
    return VllmCase(f"entrypoints/{file}::{test}", what, server, sent)


def rendered(messages: list[dict[str, Any]], add_prompt: bool, keep_open: bool) -> str:
    """Return what SmolLM2's template makes of a conversation."""
    text = CHATML.format("system", SYSTEM)
    text += "".join(CHATML.format(message["role"], message["content"]) for message in messages)
    if keep_open:
        text = text.removesuffix("<|im_end|>\n")
    return text + ("<|im_start|>assistant\n" if add_prompt else "")


def chat_tokens(what: str, add_prompt: bool, keep_open: bool, special: bool, **more: Any) -> VllmCase:
    messages = [*TALK, SURE] if keep_open else TALK
    body = {"add_generation_prompt": add_prompt, "continue_final_message": keep_open, "add_special_tokens": special}
    return case(
        "serve/tokenize/test_tokenization.py",
        what,
        f"prompt {add_prompt}, open {keep_open}, special {special}",
        post("/tokenize", {"prompt": rendered(messages, add_prompt, keep_open), "add_special_tokens": special}),
        post(
            "/tokenize",
            body | {"messages": messages} | more,
            TOKENIZED | {"tokens": same("0.tokens"), "count": same("0.count")},
        ),
        server="smol",
    )


FLAGS = [
    (add, keep, special)
    for add in (False, True)
    for special in (False, True)
    for keep in (False, True)
    if not add or not keep
]
TOKEN = "serve/tokenize/test_tokenization.py"

TOKENIZER = (
    *(
        case(
            TOKEN,
            "test_tokenize_completions",
            f"special {special}",
            post(
                "/tokenize",
                {"prompt": "vllm1 This is a test prompt.", "add_special_tokens": special},
                TOKENIZED | {"": fits("the count of tokens", lambda body: body["count"] == len(body["tokens"]))},
            ),
            post("/detokenize", {"tokens": Ref("0.tokens")}, {"prompt": "vllm1 This is a test prompt."}),
            server="smol",
        )
        for special in (False, True)
    ),
    *(chat_tokens("test_tokenize_chat", *flags) for flags in FLAGS),
    *(chat_tokens("test_tokenize_chat_with_tools", *flags, tools=[WEATHER]) for flags in FLAGS),
    case(
        TOKEN,
        "test_tokenize_with_return_token_strs",
        "a text",
        post(
            "/tokenize",
            {"prompt": "This is a token_strs test prompt! vllm1", "return_token_strs": True},
            {
                "token_strs.0": "This",
                "token_strs.1": "Ġis",
                "": fits(
                    "a text for each token",
                    lambda body: len(body["token_strs"]) == len(body["tokens"]) == body["count"],
                ),
            },
        ),
        server="smol",
    ),
    case(
        TOKEN,
        "test_detokenize",
        "a text",
        post("/tokenize", {"prompt": "This is a test prompt. vllm1", "add_special_tokens": False}),
        post("/detokenize", {"tokens": Ref("0.tokens")}, {"": {"prompt": "This is a test prompt. vllm1"}}),
        server="smol",
    ),
    case(
        TOKEN,
        "test_tokenizer_info_basic",
        "the class",
        get("/tokenizer_info", {"tokenizer_class": longer(0)}),
        server="smol",
    ),
    case(
        TOKEN,
        "test_tokenizer_info_schema",
        "types",
        get(
            "/tokenizer_info",
            {
                "": fits(
                    "values of their types",
                    lambda body: all(
                        isinstance(body.get(name), (kind, type(None)))
                        for name, kind in (
                            ("bos_token", str),
                            ("eos_token", str),
                            ("pad_token", str),
                            ("unk_token", str),
                            ("chat_template", str),
                            ("model_max_length", int),
                            ("additional_special_tokens", list),
                            ("added_tokens_decoder", dict),
                        )
                    ),
                )
            },
        ),
        server="smol",
    ),
    case(
        TOKEN,
        "test_tokenizer_info_consistency_with_tokenize",
        "the length",
        get("/tokenizer_info", {"model_max_length": 2048}),
        post("/tokenize", {"prompt": "Hello world!"}, {"max_model_len": 2048}),
        server="smol",
    ),
    case(
        TOKEN,
        "test_tokenizer_info_chat_template",
        "the template",
        get("/tokenizer_info", {"chat_template": contains("im_start")}),
        server="smol",
    ),
    case(
        "serve/tokenize/test_serving_tokenization.py",
        "test_overflow_error_returns_bad_request",
        "an id of 2**63",
        post("/detokenize", {"tokens": [2**63]}, refused() | {"error.type": "BadRequestError"}),
    ),
    case(
        "serve/tokenize/test_serving_tokenization.py",
        "test_vllm_validation_error_returns_bad_request",
        "an id of -1",
        post(
            "/detokenize",
            {"tokens": [-1]},
            refused() | {"error.type": "BadRequestError", "error.param": starts("tokens")},
        ),
    ),
    *(
        case(
            "serve/tokenize/test_serving_tokenization.py",
            "test_vllm_not_found_error_returns_not_found",
            path,
            post(
                path,
                {"model": "nonexistent-lora", "prompt": "a", "tokens": [1]},
                refused(status=404) | {"error.type": "NotFoundError"},
            ),
        )
        for path in ("/tokenize", "/detokenize")
    ),
)

KEYS = (
    case(
        "openai/test_models.py",
        "test_check_models",
        "the base model",
        get("/v1/models", {"data.0.id": "fake", "data.0.root": "fake", "data.0.parent": NULL}),
    ),
    case("serve/middleware/test_optional_middleware.py", "test_no_api_token", "no key", get("/v1/models")),
    case(
        "serve/middleware/test_optional_middleware.py",
        "test_no_request_id_header",
        "health",
        get("/health", {"headers.x-request-id": ABSENT}),
    ),
    case(
        "serve/middleware/test_optional_middleware.py",
        "test_missing_api_token",
        "--api-key",
        get("/v1/models", {"status": 401}),
        server="key",
    ),
    case(
        "serve/middleware/test_optional_middleware.py",
        "test_passed_api_token",
        "--api-key",
        get("/v1/models", authorization="Bearer test"),
        server="key",
    ),
    case(
        "serve/middleware/test_optional_middleware.py",
        "test_not_v1_or_v2_path_skips_auth",
        "--api-key",
        get("/health"),
        server="key",
    ),
    case(
        "serve/middleware/test_optional_middleware.py",
        "test_v2_endpoint_rejects_missing_api_token",
        "/v2/embed",
        post("/v2/embed", {"texts": ["hello"], "embedding_types": ["float"]}, {"status": 401}),
        server="embed-key",
    ),
    case(
        "serve/middleware/test_optional_middleware.py",
        "test_v2_endpoint_accepts_valid_api_token",
        "/v2/embed",
        post("/v2/embed", {"texts": ["hello"], "embedding_types": ["float"]}, authorization="Bearer test"),
        server="embed-key",
    ),
    case(
        "serve/middleware/test_optional_middleware.py",
        "test_enable_request_id_header",
        "health",
        get("/health", {"headers.x-request-id": size(32)}),
        server="request-ids",
    ),
    case(
        "serve/middleware/test_optional_middleware.py",
        "test_custom_request_id_header",
        "health",
        get("/health", {"headers.x-request-id": "Custom"}, x_request_id="Custom"),
        server="request-ids",
    ),
    *(
        case(
            "serve/middleware/test_authentication_middleware.py",
            "test_unguarded_path_with_trailing_slash_needs_no_token",
            path,
            get(path + "/"),
            server="key",
        )
        for path in ("/health", "/ping")
    ),
    case(
        "serve/middleware/test_authentication_middleware.py",
        "test_trailing_slash_does_not_unguard_a_protected_path",
        "no key",
        get("/v1/models/", {"status": 401}),
        server="key",
    ),
    case(
        "serve/middleware/test_authentication_middleware.py",
        "test_trailing_slash_does_not_unguard_a_protected_path",
        "a key",
        get("/v1/models/", {"status": one_of(200, 307)}, authorization="Bearer test"),
        server="key",
    ),
    *(
        case(
            "serve/middleware/test_authentication_middleware.py",
            "test_auto_discovered_protected_routes_require_auth",
            f"{path}, {what}",
            post(path, {}, {"status": 401}, authorization=key),
            server="key",
        )
        for path in (
            "/v1/completions",
            "/v1/chat/completions",
            "/v1/responses",
            "/v1/messages",
            "/invocations",
            "/tokenize",
        )
        for what, key in (("no key", ""), ("a wrong key", "Bearer wrong"))
    ),
    case(
        "serve/middleware/test_authentication_middleware.py",
        "test_bare_options_on_a_guarded_mount_needs_a_token",
        "OPTIONS /metrics",
        Sent("OPTIONS", "/metrics", None, {"raw": lacks("vllm:num_requests_running"), "status": one_of(401, 405)}),
        server="key",
    ),
    case(
        "serve/middleware/test_authentication_middleware.py",
        "test_cors_preflight_needs_no_token_and_returns_no_data",
        "OPTIONS /metrics",
        Sent(
            "OPTIONS",
            "/metrics",
            None,
            {"headers.access-control-allow-origin": GIVEN, "raw": lacks("vllm:num_requests_running")},
            {"origin": "http://dashboard.example", "access-control-request-method": "GET"},
        ),
        server="key",
    ),
    *(
        case(
            "openai/chat_completion/test_root_path.py",
            "test_chat_session_root_path_with_api_key",
            f"{base or 'no'} prefix, {what}",
            post(
                f"{base}/v1/chat/completions",
                {
                    "messages": [{"role": "user", "content": "abc"}, {"role": "assistant", "content": "x"}],
                    "continue_final_message": True,
                    "add_generation_prompt": False,
                },
                expected,
                authorization=key,
            ),
            server="root-path",
        )
        for base in ("", "/llm")
        for what, key, expected in (
            ("a wrong key", "Bearer abc", {"status": 401}),
            (
                "a key",
                "Bearer abc-123",
                {"choices": size(1), "choices.0.finish_reason": "stop", "choices.0.message.content": longer(0)},
            ),
        )
    ),
)

SERIES = (
    "num_requests_running",
    "num_requests_waiting",
    "num_requests_waiting_by_reason",
    "kv_cache_usage_perc",
    "prefix_cache_queries",
    "prefix_cache_hits",
    "num_preemptions_total",
    "prompt_tokens_total",
    "generation_tokens_total",
    "iteration_tokens_total",
    "cache_config_info",
    "request_success_total",
    "request_prompt_tokens",
    "request_generation_tokens",
    "request_params_n",
    "request_params_max_tokens",
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "e2e_request_latency_seconds",
    "request_queue_time_seconds",
    "request_inference_time_seconds",
    "request_prefill_time_seconds",
    "request_decode_time_seconds",
    "request_num_preemptions",
)


def counted(**numbers: float) -> Any:
    """The metrics text has these values, whatever their labels."""

    def holds(text: str) -> bool:
        return all(
            re.search(rf"^vllm:{name}(\{{[^}}]*\}})? {number:.1f}$", text, re.M) for name, number in numbers.items()
        )

    return fits(f"with {numbers}", holds)


TEN = [
    post("/v1/completions", {"prompt": list(range(start, start + 10)), "max_tokens": 10, "temperature": 0.0})
    for start in range(65, 75)
]

METRICS = (
    *(
        case(
            "serve/instrumentator/test_metrics.py",
            "test_metrics_exist",
            name,
            post("/v1/completions", {"prompt": "abc", "max_tokens": 5, "temperature": 0.0}),
            get("/metrics", {"raw": contains(f"vllm:{name}")}),
        )
        for name in SERIES
    ),
    case(
        "serve/instrumentator/test_metrics.py",
        "test_metrics_exist",
        "labels of cache_config_info",
        get(
            "/metrics",
            {
                "raw": fits(
                    "with the size and the concurrency",
                    lambda text: (
                        (found := re.search(r"^vllm:cache_config_info\{(.*)\}", text, re.M)) is not None
                        and re.search(r'kv_cache_size_tokens="\d', found[1]) is not None
                        and re.search(r'kv_cache_max_concurrency="\d', found[1]) is not None
                    ),
                )
            },
        ),
        server="smol",
    ),
    case(
        "serve/instrumentator/test_metrics.py",
        "test_metrics_counts",
        "ten requests",
        *TEN,
        get(
            "/metrics",
            {
                "raw": counted(
                    **{
                        "time_to_first_token_seconds_count": 10,
                        "inter_token_latency_seconds_count": 90,
                        "e2e_request_latency_seconds_count": 10,
                        "request_queue_time_seconds_count": 10,
                        "request_inference_time_seconds_count": 10,
                        "request_prefill_time_seconds_count": 10,
                        "request_decode_time_seconds_count": 10,
                        "request_num_preemptions_count": 10,
                        "request_prompt_tokens_sum": 100,
                        "request_prompt_tokens_count": 10,
                        "request_generation_tokens_sum": 100,
                        "request_generation_tokens_count": 10,
                        "request_params_n_count": 10,
                        "request_params_max_tokens_sum": 100,
                        "request_params_max_tokens_count": 10,
                        "prompt_tokens_total": 100,
                        "generation_tokens_total": 100,
                        "request_success_total": 10,
                    }
                )
            },
        ),
        server="counted",
    ),
    case(
        "serve/instrumentator/test_metrics.py",
        "test_metrics_counts",
        "iteration_tokens_total",
        *TEN,
        get("/metrics", {"raw": counted(iteration_tokens_total_sum=200, iteration_tokens_total_count=100)}),
        server="counted-steps",
    ),
)

HEALTH = (
    case("serve/instrumentator/test_basic.py", "test_show_version", "version", get("/version", {"version": longer(0)})),
    case("serve/instrumentator/test_basic.py", "test_check_health", "health", get("/health")),
    case(
        "serve/instrumentator/test_basic.py",
        "test_health_check_engine_dead_error",
        "after a crash",
        post("/v1/completions", {"prompt": "abc", "max_tokens": 10}, {"status": 500}),
        get("/health", {"status": 503}),
        server="crash",
    ),
    case(
        "serve/instrumentator/test_basic.py",
        "test_server_load",
        "nothing runs",
        get("/load", {"server_load": 0}),
        post("/v1/completions", {"prompt": "abc", "max_tokens": 3}),
        get("/load", {"server_load": 0}),
        server="slow",
    ),
    case(
        "serve/dev/test_cache.py",
        "test_reset_prefix_cache_route",
        "plain",
        post("/reset_prefix_cache", None),
        server="dev",
    ),
    case(
        "serve/dev/test_cache.py",
        "test_reset_prefix_cache_route",
        "running requests",
        post("/reset_prefix_cache?reset_running_requests=true", None),
        server="dev",
    ),
    case(
        "serve/dev/test_cache.py",
        "test_reset_prefix_cache_route",
        "the answer",
        post("/reset_prefix_cache", None, {"": {"success": True}}),
        server="dev",
    ),
    case(
        "serve/dev/test_sleep.py",
        "test_sleep_mode",
        "level 1 and back",
        post("/sleep?level=1", None),
        get("/is_sleeping", {"is_sleeping": True}),
        post("/wake_up", None),
        get("/is_sleeping", {"is_sleeping": False}),
        server="dev",
    ),
    case(
        "serve/dev/test_sleep.py",
        "test_sleep_mode",
        "by tags",
        post("/sleep?level=1", None),
        post("/wake_up?tags=weights", None),
        get("/is_sleeping", {"is_sleeping": True}),
        post("/wake_up?tags=kv_cache", None),
        get("/is_sleeping", {"is_sleeping": False}),
        server="dev",
    ),
    case(
        "serve/dev/test_sleep.py",
        "test_sleep_mode",
        "metrics",
        post("/sleep?level=1", None),
        get(
            "/metrics",
            {
                "raw": fits(
                    "asleep",
                    lambda text: (
                        re.search(
                            r'^vllm:engine_sleep_state\{[^}]*sleep_state="weights_offloaded"[^}]*\} 1', text, re.M
                        )
                        is not None
                        and re.search(r'^vllm:engine_sleep_state\{[^}]*sleep_state="awake"[^}]*\} 0', text, re.M)
                        is not None
                    ),
                )
            },
        ),
        post("/wake_up", None),
        server="dev",
    ),
    case(
        "serve/dev/test_sleep.py",
        "test_release_kv_cache_memory_route",
        "not paused",
        post("/release_kv_cache_memory", None, {"status": 500}),
        server="dev",
    ),
)

SERVING = (*TOKENIZER, *KEYS, *METRICS, *HEALTH)
