"""Requests of vLLM's tests of /v1/chat/completions: checks of fields, token ids, batches."""

from __future__ import annotations

from typing import Any

from support.vllm_requests.case import (
    GIVEN,
    NULL,
    NUMBERS,
    TEXT,
    Expected,
    Ref,
    VllmCase,
    contains,
    fits,
    longer,
    one_of,
    post,
    refused,
    same,
    size,
)
from support.vllm_requests.chats import FRANCE, HI, PATH, ask, case, user, valid

BIAS = "test_chat_logit_bias_validation.py"
STOPS = "test_chat_stop_token_ids_validation.py"
BUDGET = "test_thinking_token_budget_validation.py"

CHECKED = (
    case(
        "test_chat_logit_bias_valid",
        "the last token",
        ask(HI, {"choices.0.message.content": TEXT}, max_tokens=5, logit_bias={"49151": 1.0}),
        file=BIAS,
    ),
    case(
        "test_chat_logit_bias_invalid",
        "past the vocabulary",
        ask(HI, refused("49153", "49152"), max_tokens=5, logit_bias={"49153": 1.0}),
        file=BIAS,
    ),
    case(
        "test_chat_logit_bias_non_integer_key",
        "a word",
        ask(HI, refused("not_a_token_id", "logit_bias"), max_tokens=5, logit_bias={"not_a_token_id": 50}),
        server="fake",
        file=BIAS,
    ),
    case(
        "test_chat_logit_bias_non_numeric_value",
        "a word",
        ask(HI, refused("logit_bias"), max_tokens=5, logit_bias={"1": "not_a_number"}),
        server="fake",
        file=BIAS,
    ),
    case(
        "test_chat_logit_bias_multiple_non_integer_keys",
        "two words",
        ask(HI, refused("bad1", "bad2"), max_tokens=5, logit_bias={"bad1": 50.0, "bad2": 20.0}),
        server="fake",
        file=BIAS,
    ),
    case(
        "test_chat_stop_token_ids_valid",
        "the last token",
        ask(HI, {"choices.0.message.content": TEXT}, max_tokens=5, stop_token_ids=[49151]),
        file=STOPS,
    ),
    case(
        "test_chat_stop_token_ids_out_of_vocab",
        "past the vocabulary",
        ask(HI, refused("258", "257"), max_tokens=5, stop_token_ids=[258]),
        server="fake",
        file=STOPS,
    ),
    case(
        "test_chat_stop_token_ids_negative",
        "-1",
        ask(HI, refused(), max_tokens=5, stop_token_ids=[-1]),
        server="fake",
        file=STOPS,
    ),
    *(
        case(
            "test_chat_completion_request_rejects_invalid_thinking_token_budget",
            str(value),
            ask(HI, refused("thinking_token_budget"), max_tokens=2, thinking_token_budget=value),
            server="fake",
            file=BUDGET,
        )
        for value in (-2, 0.6, 10.5)
    ),
    case(
        "test_chat_completion_request_accepts_valid_thinking_token_budget",
        "10",
        ask(user("[[b]]"), {"choices": size(1)}, max_tokens=2, thinking_token_budget=10),
        server="say",
        file=BUDGET,
    ),
    case(
        "test_chat_completion_request_accepts_minus_one_as_unlimited",
        "-1",
        ask(HI, {"choices": size(1)}, max_tokens=2, thinking_token_budget=-1),
        server="fake",
        file=BUDGET,
    ),
    *(
        case(
            "test_chat_completion_request_rejects_non_object_body",
            what,
            post(PATH, body, {"status": one_of(400, 422), "error": GIVEN}),
            server="fake",
            file="test_non_object_body_validation.py",
        )
        for what, body in (
            ("a text", b'"this is not valid json{{{"'),
            ("a list", b'["not", "an", "object"]'),
            ("a number", b"42"),
            ("null", b"null"),
        )
    ),
    case(
        "test_chat_completion_request_cache_salt_still_validated_on_dict",
        "an empty salt",
        ask(HI, refused("cache_salt"), cache_salt=""),
        server="fake",
        file="test_non_object_body_validation.py",
    ),
    case(
        "test_system_message_accepts_text_array",
        "a list of one text",
        ask(
            [{"role": "system", "content": [{"type": "text", "text": "You help."}]}, *HI],
            {"choices": size(1)},
            max_tokens=2,
        ),
        server="fake",
        file="test_chat_error.py",
    ),
    case(
        "test_chat_error_non_stream",
        "an engine that fails",
        ask(user("abc"), {"status": 500, "error.type": "InternalServerError"}, max_tokens=10),
        server="crash",
        file="test_chat_error.py",
    ),
    case(
        "test_request_wrong_content_type",
        "a form",
        post(
            PATH,
            {"messages": HI, "max_tokens": 10},
            {"status": one_of(400, 415, 422)},
            content_type="application/x-www-form-urlencoded",
        ),
        server="fake",
        file="../../serve/instrumentator/test_basic.py",
    ),
    *(
        case(
            "test_none_injects_enable_thinking_in_request",
            effort,
            ask(HI, {"choices": size(1)}, max_tokens=2, reasoning_effort=effort),
            server="fake",
            file="test_reasoning_effort.py",
        )
        for effort in ("none", "low", "medium", "high")
    ),
    case(
        "test_translategemma_extra_lang_code_fields",
        "fields of a content part",
        ask(
            user([{"type": "text", "text": "abc", "source_lang_code": "en", "target_lang_code": "es"}]),
            {"choices": size(1)},
            max_tokens=2,
            temperature=0.0,
        ),
        server="parts",
        file="test_extra_content_fields.py",
    ),
)

CATS = [
    {"role": "system", "content": "You like to use emojis in your responses."},
    {"role": "user", "content": "Repeat after me: I love cats \U0001f431"},
]

TOKEN_IDS = (
    case(
        "test_chat_completion_with_emoji_and_token_ids",
        "whole and streamed",
        ask(
            CATS,
            {"choices.0.token_ids": NUMBERS, "prompt_token_ids": NUMBERS, "choices.0.message.content": TEXT},
            max_tokens=20,
            temperature=0,
            logprobs=True,
            return_token_ids=True,
        ),
        ask(
            CATS,
            {
                "chunks.0.prompt_token_ids": same("0.prompt_token_ids"),
                "chunks": fits(
                    "prompt_token_ids only in the first",
                    lambda chunks: all("prompt_token_ids" not in chunk for chunk in chunks[1:]),
                ),
                "token_ids": same("0.choices.0.token_ids"),
                "texts.0": same("0.choices.0.message.content"),
            },
            max_tokens=20,
            temperature=0,
            stream=True,
            return_token_ids=True,
        ),
        post(
            "/detokenize",
            {"tokens": Ref("0.prompt_token_ids")},
            {"prompt": contains(CATS[0]["content"], CATS[1]["content"])},
        ),
        file="../basic/test_return_token_ids.py",
    ),
    case(
        "test_chat_completion_with_tool_use",
        "not asked for",
        ask(
            FRANCE,
            {"choices.0.token_ids": NULL, "prompt_token_ids": NULL},
            max_tokens=5,
            logprobs=True,
            return_token_ids=False,
        ),
        file="../basic/test_return_token_ids.py",
    ),
    case(
        "test_chat_return_tokens_as_token_ids_completion",
        "by the request",
        ask(
            CATS,
            {"choices.0.logprobs.content.*.token": contains("token_id:")},
            temperature=0,
            max_tokens=8,
            logprobs=True,
            return_tokens_as_token_ids=True,
        ),
        file="../test_return_tokens_as_ids.py",
    ),
    case(
        "test_chat_return_tokens_as_token_ids_completion",
        "by the flag",
        ask(user("abc"), {"choices.0.logprobs.content.*.token": contains("token_id:")}, max_tokens=8, logprobs=True),
        server="as-ids",
        file="../test_return_tokens_as_ids.py",
    ),
)

BATCH = "test_batched_chat_completions.py"
TWO = [user("Reply with exactly the word: alpha"), user("Reply with exactly the word: beta")]
YES_NO = {
    "type": "object",
    "properties": {"answer": {"type": "string", "enum": ["yes", "no"]}},
    "required": ["answer"],
    "additionalProperties": False,
}


def batch(test: str, what: str, body: Any, expected: Expected, server: str = "smol") -> VllmCase:
    return case(test, what, post(f"{PATH}/batch", body, expected), server=server, file=BATCH)


BATCHES = (
    batch(
        "test_batched_chat_completions",
        "two conversations",
        {"messages": TWO, "max_tokens": 10},
        {"choices": size(2), "choices.0.index": 0, "choices.1.index": 1, "choices.*.message.content": longer(0)},
    ),
    batch(
        "test_batched_chat_completions_with_json_schema",
        "an enumeration",
        {
            "messages": TWO,
            "max_tokens": 60,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "answer", "schema": YES_NO, "strict": True},
            },
        },
        {"choices": size(2), "choices.*.message.content": valid(YES_NO)},
    ),
    batch(
        "test_batched_chat_completions_logprobs_not_token_id_placeholders",
        "return_token_ids",
        {"messages": TWO[:1], "max_tokens": 5, "logprobs": True, "top_logprobs": 1, "return_token_ids": True},
        {"choices.0.logprobs.content.*.token": fits("a text", lambda text: not text.startswith("token_id:"))},
    ),
    batch(
        "test_batched_chat_completions_return_tokens_as_token_ids",
        "return_tokens_as_token_ids",
        {"messages": TWO[:1], "max_tokens": 5, "logprobs": True, "top_logprobs": 1, "return_tokens_as_token_ids": True},
        {"choices.0.logprobs.content.*.token": contains("token_id:")},
    ),
    batch(
        "test_batched_chat_completions_logprob_token_ids",
        "three ids",
        {
            "messages": [HI],
            "max_tokens": 1,
            "temperature": 0,
            "logprobs": True,
            "top_logprobs": 5,
            "logprob_token_ids": [100, 1000, 5000],
            "return_tokens_as_token_ids": True,
        },
        {
            "choices.0.logprobs.content.0": fits(
                "these and the sampled one",
                lambda content: (
                    {top["token"] for top in content["top_logprobs"]}
                    == {"token_id:100", "token_id:1000", "token_id:5000", content["token"]}
                ),
            )
        },
    ),
    batch(
        "test_batched_echo_does_not_prepend_user_prompt",
        "the user's turn is last",
        {"messages": [user("abc")], "echo": True, "max_tokens": 2},
        {"choices.0.message.content": fits("no prompt", lambda text: "abc" not in text)},
        "fake",
    ),
    batch(
        "test_batched_echo_prepends_matching_assistant_prefix",
        "the assistant's turn is last",
        {
            "messages": [[*user("abc"), {"role": "assistant", "content": "def"}]],
            "echo": True,
            "max_tokens": 2,
            "add_generation_prompt": False,
            "continue_final_message": True,
        },
        {"choices.0.message.content": contains("def")},
        "fake",
    ),
    batch(
        "test_batch_rejects_kv_transfer_prompt_token_ids",
        "token ids for two conversations",
        {"messages": TWO, "kv_transfer_params": {"prompt_token_ids": [10, 20, 30]}},
        refused("kv_transfer_params"),
        "fake",
    ),
)

CHAT_FIELDS = (*CHECKED, *TOKEN_IDS, *BATCHES)
