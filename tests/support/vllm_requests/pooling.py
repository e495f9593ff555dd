"""Requests of vLLM's tests of embeddings, classification, scores and pooling.

The fake models have vectors of 8 numbers, 3 labels and a context of 64 tokens, each a byte, and <eos> after a text.
"""

from __future__ import annotations

import base64
import json
import math
import struct
from typing import Any

from support.vllm_requests.case import (
    ABSENT,
    GIVEN,
    Expected,
    Sent,
    VllmCase,
    between,
    contains,
    fits,
    get,
    keys,
    longer,
    other,
    post,
    refused,
    same,
    size,
)

TEXT = "The best thing about it is that it supports many models"
IDS = [*TEXT.encode(), 256]
TALK = [
    {"role": "user", "content": "A cat sat."},
    {"role": "assistant", "content": "A feline."},
    {"role": "user", "content": "Stars."},
]
RENDERED = "user: A cat sat.;assistant: A feline.;user: Stars.;"
DTYPES = {"float32": ("f", 4), "float16": ("e", 2), "bfloat16": ("H", 2), "fp8_e4m3": ("B", 1), "fp8_e5m2": ("B", 1)}


def case(file: str, test: str, what: str, server: str, *sent: Sent) -> VllmCase:
    return VllmCase(f"entrypoints/pooling/{file}::{test}", what, server, sent)


def used(number: int) -> Expected:
    return {"usage.completion_tokens": 0, "usage.prompt_tokens": number, "usage.total_tokens": number}


def one(number: int, data: str = "embedding") -> Expected:
    return {"id": GIVEN, "data": size(1), f"data.0.{data}": size(8)} | used(number)


def floats(raw: bytes, dtype: str, endianness: str) -> list[float]:
    letter, width = DTYPES[dtype]
    numbers = struct.unpack(f"{'<>'[endianness == 'big']}{len(raw) // width}{letter}", raw)
    if dtype == "bfloat16":
        return [struct.unpack("<f", struct.pack("<I", number << 16))[0] for number in numbers]
    return list(numbers)


def unit(vector: Any) -> bool:
    return abs(math.sqrt(sum(number * number for number in vector)) - 1) < 0.01


EMBED = "embed/test_online.py"
FLOAT = {"encoding_format": "float"}


def close(dtype: str, endianness: str) -> Any:
    """Base64 of a vector of length 1, in types that keep two digits; of the right size in the others."""

    def holds(text: str) -> bool:
        numbers = floats(base64.b64decode(text), dtype, endianness)
        return len(numbers) == 8 and (dtype.startswith("fp8") or unit(numbers))

    return fits(f"a vector of {dtype}, {endianness}", holds)


EMBEDDINGS = (
    case(
        EMBED,
        "test_basic",
        "models and tokens",
        "embed",
        get("/v1/models", {"data.0.id": "fake"}),
        post("/tokenize", {"prompt": TEXT}, {"tokens": IDS}),
    ),
    case(
        EMBED,
        "test_completion_request",
        "a text",
        "embed",
        post("/v1/embeddings", {"input": TEXT} | FLOAT, one(len(IDS))),
    ),
    case(
        EMBED,
        "test_completion_request",
        "token ids",
        "embed",
        post("/v1/embeddings", {"input": TEXT} | FLOAT),
        post(
            "/v1/embeddings", {"input": IDS} | FLOAT, one(len(IDS)) | {"data.0.embedding": same("0.data.0.embedding")}
        ),
    ),
    *(
        case(
            EMBED,
            "test_completion_request_batched",
            what,
            "embed",
            post(
                "/v1/embeddings",
                {"input": [text] * 10} | FLOAT,
                {"data": size(10), "data.*.embedding": size(8)} | used(10 * len(IDS)),
            ),
        )
        for what, text in (("texts", TEXT), ("token ids", IDS))
    ),
    case(
        EMBED,
        "test_truncate_prompt_tokens",
        "a text",
        "embed",
        post("/v1/embeddings", {"input": [TEXT], "truncate_prompt_tokens": 10}, used(10)),
    ),
    case(
        EMBED,
        "test_truncate_prompt_tokens",
        "token ids",
        "embed",
        post("/v1/embeddings", {"input": IDS, "truncate_prompt_tokens": 10}, used(10)),
    ),
    case(
        EMBED,
        "test_truncate_prompt_tokens",
        "more than the context",
        "embed",
        post("/v1/embeddings", {"input": [TEXT], "truncate_prompt_tokens": 8193}, refused("truncate_prompt_tokens")),
    ),
    case(
        EMBED,
        "test_chat_request",
        "as the text that the template makes",
        "embed",
        post("/v1/embeddings", {"messages": TALK} | FLOAT, {"id": GIVEN}),
        post(
            "/v1/embeddings",
            {"input": RENDERED, "add_special_tokens": False} | FLOAT,
            {
                "data.0.embedding": same("0.data.0.embedding"),
                "usage": same("0.usage"),
                "object": same("0.object"),
                "model": same("0.model"),
            },
        ),
    ),
    *(
        case(
            EMBED,
            "test_chat_request",
            what,
            "embed",
            post(
                "/v1/embeddings",
                {"messages": TALK} | more,
                {"object": "list", "data": size(1), "model": "fake", "usage.prompt_tokens": number},
            ),
        )
        for what, more, number in (
            ("add_generation_prompt", {"add_generation_prompt": True}, len(RENDERED)),
            ("continue_final_message", {"continue_final_message": True}, len(RENDERED) - 1),
            ("add_special_tokens", {"add_special_tokens": True}, len(RENDERED) + 1),
        )
    ),
    case(
        EMBED,
        "test_chat_request",
        "both",
        "embed",
        post(
            "/v1/embeddings",
            {"messages": TALK, "continue_final_message": True, "add_generation_prompt": True},
            refused("continue_final_message", "add_generation_prompt"),
        ),
    ),
    case(
        EMBED,
        "test_invocations_completion_request",
        "as the embedding",
        "embed",
        post("/v1/embeddings", {"input": TEXT} | FLOAT),
        post(
            "/invocations",
            {"input": TEXT} | FLOAT,
            {"data": same("0.data"), "": keys("id", "object", "created", "model", "data", "usage")},
        ),
    ),
    case(
        EMBED,
        "test_invocations_chat_request",
        "as the embedding",
        "embed",
        post("/v1/embeddings", {"messages": TALK} | FLOAT),
        post("/invocations", {"messages": TALK} | FLOAT, {"data": same("0.data")}),
    ),
    case(
        EMBED,
        "test_base64_embedding",
        "base64",
        "embed",
        post(
            "/v1/embeddings",
            {"input": ["Hello", TEXT], "encoding_format": "base64"},
            {"data.*.embedding": close("float32", "little")},
        ),
    ),
    *(
        case(
            EMBED,
            "test_base64_embed_dtype_and_endianness",
            f"{dtype}, {endianness}",
            "embed",
            post(
                "/v1/embeddings",
                {"input": [TEXT] * 3, "encoding_format": "base64", "embed_dtype": dtype, "endianness": endianness},
                {"data": size(3), "data.*.embedding": close(dtype, endianness)},
            ),
        )
        for dtype in DTYPES
        for endianness in ("native", "big", "little")
    ),
    *(
        case(
            EMBED,
            "test_bytes_embed_dtype_and_endianness",
            f"{dtype}, {endianness}",
            "embed",
            post(
                "/v1/embeddings",
                {"input": [TEXT] * 3, "encoding_format": "bytes", "embed_dtype": dtype, "endianness": endianness},
                {
                    "headers.metadata": fits(
                        "three vectors",
                        lambda text, d=dtype, e=endianness: all(
                            item["embed_dtype"] == d
                            and item["endianness"] == e
                            and item["shape"] == [8]
                            and item["end"] - item["start"] == 8 * DTYPES[d][1]
                            for item in json.loads(text)["data"]
                        ),
                    )
                },
            ),
        )
        for dtype in DTYPES
        for endianness in ("native", "big", "little")
    ),
    case(
        EMBED,
        "test_bytes_only_embed_dtype_and_endianness",
        "float32",
        "embed",
        post(
            "/v1/embeddings",
            {"input": [TEXT] * 2, "encoding_format": "bytes_only", "embed_dtype": "float32", "endianness": "big"},
            {"headers.metadata": ABSENT, "headers.content-length": str(2 * 8 * 4)},
        ),
    ),
    *(
        case(
            file,
            "test_params_not_supported",
            name,
            "embed",
            post(
                path,
                {"input": TEXT, "encoding_format": "base64"} | {name: f"bad_{name}"},
                refused("literal_error", f"bad_{name}"),
            ),
        )
        for file, path in ((EMBED, "/v1/embeddings"), ("pooling/test_online.py", "/pooling"))
        for name in ("encoding_format", "embed_dtype", "endianness")
    ),
    case(
        EMBED,
        "test_use_activation",
        "null, true, false",
        "embed",
        post(
            "/v1/embeddings",
            {"input": TEXT, "use_activation": None} | FLOAT,
            {"data.0.embedding": fits("of length 1", unit)},
        ),
        post(
            "/v1/embeddings",
            {"input": TEXT, "use_activation": True} | FLOAT,
            {"data.0.embedding": same("0.data.0.embedding")},
        ),
        post(
            "/v1/embeddings",
            {"input": TEXT, "use_activation": False} | FLOAT,
            {"data.0.embedding": other("0.data.0.embedding")},
        ),
    ),
    case(
        EMBED,
        "test_pooling_embed",
        "embed",
        "matryoshka",
        post("/pooling", {"input": TEXT, "task": "embed"} | FLOAT, {"data": size(1), "data.0.data": size(8)}),
    ),
    case(
        EMBED,
        "test_pooling_token_embed",
        "token_embed",
        "matryoshka",
        post(
            "/pooling",
            {"input": TEXT, "task": "token_embed"} | FLOAT,
            {"data": size(1), "data.0.data": size(len(IDS)), "data.0.data.*": size(8)},
        ),
    ),
    case(
        "embed/test_online_dimensions.py",
        "test_matryoshka",
        "4 of 8",
        "matryoshka",
        post(
            "/v1/embeddings",
            {"input": [TEXT] * 3, "dimensions": 4} | FLOAT,
            {"data": size(3), "data.*.embedding": size(4)},
        ),
    ),
    case(
        "embed/test_online_dimensions.py",
        "test_matryoshka",
        "null",
        "matryoshka",
        post(
            "/v1/embeddings",
            {"input": [TEXT] * 3, "dimensions": None} | FLOAT,
            {"data": size(3), "data.*.embedding": size(8)},
        ),
    ),
    *(
        case(
            "embed/test_online_dimensions.py",
            "test_matryoshka",
            f"{number}, {server}",
            server,
            post("/v1/embeddings", {"input": TEXT, "dimensions": number} | FLOAT, {"status": 400}),
        )
        for server, number in (("matryoshka", -1), ("embed", -1), ("embed", 16))
    ),
    case(
        "test_cache_salt_validation.py",
        "test_pooling_rejects_empty_cache_salt",
        "empty",
        "embed",
        post("/v1/embeddings", {"input": "hello", "cache_salt": ""}, {"status": 400}),
    ),
    case(
        "test_cache_salt_validation.py",
        "test_pooling_accepts_a_real_cache_salt",
        "a salt",
        "embed",
        post("/v1/embeddings", {"input": "hello", "cache_salt": "tenant-a"}),
    ),
    case(
        "test_cache_salt_validation.py",
        "test_pooling_matches_completions_on_empty_cache_salt",
        "empty",
        "fake",
        post("/v1/completions", {"prompt": "hello", "cache_salt": ""}, {"status": 400}),
    ),
    case(
        "basic/test_truncation.py",
        "test_smaller_truncation_size",
        "10",
        "embed",
        post("/v1/embeddings", {"input": TEXT * 3, "truncate_prompt_tokens": 10}, {"usage.prompt_tokens": 10}),
    ),
    case(
        "basic/test_truncation.py",
        "test_bigger_truncation_size",
        "65 of 64",
        "embed",
        post(
            "/v1/embeddings",
            {"input": TEXT * 3, "truncate_prompt_tokens": 65},
            {
                "status": 400,
                "error.type": "BadRequestError",
                "error.message": contains(
                    "truncate_prompt_tokens value is greater than max_model_len",
                    "Please request a smaller truncation size.",
                ),
            },
        ),
    ),
    case(
        "basic/test_truncation.py",
        "test_max_truncation_size",
        "-1",
        "embed",
        post("/v1/embeddings", {"input": TEXT * 3, "truncate_prompt_tokens": -1}, {"usage.prompt_tokens": 64}),
    ),
)

POOL = "pooling/test_online.py"
POOLED = (
    case(
        POOL,
        "test_completion_request",
        "a text",
        "tokens",
        post("/pooling", {"input": TEXT} | FLOAT, {"data.0.data": size(len(IDS))} | used(len(IDS))),
    ),
    case(
        POOL,
        "test_completion_request",
        "token ids",
        "tokens",
        post("/pooling", {"input": IDS} | FLOAT, {"data.0.data": size(len(IDS))} | used(len(IDS))),
    ),
    case(
        POOL,
        "test_completion_request_batched",
        "texts",
        "tokens",
        post("/pooling", {"input": [TEXT] * 10} | FLOAT, {"data": size(10)} | used(10 * len(IDS))),
    ),
    case(
        POOL,
        "test_conversation_pooling",
        "as the text that the template makes",
        "matryoshka",
        post("/pooling", {"messages": TALK} | FLOAT),
        post(
            "/pooling",
            {"input": RENDERED, "add_special_tokens": False} | FLOAT,
            {"data": same("0.data"), "usage": same("0.usage")},
        ),
    ),
    case(
        POOL,
        "test_batch_base64_pooling",
        "base64 and the default",
        "tokens",
        post(
            "/pooling",
            {"input": ["Hello", TEXT], "encoding_format": "base64"},
            {"data.0.data": fits("six vectors", lambda text: len(base64.b64decode(text)) == 6 * 8 * 4)},
        ),
        post("/pooling", {"input": ["Hello", TEXT]}, {"data.0.data": size(6)}),
    ),
    *(
        case(
            POOL,
            f"test_{kind}_embed_dtype_and_endianness",
            f"{dtype}, big",
            "tokens",
            post(
                "/pooling",
                {"input": [TEXT] * 3, "encoding_format": kind, "embed_dtype": dtype, "endianness": "big"},
                {"headers.content-length": str(3 * len(IDS) * 8 * DTYPES[dtype][1])},
            ),
        )
        for kind in ("bytes", "bytes_only")
        for dtype in DTYPES
    ),
    case(
        POOL,
        "test_invocations",
        "as the pooling",
        "tokens",
        post("/pooling", {"input": TEXT, "task": "token_embed"} | FLOAT),
        post(
            "/invocations", {"input": TEXT, "task": "token_embed"} | FLOAT, {"data.0": keys("index", "object", "data")}
        ),
    ),
)

COHERE = "embed/test_cohere_online.py"
LONG = "word " * 60


def cohere(test: str, what: str, body: Any, expected: Expected, server: str = "embed") -> VllmCase:
    return case(COHERE, test, what, server, post("/v2/embed", body, expected))


FLOATS = {"embedding_types": ["float"]}
COHERES = (
    cohere(
        "test_basic_embed",
        "a text",
        {"texts": ["hello world"]} | FLOATS,
        {"embeddings.float": size(1), "embeddings.float.0": longer(0)},
    ),
    cohere(
        "test_unsupported_input_type_rejected",
        "an unknown type",
        {"texts": ["hello world"], "input_type": "nonexistent_type"} | FLOATS,
        refused("Unsupported input_type"),
        "matryoshka",
    ),
    cohere(
        "test_omitted_input_type_accepted",
        "no type",
        {"texts": ["hello world"]} | FLOATS,
        {"embeddings.float": size(1)},
        "matryoshka",
    ),
    case(
        COHERE,
        "test_v1_v2_parity",
        "a text",
        "embed",
        post("/v1/embeddings", {"input": "hello world"} | FLOAT),
        post("/v2/embed", {"texts": ["hello world"]} | FLOATS, {"embeddings.float.0": same("0.data.0.embedding")}),
    ),
    cohere(
        "test_embedding_types",
        "bits",
        {"texts": ["test"], "embedding_types": ["float", "binary", "ubinary"]},
        {"embeddings.float.0": size(8), "embeddings.binary.0": size(1), "embeddings.ubinary.0": size(1)},
    ),
    cohere(
        "test_response_structure",
        "keys",
        {"texts": ["test"]} | FLOATS,
        {"id": GIVEN, "texts": ["test"], "meta.api_version.version": "2", "meta.tokens.input_tokens": between(1, 10)},
    ),
    cohere(
        "test_batch",
        "three texts",
        {"texts": ["apple", "banana", "cherry"]} | FLOATS,
        {"embeddings.float": size(3), "embeddings.float.*": size(8)},
    ),
    cohere(
        "test_l2_normalized",
        "a text",
        {"texts": ["hello world"]} | FLOATS,
        {"embeddings.float.0": fits("of length 1", unit)},
    ),
    cohere("test_missing_input_returns_error", "nothing", {}, {"status": 400}),
    cohere(
        "test_base64_embedding_type",
        "base64",
        {"texts": ["test"], "embedding_types": ["float", "base64"]},
        {
            "embeddings": fits(
                "the same numbers",
                lambda found: all(
                    abs(one - two) < 1e-5
                    for one, two in zip(
                        found["float"][0], floats(base64.b64decode(found["base64"][0]), "float32", "little")
                    )
                ),
            )
        },
    ),
    cohere(
        "test_truncate_end_succeeds",
        "END",
        {"texts": [LONG], "truncate": "END"} | FLOATS,
        {"embeddings.float": size(1)},
    ),
    cohere(
        "test_truncate_start_succeeds",
        "START",
        {"texts": [LONG], "truncate": "START"} | FLOATS,
        {"embeddings.float": size(1)},
    ),
    cohere(
        "test_truncate_none_rejects_long_input", "NONE", {"texts": [LONG], "truncate": "NONE"} | FLOATS, {"status": 400}
    ),
    case(
        COHERE,
        "test_truncate_start_vs_end_differ",
        "both",
        "embed",
        post("/v2/embed", {"texts": ["a" * 64 + "b" * 64], "truncate": "END"} | FLOATS),
        post(
            "/v2/embed",
            {"texts": ["a" * 64 + "b" * 64], "truncate": "START"} | FLOATS,
            {"embeddings.float.0": other("0.embeddings.float.0")},
        ),
    ),
)

POOLING = (*EMBEDDINGS, *POOLED, *COHERES)
