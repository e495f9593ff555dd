"""The least that each request body may hold, and values that no field has by default."""

from __future__ import annotations

from typing import Any

from interface import SAME_BODY

from pagoda.server.api.app import BODIES, bodies_of

_MESSAGES = [{"role": "user", "content": "a"}]

LEAST: dict[str, dict[str, Any]] = {
    "CompletionRequest": {"prompt": "a", "max_tokens": 2},
    "ChatCompletionRequest": {"messages": _MESSAGES, "max_tokens": 2},
    "BatchChatCompletionRequest": {"messages": [_MESSAGES], "max_tokens": 2},
    "TokenizeCompletionRequest": {"prompt": "a"},
    "TokenizeChatRequest": {"messages": _MESSAGES},
    "DetokenizeRequest": {"tokens": [97]},
    "GenerativeScoringRequest": {"query": "a", "items": ["b"], "label_token_ids": [98]},
    "AbortRequest": {"request_ids": []},
    "LoadLoRAAdapterRequest": {"lora_name": "a", "lora_path": "/a"},
    "UnloadLoRAAdapterRequest": {"lora_name": "a"},
    "GenerateRequest": {"token_ids": [97], "sampling_params": {"max_tokens": 2}},
    "BatchCreateRequest": {"input_file_id": "x", "endpoint": "/v1/completions", "completion_window": "24h"},
    "ResponsesRequest": {"input": "a", "max_output_tokens": 2},
    "CreateConversationRequest": {},
    "UpdateConversationRequest": {"metadata": {}},
    "CreateItemsRequest": {"items": []},
    "AnthropicMessagesRequest": {"model": "fake", "messages": _MESSAGES, "max_tokens": 2},
    "AnthropicCountTokensRequest": {"model": "fake", "messages": _MESSAGES},
    "StreamOptions": {},
    "EmbeddingCompletionRequest": {"input": "a"},
    "EmbeddingChatRequest": {"messages": _MESSAGES},
    "EmbeddingBatchChatRequest": {"messages": [_MESSAGES]},
    "EmbeddingChatInputRequest": {"input": _MESSAGES},
    "EmbeddingBatchChatInputRequest": {"input": [_MESSAGES]},
    "ClassificationCompletionRequest": {"input": "a"},
    "ClassificationChatRequest": {"messages": _MESSAGES},
    "PoolingCompletionRequest": {"input": "a"},
    "PoolingChatRequest": {"messages": _MESSAGES},
    "CohereChatRequest": {"model": "fake", "messages": _MESSAGES, "max_tokens": 2},
    "CohereEmbedRequest": {"texts": ["a"]},
    "ScoreRequest": {"text_1": "a", "text_2": "b"},
    "ScoreDataRequest": {"data_1": "a", "data_2": "b"},
    "ScoreQueriesDocumentsRequest": {"queries": "a", "documents": "b"},
    "ScoreQueriesItemsRequest": {"queries": "a", "items": "b"},
    "ScoreTextRequest": {"text_1": "a", "text_2": "b"},
    "RerankRequest": {"query": "a", "documents": ["b"]},
}
"""Schema -> a body that is answered."""

OTHER: dict[str, Any] = {
    "mm_payload": "nope",
    "tool_choice": "auto",
    "routed_experts_prompt_start": 3,
}
"""Field -> a value that is not its default, where {"x": 1} is none."""


def path_of(schema: str) -> str:
    """Where a body is posted first."""
    name = SAME_BODY.get(schema, schema)
    return next((path for path in BODIES if name in {body.__name__ for body in bodies_of(path)}), "")
