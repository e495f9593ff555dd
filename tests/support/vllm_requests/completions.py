"""Requests of vLLM's tests of /v1/completions."""

from __future__ import annotations

from posixpath import normpath
from typing import Any

from support.vllm_requests.case import (
    GIVEN,
    GONE,
    NULL,
    NUMBERS,
    TEXT,
    Expected,
    Sent,
    VllmCase,
    contains,
    fits,
    longer,
    other,
    post,
    refused,
    same,
    size,
    sized,
)

PATH = "/v1/completions"
IDS = [0, 0, 0, 0, 0]
HELLO = {"prompt": "Hello, my name is", "max_tokens": 5, "temperature": 0.0}
ZEROS = {"prompt": IDS, "max_tokens": 5, "temperature": 0.0}
LLM = {"prompt": "Once upon a time", "max_tokens": 5, "temperature": 0.0}
FRANCE = {"prompt": "What is the capital of France?", "max_tokens": 5, "temperature": 0.0}
BROKEN_SCHEMA = {
    "$defs": {"Kind": {"enum": ["sedan", "coupe"], "type": "string"}},
    "properties": {"brand": {"type": "string"}, "kind": {"$ref": "#/$defs/Kind"}, "foo": "bar"},
    "required": ["brand", "kind"],
    "type": "object",
}
BROKEN_GRAMMAR = 'root ::= queryinvalidsyntax\nquery ::= "SELECT " column\ncolumn ::= "col_1 " | "col_2 "'


def ask(body: dict[str, Any], expected: Expected | None = None, /, **more: Any) -> Sent:
    return post(PATH, body | more, expected)


def case(test: str, what: str, *sent: Sent, server: str = "smol", file: str = "test_completion.py") -> VllmCase:
    return VllmCase(f"{normpath(f'entrypoints/openai/completion/{file}')}::{test}", what, server, sent)


def options(stream: bool = True, **fields: Any) -> dict[str, Any]:
    return FRANCE | {"stream": stream, "stream_options": fields}


def whole(chunk: Any) -> bool:
    usage = chunk["usage"]
    added = usage["prompt_tokens"] + usage["completion_tokens"] == usage["total_tokens"]
    return bool(added and usage["prompt_tokens"] > 0 and usage["completion_tokens"] > 0)


def rises(chunks: Any, last: int) -> bool:
    """Whether each chunk counts more tokens than the one before, to the last."""
    counted = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    return counted == sorted(set(counted)) and bool(counted[-1] == last)


USAGE_LAST = {
    "chunks": fits(
        "usage only in the last chunk, which has no choices",
        lambda chunks: (
            all(chunk.get("usage") is None for chunk in chunks[:-1])
            and chunks[-1]["choices"] == []
            and whole(chunks[-1])
        ),
    )
}
USAGE_ALWAYS = {
    "chunks": fits(
        "usage in each chunk, and a last one without choices",
        lambda chunks: all(map(whole, chunks)) and chunks[-1]["choices"] == [],
    )
}
NO_USAGE = {"chunks.*.usage": GONE}


def logprobs(number: int, least: int, most: int) -> Expected:
    return {
        "choices.0.logprobs.text_offset": size(number),
        "choices.0.logprobs.tokens": size(number),
        "choices.0.logprobs.token_logprobs": size(number),
        "choices.0.logprobs.top_logprobs": size(number),
        "choices.0.logprobs.top_logprobs.0": sized(least, most),
    }


def echoed(text: Any, most: int) -> Expected:
    return {
        "choices.0.text": text,
        "choices.0.logprobs.text_offset": longer(5),
        "choices.0.logprobs.tokens": longer(5),
        "choices.0.logprobs.token_logprobs.0": NULL,
        "choices.0.logprobs.top_logprobs.0": NULL,
        "choices.0.logprobs.top_logprobs": fits(
            f"1 to {most} alternatives after the first token",
            lambda tops: all(1 <= len(top) <= most for top in tops[1:]),
        ),
    }


SINGLE = {
    "id": GIVEN,
    "choices": size(1),
    "choices.0.text": longer(4),
    "choices.0.finish_reason": "length",
    "usage.prompt_tokens": 5,
    "usage.completion_tokens": 5,
    "usage.total_tokens": 10,
    "usage.prompt_tokens_details.cached_tokens": 0,
}

THREE = LLM | {"max_tokens": 50, "n": 3, "temperature": 1.0, "seed": 42}

PLAIN = (
    case("test_single_completion", "text", ask(HELLO, SINGLE)),
    case(
        "test_single_completion",
        "token ids",
        ask(ZEROS, {"choices.0.text": longer(0), "choices.0.prompt_logprobs": NULL}),
    ),
    case(
        "test_completion_truncation_side_controls_prompt_truncation",
        "both sides",
        ask(
            {
                "prompt": list(range(8)),
                "max_tokens": 1,
                "temperature": 0.0,
                "return_token_ids": True,
                "truncate_prompt_tokens": 4,
                "truncation_side": "right",
            },
            {"choices.0.prompt_token_ids": [0, 1, 2, 3]},
        ),
        ask(
            {
                "prompt": list(range(8)),
                "max_tokens": 1,
                "temperature": 0.0,
                "return_token_ids": True,
                "truncate_prompt_tokens": 4,
                "truncation_side": "left",
            },
            {"choices.0.prompt_token_ids": [4, 5, 6, 7]},
        ),
    ),
    case("test_no_logprobs", "null", ask(ZEROS, {"choices.0.logprobs": NULL}, logprobs=None)),
    case("test_zero_logprobs", "0", ask(ZEROS, logprobs(5, 1, 1), logprobs=0)),
    case("test_some_logprobs", "5", ask(ZEROS, logprobs(5, 5, 6), logprobs=5)),
    case(
        "test_too_many_completion_logprobs",
        "21",
        ask(ZEROS, refused(), logprobs=21),
        ask(ZEROS, {"choices.0.text": TEXT}),
    ),
    case(
        "test_too_many_completion_logprobs", "30, streamed", ask(ZEROS, refused(), logprobs=30, stream=True), ask(ZEROS)
    ),
    case(
        "test_prompt_logprobs_completion",
        "-1",
        ask({"prompt": ["A robot may not", "My name is"]}, refused(), prompt_logprobs=-1),
    ),
    *(
        case(
            "test_prompt_logprobs_completion",
            str(number),
            ask(
                {"prompt": ["A robot may not", "My name is"]},
                {"choices": size(2), "choices.*.prompt_logprobs": longer(0)},
                prompt_logprobs=number,
            ),
        )
        for number in (0, 1)
    ),
    case(
        "test_prompt_logprobs_completion",
        "not asked for",
        ask({"prompt": ["A robot may not", "My name is"]}, {"choices.*.prompt_logprobs": NULL}),
    ),
    case(
        "test_completion_streaming",
        "text",
        ask(LLM),
        ask(
            LLM,
            {
                "reasons": ["length"],
                "choices.-1.finish_reason": "length",
                "choices.-1.text": longer(0),
                "texts.0": same("0.choices.0.text"),
                "done": True,
            },
            stream=True,
        ),
    ),
    case(
        "test_parallel_no_streaming",
        "n = 3",
        ask(
            THREE,
            {
                "choices": size(3),
                "choices.0.index": 0,
                "choices.1.index": 1,
                "choices.2.index": 2,
                "choices.*.finish_reason": TEXT,
                "choices.0.text": other("0.choices.1.text"),
                "choices.1.text": other("0.choices.2.text"),
                "choices.2.text": other("0.choices.0.text"),
                "choices.*.logprobs.tokens": sized(1, 50),
            },
            logprobs=0,
        ),
    ),
    case(
        "test_parallel_streaming",
        "n = 3",
        ask(
            THREE,
            {
                "reasons": size(3),
                "texts": size(3),
                "texts.0": other("0.texts.1"),
                "texts.1": other("0.texts.2"),
                "texts.2": other("0.texts.0"),
            },
            stream=True,
        ),
    ),
    case(
        "test_completion_stream_options",
        "no usage",
        post(PATH, options(include_usage=False, continuous_usage_stats=False), NO_USAGE),
    ),
    case(
        "test_completion_stream_options",
        "continuous without usage",
        post(PATH, options(include_usage=False, continuous_usage_stats=True), NO_USAGE),
    ),
    case(
        "test_completion_stream_options",
        "usage at the end",
        post(PATH, options(include_usage=True, continuous_usage_stats=False), USAGE_LAST),
    ),
    case(
        "test_completion_stream_options",
        "usage always",
        post(PATH, options(include_usage=True, continuous_usage_stats=True), USAGE_ALWAYS),
    ),
    case("test_completion_stream_options", "empty", post(PATH, options(), NO_USAGE)),
    *(
        case(
            "test_completion_stream_options",
            f"{field}: {value}, not streamed",
            post(PATH, options(stream=False, **{field: value}), refused()),
        )
        for field in ("include_usage", "continuous_usage_stats")
        for value in (None, True)
    ),
    *(
        case(
            "test_batch_completions",
            f"{what}, {how}",
            ask({"prompt": prompts, "max_tokens": 5, "temperature": 0.0} | more, expected),
        )
        for what, prompts in (("text", ["Hello, my name is"] * 2), ("token ids", [IDS] * 2))
        for how, more, expected in (
            ("two prompts", {}, {"choices": size(2), "choices.1.text": same("0.choices.0.text")}),
            (
                "beam search",
                {"n": 2, "use_beam_search": True},
                {
                    "choices": size(4),
                    "choices.1.text": other("0.choices.0.text"),
                    "choices.2.text": same("0.choices.0.text"),
                    "choices.3.text": same("0.choices.1.text"),
                },
            ),
            ("streamed", {"stream": True}, {"chunks.*.choices": size(1), "texts.1": same("0.texts.0")}),
        )
    ),
    *(
        case(
            "test_echo_logprob_completion",
            f"{number} of {what}",
            ask(
                {"prompt": prompt} | {"max_tokens": 5, "temperature": 0.0},
                echoed(text, number + 1),
                echo=True,
                logprobs=number,
            ),
        )
        for number in (1, 0)
        for what, prompt, text in (
            ("a text", "Hello, my name is", contains("Hello, my name is")),
            ("token ids", [19556, 28, 957, 1462, 314], contains("Hello, my name is")),
        )
    ),
    case(
        "test_invalid_json_schema",
        "a property that is no schema",
        ask({"prompt": "A car as JSON:"}, refused(), structured_outputs={"json": BROKEN_SCHEMA}),
    ),
    case(
        "test_invalid_regex",
        "an open bracket",
        ask({"prompt": "An address:"}, refused(), structured_outputs={"regex": "[.*"}, stop=["\n"]),
    ),
    case(
        "test_invalid_grammar",
        "a rule without a body",
        ask({"prompt": "A query:"}, refused(), structured_outputs={"grammar": BROKEN_GRAMMAR}),
    ),
)

CHECKED = (
    case(
        "test_empty_prompt",
        "null and no embeddings",
        ask(
            {"prompt": None, "max_tokens": 5, "temperature": 0.0, "prompt_embeds": []},
            refused("prompt", "must be provided and non-empty"),
        ),
        server="fake",
        file="test_prompt_validation.py",
    ),
    case(
        "test_out_of_vocab_token_ids",
        "999999",
        ask({"prompt": [999999], "max_tokens": 5, "temperature": 0.0}, refused("out of vocabulary")),
        server="fake",
        file="test_prompt_validation.py",
    ),
    case(
        "test_disable_prompt_embeds",
        "embeddings without the flag",
        ask({"prompt_embeds": "AAAA", "max_tokens": 5}, refused("--enable-prompt-embeds")),
        server="fake",
        file="test_prompt_validation.py",
    ),
    case(
        "test_empty_prompt_list_rejected",
        "[]",
        ask({"prompt": []}, refused("prompt")),
        server="fake",
        file="test_empty_prompt_list.py",
    ),
    case(
        "test_nonempty_prompt_list_ok",
        "one text",
        ask({"prompt": ["hello"]}, {"choices": size(1)}),
        server="fake",
        file="test_empty_prompt_list.py",
    ),
    case(
        "test_json_schema_response_format_missing_schema",
        "no json_schema",
        ask(
            {"prompt": "Test prompt", "max_tokens": 10, "response_format": {"type": "json_schema"}},
            refused("json_schema"),
        ),
        server="fake",
        file="test_completion_error.py",
    ),
    case(
        "test_negative_prompt_token_ids_nested",
        "[[-1]]",
        ask({"prompt": [[-1]], "max_tokens": 10}, refused("greater than or equal to 0")),
        server="fake",
        file="test_completion_error.py",
    ),
    case(
        "test_negative_prompt_token_ids_flat",
        "[-1]",
        ask({"prompt": [-1], "max_tokens": 10}, refused("greater than or equal to 0")),
        server="fake",
        file="test_completion_error.py",
    ),
    case(
        "test_completion_error_non_stream",
        "an engine that fails",
        ask({"prompt": "abc", "max_tokens": 10}, {"status": 500, "error.type": "InternalServerError"}),
        server="crash",
        file="test_completion_error.py",
    ),
    *(
        VllmCase(
            f"entrypoints/openai/chat_completion/test_thinking_token_budget_validation.py::{test}",
            str(value),
            "fake",
            (post(PATH, {"prompt": "hello", "max_tokens": 2, "thinking_token_budget": value}, expected),),
        )
        for test, value, expected in (
            ("test_completion_request_rejects_invalid_thinking_token_budget", 0.6, refused("thinking_token_budget")),
            ("test_completion_request_rejects_invalid_thinking_token_budget", 3.14, refused("thinking_token_budget")),
            ("test_completion_request_rejects_invalid_thinking_token_budget", -2, refused("thinking_token_budget")),
            ("test_completion_request_accepts_minus_one_as_unlimited", -1, {"choices": size(1)}),
        )
    ),
    VllmCase(
        "entrypoints/openai/chat_completion/test_thinking_token_budget_validation.py::test_completion_request_accepts_valid_thinking_token_budget",
        "5",
        "say",
        (
            post(
                PATH, {"prompt": "[[b]] assistant:", "max_tokens": 2, "thinking_token_budget": 5}, {"choices": size(1)}
            ),
        ),
    ),
)

OFFSETS = (
    case(
        "test_stream_text_offset_matches_non_stream_with_stop_holdback",
        "a stop that never comes",
        ask({"prompt": "Hi", "max_tokens": 8, "temperature": 0.0, "logprobs": 0, "stop": ["\n\n\n\n"]}),
        ask(
            {"prompt": "Hi", "max_tokens": 8, "temperature": 0.0, "logprobs": 0, "stop": ["\n\n\n\n"]},
            {
                "choices": fits(
                    "offsets that never fall",
                    lambda choices: (lambda found: found == sorted(found) and len(found) == 8 and found[0] == 0)(
                        [
                            offset
                            for choice in choices
                            if choice.get("logprobs")
                            for offset in choice["logprobs"]["text_offset"]
                        ]
                    ),
                ),
                "texts.0": same("0.choices.0.text"),
            },
            stream=True,
        ),
        file="test_completion_text_offset.py",
    ),
    case(
        "test_completion_stream_options_and_logprobs_with_long_prompts",
        "usage, logprobs, chunks",
        ask(
            {"prompt": "What is the capital of France?" * 100, "max_tokens": 5, "temperature": 0.0, "logprobs": 5},
            {
                "chunks": fits(
                    "usage that counts up to 5 tokens",
                    lambda chunks: all(map(whole, chunks)) and rises(chunks[:-1], 5),
                ),
                "choices.*.text": longer(0),
            },
            stream=True,
            stream_options={"include_usage": True, "continuous_usage_stats": True},
        ),
        file="../test_chunked_prompt.py",
    ),
)

EMOJI = {
    "prompt": "Complete this sentence with emojis: I love coding \U0001f680",
    "max_tokens": 10,
    "temperature": 0,
    "logprobs": 1,
}
AS_IDS = {"prompt": "Say 'Hello, world! \U0001f389'", "echo": True, "temperature": 0, "max_tokens": 10, "logprobs": 1}


def tokens_agree(logs: Any) -> bool:
    tops = [next(iter(top)) for top in logs["top_logprobs"][1:]]
    return all(token.startswith("token_id:") for token in logs["tokens"]) and logs["tokens"][1:] == tops


TOKEN_IDS = (
    case(
        "test_basic_completion_with_emoji",
        "asked for",
        post("/tokenize", {"prompt": EMOJI["prompt"]}),
        ask(
            EMOJI,
            {"choices.0.prompt_token_ids": same("0.tokens"), "choices.0.token_ids": size(10)},
            return_token_ids=True,
        ),
        file="../basic/test_return_token_ids.py",
    ),
    case(
        "test_basic_completion_with_emoji",
        "not asked for",
        ask(EMOJI, {"choices.0.token_ids": GONE, "prompt_token_ids": GONE}, return_token_ids=False),
        file="../basic/test_return_token_ids.py",
    ),
    case(
        "test_comparison_with_prompt_logprobs_and_logprobs",
        "echo",
        ask(
            {
                "prompt": "Hello, world! How are you today?",
                "max_tokens": 20,
                "temperature": 0,
                "echo": True,
                "logprobs": 1,
            },
            {
                "choices.0.token_ids": NUMBERS,
                "choices.0.prompt_token_ids": NUMBERS,
                "choices.0.prompt_logprobs": longer(0),
                "choices.0": fits(
                    "the ids of all tokens",
                    lambda choice: (
                        [int(token.removeprefix("token_id:")) for token in choice["logprobs"]["tokens"]]
                        == choice["prompt_token_ids"] + choice["token_ids"]
                    ),
                ),
            },
            return_token_ids=True,
            return_tokens_as_token_ids=True,
            prompt_logprobs=1,
        ),
        file="../basic/test_return_token_ids.py",
    ),
    case(
        "test_comparison_with_prompt_logprobs_and_logprobs",
        "streamed",
        ask(
            {
                "prompt": "Tell me a short fact about Python:",
                "max_tokens": 30,
                "temperature": 0,
                "echo": False,
                "logprobs": 1,
            },
            {
                "choices.0.prompt_token_ids": longer(0),
                "choices": fits(
                    "the same ids twice",
                    lambda choices: (
                        [
                            int(token.removeprefix("token_id:"))
                            for choice in choices
                            for token in choice["logprobs"]["tokens"]
                        ]
                        == [token for choice in choices for token in choice["token_ids"]]
                    ),
                ),
            },
            stream=True,
            return_token_ids=True,
            return_tokens_as_token_ids=True,
        ),
        file="../basic/test_return_token_ids.py",
    ),
    case(
        "test_completion_return_tokens_as_token_ids_completion",
        "by the request",
        ask(
            AS_IDS,
            {"choices.0.logprobs": fits("the sampled token first", tokens_agree)},
            return_tokens_as_token_ids=True,
        ),
        file="../test_return_tokens_as_ids.py",
    ),
    case(
        "test_completion_return_tokens_as_token_ids_completion",
        "by the flag",
        ask(AS_IDS | {"prompt": "abc"}, {"choices.0.logprobs.tokens.*": contains("token_id:")}),
        server="as-ids",
        file="../test_return_tokens_as_ids.py",
    ),
)

EMBEDS = (
    case(
        "test_completions_errors_with_prompt_embeds",
        "no base64",
        ask({"prompt": None, "prompt_embeds": "invalid_base64", "max_tokens": 5, "temperature": 0.0}, refused()),
        server="embeds",
        file="test_completion_with_prompt_embeds.py",
    ),
    case(
        "test_empty_prompt_embeds",
        "a text and an empty list",
        ask({"prompt": "Hello", "prompt_embeds": [], "max_tokens": 5, "temperature": 0.0}, {"choices": size(1)}),
        server="embeds",
        file="test_completion_with_prompt_embeds.py",
    ),
    case(
        "test_prompt_logprobs_raises_error",
        "prompt_logprobs: true",
        ask(
            {"prompt": None, "prompt_embeds": "AAAA", "max_tokens": 5, "temperature": 0.0, "prompt_logprobs": True},
            refused(),
        ),
        server="embeds",
        file="test_completion_with_prompt_embeds.py",
    ),
)

ORCA = (
    VllmCase(
        "entrypoints/serve/instrumentator/test_orca_metrics.py::test_completion_with_orca_header",
        "JSON",
        "fake",
        (
            post(
                PATH,
                {"prompt": "Hello, my name is", "max_tokens": 5},
                {"headers.endpoint-load-metrics": longer(0)},
                endpoint_load_metrics_format="JSON",
            ),
        ),
    ),
    VllmCase(
        "entrypoints/serve/instrumentator/test_orca_metrics.py::test_chat_completion_with_orca_header",
        "TEXT",
        "fake",
        (
            post(
                "/v1/chat/completions",
                {"messages": [{"role": "user", "content": "what is 1+1?"}], "max_tokens": 5},
                {"headers.endpoint-load-metrics": longer(0)},
                endpoint_load_metrics_format="TEXT",
            ),
        ),
    ),
)

COMPLETIONS = (*PLAIN, *CHECKED, *OFFSETS, *TOKEN_IDS, *EMBEDS, *ORCA)
