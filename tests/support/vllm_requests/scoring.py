"""Requests of vLLM's tests of classes, scores and ranking."""

from __future__ import annotations

from support.vllm_requests.case import (
    GIVEN,
    Expected,
    VllmCase,
    between,
    fits,
    get,
    other,
    post,
    refused,
    same,
    size,
    starts,
)
from support.vllm_requests.pooling import EMBED, FLOAT, IDS, RENDERED, TALK, TEXT, case

CLASS = "classify/test_online.py"
LABELS = ("bad", "so so", "good")
LABELLED: Expected = {
    "data.*.label": fits("a label", lambda label: label in LABELS),
    "data.*": fits("a number for each class", lambda item: len(item["probs"]) == item["num_classes"] == 3),
}

CLASSES = (
    case(
        CLASS,
        "test_basic",
        "models and tokens",
        "classify",
        get("/v1/models", {"data.0.id": "fake"}),
        post("/tokenize", {"prompt": TEXT}, {"tokens": IDS}),
    ),
    *(
        case(
            CLASS,
            "test_completion_request",
            what,
            "classify",
            post("/classify", {"input": text}, {"object": "list", "model": "fake", "data": size(1)} | LABELLED),
        )
        for what, text in (("a text", TEXT), ("token ids", IDS))
    ),
    *(
        case(
            CLASS,
            "test_completion_request_batched",
            what,
            "classify",
            post("/classify", {"input": [text] * 10}, {"data": size(10), "data.9.index": 9} | LABELLED),
        )
        for what, text in (("texts", TEXT), ("token ids", IDS))
    ),
    case(
        CLASS,
        "test_empty_input_error",
        "an empty text",
        "classify",
        post("/classify", {"input": "", "add_special_tokens": False}, {"status": 400, "error": GIVEN}),
    ),
    case(
        CLASS,
        "test_empty_input_error",
        "an empty list",
        "classify",
        post("/classify", {"input": []}, {"status": 400, "error": GIVEN}),
    ),
    case(
        CLASS,
        "test_truncate_prompt_tokens",
        "5",
        "classify",
        post(
            "/classify",
            {"input": "hello " * 60, "truncate_prompt_tokens": 5},
            {"data": size(1), "usage.prompt_tokens": 5, "usage.total_tokens": 5},
        ),
    ),
    case(
        CLASS,
        "test_truncate_prompt_tokens",
        "65 of 64",
        "classify",
        post("/classify", {"input": "test", "truncate_prompt_tokens": 65}, refused("truncate_prompt_tokens")),
    ),
    *(
        case(
            CLASS,
            "test_add_special_tokens",
            str(special),
            "classify",
            post(
                "/classify",
                {"input": TEXT, "add_special_tokens": special},
                {"usage.prompt_tokens": len(TEXT) + special},
            ),
        )
        for special in (False, True)
    ),
    *(
        case(
            CLASS,
            "test_chat_request",
            what,
            "classify",
            post(
                "/classify",
                {"messages": TALK} | more,
                {"object": "list", "model": "fake", "data": size(1), "usage.prompt_tokens": number} | LABELLED,
            ),
        )
        for what, more, number in (
            ("plain", {}, len(RENDERED)),
            ("add_generation_prompt", {"add_generation_prompt": True}, len(RENDERED)),
            ("continue_final_message", {"continue_final_message": True}, len(RENDERED) - 1),
            ("add_special_tokens", {"add_special_tokens": True}, len(RENDERED) + 1),
        )
    ),
    case(
        CLASS,
        "test_chat_request",
        "both",
        "classify",
        post(
            "/classify",
            {"messages": TALK, "continue_final_message": True, "add_generation_prompt": True},
            refused("continue_final_message", "add_generation_prompt"),
        ),
    ),
    case(
        CLASS,
        "test_invocations_completion_request",
        "as the class",
        "classify",
        post("/classify", {"input": TEXT}),
        post("/invocations", {"input": TEXT}, {"data": same("0.data")}),
    ),
    case(
        CLASS,
        "test_invocations_chat_request",
        "as the class",
        "classify",
        post("/classify", {"messages": TALK}),
        post("/invocations", {"messages": TALK}, {"data": same("0.data")}),
    ),
    case(
        CLASS,
        "test_use_activation",
        "null, true, false",
        "classify",
        post(
            "/classify",
            {"input": TEXT, "use_activation": None},
            {"data.0.probs": fits("a sum of 1", lambda probs: abs(sum(probs) - 1) < 1e-3)},
        ),
        post("/classify", {"input": TEXT, "use_activation": True}, {"data.0.probs": same("0.data.0.probs")}),
        post("/classify", {"input": TEXT, "use_activation": False}, {"data.0.probs": other("0.data.0.probs")}),
    ),
    case(
        CLASS,
        "test_score",
        "three labels",
        "classify",
        post("/score", {"queries": "ping", "documents": "pong"}, {"detail": "Not Found", "status": 404}),
    ),
    case(
        CLASS,
        "test_rerank",
        "three labels",
        "classify",
        post("/rerank", {"query": "ping", "documents": ["pong"]}, {"detail": "Not Found", "status": 404}),
    ),
    case(
        CLASS,
        "test_pooling_classify",
        "classify",
        "classify",
        post("/pooling", {"input": TEXT, "task": "classify"} | FLOAT, {"data": size(1), "data.0.data": size(3)}),
    ),
)

UNSUPPORTED = tuple(
    case(
        file,
        "test_pooling_not_supported",
        task,
        server,
        post(
            "/pooling",
            {"input": "test", "task": task} | FLOAT,
            {"status": 400, "error.type": "BadRequestError", "error.message": starts(message)},
        ),
    )
    for file, server, rows in (
        (
            CLASS,
            "whole",
            (
                ("embed", "Unsupported task: 'embed'"),
                ("token_embed", "Unsupported task: 'token_embed'"),
                ("token_classify", "Try switching the model's pooling_task via"),
                ("plugin", "No IOProcessor plugin installed."),
            ),
        ),
        (
            EMBED,
            "embed",
            (
                ("classify", "Unsupported task: 'classify'"),
                ("token_classify", "Unsupported task: 'token_classify'"),
            ),
        ),
        (
            "token_embed/test_online.py",
            "tokens",
            (
                ("embed", "Unsupported task: 'embed'"),
                ("classify", "Unsupported task: 'classify'"),
                ("token_classify", "Unsupported task: 'token_classify'"),
            ),
        ),
    )
    for task, message in rows
)

QUERIES = ["What is France?", "What is Germany?"]
DOCUMENTS = ["France is Paris.", "It is Berlin."]
PAIRS = (
    ("queries", "documents"),
    ("queries", "items"),
    ("text_1", "text_2"),
    ("data_1", "data_2"),
)
RERANK = {"query": "ab", "documents": ["xyz", "abab", "a"]}
ORDERED: Expected = {
    "id": GIVEN,
    "results.0.index": 1,
    "results": fits(
        "three falling scores",
        lambda results: (
            len(results) == 3
            and (
                [one["relevance_score"] for one in results]
                == sorted((one["relevance_score"] for one in results), reverse=True)
            )
        ),
    ),
}


def scoring(file: str, server: str) -> tuple[VllmCase, ...]:
    path = f"scoring/{file}"
    return (
        case(
            path,
            "test_score_api_queries_str_1_documents_str_1",
            "1 and 1",
            server,
            post(
                "/score",
                {"queries": QUERIES[0], "documents": DOCUMENTS[0]},
                {"id": GIVEN, "data": size(1), "data.0.score": between(-100, 100)},
            ),
        ),
        case(
            path,
            "test_score_api_queries_str_1_documents_str_n",
            "1 and 2",
            server,
            post("/score", {"queries": QUERIES[0], "documents": DOCUMENTS}, {"data": size(2), "data.1.index": 1}),
        ),
        case(
            path,
            "test_score_api_queries_str_n_documents_str_n",
            "2 and 2",
            server,
            post("/score", {"queries": QUERIES, "documents": DOCUMENTS}, {"data": size(2), "data.1.index": 1}),
        ),
        *(
            case(
                path,
                f"test_score_api_{first}_vs_{second}",
                "2 and 2",
                server,
                post("/score", {"queries": QUERIES, "documents": DOCUMENTS}),
                post("/score", {first: QUERIES, second: DOCUMENTS}, {"data": same("0.data")}),
            )
            for first, second in PAIRS
        ),
        case(path, "test_rerank_api_texts", "three", server, post("/rerank", RERANK, ORDERED)),
        case(
            path,
            "test_rerank_api_top_n",
            "two of three",
            server,
            post("/rerank", RERANK | {"top_n": 2}, {"results": size(2), "results.0.index": 1}),
        ),
        case(
            path,
            "test_rerank_api_max_model_len",
            "a long query",
            server,
            post(
                "/rerank",
                RERANK | {"query": "What is France?" * 100},
                refused("Please reduce the length of the input prompt"),
            ),
        ),
        case(
            path,
            "test_score_api_max_model_len",
            "a long query",
            server,
            post(
                "/score",
                {"queries": "What is France?" * 20, "documents": DOCUMENTS},
                refused("Please reduce the length of the input prompt"),
            ),
        ),
        case(
            path,
            "test_score_api_max_model_len",
            "too large a truncation",
            server,
            post(
                "/score",
                {"queries": "What is France?" * 20, "documents": DOCUMENTS, "truncate_prompt_tokens": 65},
                refused("Please request a smaller truncation size."),
            ),
        ),
        case(
            path,
            "test_invocations",
            "as the ranking",
            server,
            post("/rerank", RERANK),
            post("/invocations", RERANK, {"results": same("0.results")}),
        ),
    )


SCORES = (
    *scoring("test_cross_encoder_online.py", "cross"),
    *scoring("test_bi_encoder_online.py", "embed"),
    case(
        "scoring/test_cross_encoder_online.py",
        "test_use_activation",
        "null, true, false",
        "cross",
        post("/rerank", RERANK | {"use_activation": None}),
        post("/rerank", RERANK | {"use_activation": True}, {"results": same("0.results")}),
        post(
            "/rerank",
            RERANK | {"use_activation": False},
            {"results.0.relevance_score": other("0.results.0.relevance_score")},
        ),
    ),
    case(
        "scoring/test_cross_encoder_online.py",
        "test_pooling_classify",
        "classify",
        "cross",
        post("/pooling", {"input": TEXT, "task": "classify"} | FLOAT, {"data": size(1)}),
    ),
    case(
        "scoring/test_cross_encoder_online.py",
        "test_pooling_token_classify",
        "token_classify",
        "cross",
        post(
            "/pooling",
            {"input": TEXT, "task": "token_classify"} | FLOAT,
            {"data": size(1), "data.0.data": size(len(IDS))},
        ),
    ),
    case(
        "scoring/test_cross_encoder_online.py",
        "test_rerank_max_tokens_per_doc",
        "10",
        "cross",
        post(
            "/rerank",
            {"query": "France?", "documents": ["France is Paris. " * 9, "x"], "max_tokens_per_doc": 10},
            {"id": GIVEN, "results": size(2), "usage.prompt_tokens": between(1, 100)},
        ),
    ),
    case(
        "scoring/test_cross_encoder_online.py",
        "test_rerank_max_tokens_per_doc_reduces_tokens",
        "10",
        "cross",
        post("/rerank", {"query": "France?", "documents": ["France is Paris. " * 3], "truncate_prompt_tokens": 60}),
        post(
            "/rerank",
            {"query": "France?", "documents": ["France is Paris. " * 3], "max_tokens_per_doc": 10},
            {"usage.prompt_tokens": between(1, 30)},
        ),
    ),
    case(
        "scoring/test_late_interaction_online.py",
        "test_score_api_queries_str_1_documents_str_1",
        "1 and 1",
        "tokens",
        post(
            "/score",
            {"queries": QUERIES[0], "documents": DOCUMENTS[0]},
            {"data": size(1), "data.0.score": between(-100, 100)},
        ),
    ),
    case(
        "scoring/test_late_interaction_online.py",
        "test_score_api_queries_str_n_documents_str_n",
        "2 and 2",
        "tokens",
        post("/score", {"queries": QUERIES, "documents": DOCUMENTS}, {"data": size(2)}),
    ),
    case(
        "scoring/test_late_interaction_online.py",
        "test_rerank_api_texts",
        "three",
        "tokens",
        post("/rerank", RERANK, {"results": size(3)}),
    ),
    case(
        "scoring/test_late_interaction_online.py",
        "test_rerank_api_top_n",
        "two of three",
        "tokens",
        post("/rerank", RERANK | {"top_n": 2}, {"results": size(2)}),
    ),
    case(
        "scoring/test_late_interaction_online.py",
        "test_token_embed",
        "token_embed",
        "tokens",
        post(
            "/pooling",
            {"input": "France?", "task": "token_embed"},
            {"data": size(1), "data.0.data": size(8), "data.0.data.*": size(8)},
        ),
    ),
    case(
        "scoring/test_late_interaction_online.py",
        "test_embed_not_supported",
        "embed",
        "tokens",
        post(
            "/pooling",
            {"input": "France?", "task": "embed"},
            {"status": 400, "error.type": "BadRequestError", "error.message": starts("Unsupported task: 'embed'")},
        ),
    ),
)

SCORING = (*CLASSES, *UNSUPPORTED, *SCORES)
