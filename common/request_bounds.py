"""The bounds of request fields: one row per numeric, list and text field of every request body and of SamplingParams.

Request bodies and SamplingParams validate by this table, and docs/reference/bounds.md is generated from it.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

INT32_MAX: Final = 2**31 - 1
INT64_MIN: Final = -(2**63)
INT64_MAX: Final = 2**63 - 1

MAX_N: Final = 16_384
MAX_IDS: Final = 1 << 20
MAX_OBJECTS_OF_LIST: Final = 16_384
MAX_NAME_CHARACTERS: Final = 4096
MAX_SALT_CHARACTERS: Final = 1024
MAX_GRAMMAR_CHARACTERS: Final = 1 << 20
MAX_TEXT_CHARACTERS: Final = 1 << 27


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """Bounds of one field's value, and of each entry if it is a list or an object. None: the type's own."""

    low: float | None = None  # Least number.
    high: float | None = None  # Greatest number.
    above: bool = False  # The bound `low` itself is refused.
    entries: int | None = None  # Maximum number of entries of a list or object.
    characters: int | None = None  # Maximum number of characters of a text.
    total: str = ""  # The bound on the cost of the field together with others.
    sampled: bool = False  # SamplingParams checks it, under the name that the field has in the request.

    @property
    def numbers(self) -> tuple[float, float]:
        """The least and the greatest number, infinite where the type's own bounds hold."""
        return -math.inf if self.low is None else self.low, math.inf if self.high is None else self.high

    @property
    def most_entries(self) -> int:
        """The most entries of a list or object; what an index can address without a bound."""
        return sys.maxsize if self.entries is None else self.entries

    @property
    def most_characters(self) -> int:
        """Likewise the most characters of a text."""
        return sys.maxsize if self.characters is None else self.characters


def _sampled(low: float | None = None, high: float | None = None, **more: bool | int | str) -> Bound:
    return Bound(low=low, high=high, sampled=True, **more)  # type: ignore[arg-type]


_SEQUENCES: Final = f"n (best_of) x prompts <= {MAX_N}; tokens of prompts x n <= --max-num-queued-tokens"
_COPIES: Final = "n x (prompt tokens + entries of lists of token ids) <= 16777216"
_CONTEXT: Final = "prompt and output fit the context length"
_NAME: Final = Bound(characters=MAX_NAME_CHARACTERS)
_TEXT: Final = Bound(characters=MAX_TEXT_CHARACTERS, total=f"{_CONTEXT}; --max-body-bytes")
_GRAMMAR: Final = Bound(characters=MAX_GRAMMAR_CHARACTERS, total="5 s of processor time to compile")
_OBJECTS: Final = Bound(entries=MAX_OBJECTS_OF_LIST, total="131072 lists, objects and keys of a body")
_INT64: Final = Bound(low=INT64_MIN, high=INT64_MAX)
_COUNT: Final = Bound(low=1, high=INT32_MAX)
_LOGPROBS: Final = _sampled(-1, INT32_MAX, total="--max-logprobs")
_OUTPUT: Final = _sampled(-1, INT32_MAX, total=_CONTEXT)
_IDS: Final = _sampled(0, INT32_MAX, entries=MAX_IDS, total=f"{_COPIES}; ids in the vocabulary")

BOUNDS: Final[Mapping[str, Bound]] = {
    # Numbers of sampling.
    "n": _sampled(1, MAX_N, total=_SEQUENCES),
    "best_of": _sampled(1, MAX_N, total=_SEQUENCES),
    "presence_penalty": _sampled(-2.0, 2.0),
    "frequency_penalty": _sampled(-2.0, 2.0),
    **dict.fromkeys(("repetition_penalty", "repeat_penalty", "rep_pen"), _sampled(0.0, float(INT32_MAX), above=True)),
    **dict.fromkeys(("typical_p", "xtc_probability", "xtc_threshold"), Bound(low=0.0, high=1.0)),
    "no_repeat_ngram_size": Bound(low=0, high=64),
    "temperature": Bound(low=0.0, high=2.0),
    "SamplingParams.temperature": _sampled(0.0, 100.0),
    "AnthropicMessagesRequest.temperature": Bound(low=0.0, high=2.0),
    "top_p": _sampled(0.0, 1.0, above=True),
    "p": _sampled(0.0, 1.0, above=True),
    "top_k": _sampled(-1, INT32_MAX),
    "k": _sampled(-1, INT32_MAX),
    "min_p": _sampled(0.0, 1.0),
    "seed": Bound(low=INT64_MIN, high=INT64_MAX),
    "SamplingParams.max_tokens": _sampled(1, INT32_MAX, total=_CONTEXT),
    **dict.fromkeys(("max_tokens", "max_completion_tokens", "max_output_tokens"), _OUTPUT),
    **dict.fromkeys(("max_new_tokens", "max_length"), Bound(low=-1, high=INT32_MAX, total=_CONTEXT)),
    "n_predict": Bound(low=-2, high=INT32_MAX, total=_CONTEXT),
    "RoutedReasoning.max_tokens": _INT64,
    "CohereEmbedRequest.max_tokens": Bound(low=1, high=INT64_MAX, total="at most the context length"),
    "AnthropicMessagesRequest.max_tokens": _sampled(1, INT32_MAX, total=_CONTEXT),
    "min_tokens": _sampled(0, INT32_MAX, total=_CONTEXT),
    **dict.fromkeys(("logprobs", "prompt_logprobs", "top_logprobs"), _LOGPROBS),
    "ResponsesRequest.top_logprobs": Bound(low=0, high=20, total="--max-logprobs"),
    "truncate_prompt_tokens": Bound(low=-1, high=INT64_MAX, total="at most the context length"),
    "SamplingParams.truncate_prompt_tokens": _sampled(-1, INT32_MAX),
    "stream_interval": Bound(low=1, high=INT64_MAX),
    "SamplingParams.stream_interval": _sampled(1, INT32_MAX),
    "thinking_token_budget": _sampled(-1, INT32_MAX),
    "max_pattern_size": Bound(low=0, high=1024),
    "min_pattern_size": Bound(low=0, high=1024),
    "min_count": Bound(low=0, high=10_000),
    "length_penalty": Bound(low=-1000.0, high=1000.0),
    # Lists of sampling.
    "logit_bias": _sampled(-100.0, 100.0, entries=MAX_IDS, total=f"{_COPIES}; ids in the vocabulary"),
    **dict.fromkeys(("stop_token_ids", "allowed_token_ids"), _IDS),
    "logprob_token_ids": _sampled(0, INT32_MAX, entries=256, total="ids in the vocabulary"),
    "label_token_ids": Bound(low=0, high=INT32_MAX, entries=256, total="ids in the vocabulary"),
    "stop": _sampled(entries=1024, characters=1024, total="--max-stop-strings"),
    "stop_sequences": _sampled(entries=1024, characters=1024, total="--max-stop-strings"),
    "bad_words": _sampled(entries=1024, characters=1024, total=_COPIES),
    # Other numbers.
    "priority": _INT64,
    "num_ctx": _INT64,
    "thinking_budget": _INT64,
    "budget_tokens": _INT64,
    "AnthropicThinking.budget_tokens": Bound(low=1, high=INT64_MAX),
    "token_budget": Bound(low=1, high=INT64_MAX),
    "max_tool_calls": Bound(low=1, high=INT64_MAX),
    "dimensions": _COUNT,
    "output_dimension": _COUNT,
    "top_n": Bound(low=0, high=INT64_MAX),
    "max_tokens_per_doc": Bound(low=0, high=INT64_MAX),
    "max_tokens_per_query": Bound(low=0, high=INT64_MAX),
    "seconds": Bound(low=3600, high=2_592_000),
    "lora_int_id": Bound(low=0, high=INT64_MAX),
    "timeout_ms": Bound(low=0.0, high=float(2**53)),
    "ttl": Bound(low=0, high=INT64_MAX, characters=MAX_NAME_CHARACTERS),
    # Lists of token ids and of texts.
    "token_ids": Bound(low=0, high=INT32_MAX, entries=1 << 21, total=_CONTEXT),
    "tokens": Bound(low=INT64_MIN, high=INT64_MAX, entries=MAX_IDS, total="ids in the vocabulary"),
    "query": Bound(
        low=INT64_MIN, high=INT64_MAX, entries=1 << 21, characters=MAX_TEXT_CHARACTERS, total="ids in the vocabulary"
    ),
    "texts": Bound(entries=65_536, characters=MAX_TEXT_CHARACTERS, total="1048576 tokens of a pooling request"),
    "prompt_embeds": Bound(entries=MAX_N, characters=MAX_TEXT_CHARACTERS, total=_SEQUENCES),
    "request_ids": Bound(entries=65_536, characters=MAX_NAME_CHARACTERS),
    "choice": Bound(entries=65_536, characters=MAX_GRAMMAR_CHARACTERS, total="5 s of processor time to compile"),
    "guided_choice": Bound(entries=65_536, characters=MAX_GRAMMAR_CHARACTERS, total="5 s of processor time to compile"),
    "triggers": Bound(entries=1024, characters=MAX_NAME_CHARACTERS),
    "include": Bound(entries=1024, characters=MAX_NAME_CHARACTERS),
    "embedding_types": Bound(entries=16),
    "command": Bound(entries=65_536, characters=MAX_TEXT_CHARACTERS, total=_CONTEXT),
    "env": Bound(entries=65_536, characters=MAX_TEXT_CHARACTERS, total=_CONTEXT),
    "metadata": Bound(entries=16, characters=512),
    "ChatCompletionRequest.metadata": Bound(entries=131_072),
    # Lists and objects of objects.
    **dict.fromkeys(
        (
            *("annotations", "content", "documents", "functions", "input", "inputs", "items", "messages", "output"),
            *("structures", "summary", "system", "tools", "TextPart.logprobs"),
        ),
        Bound(
            entries=MAX_OBJECTS_OF_LIST,
            characters=MAX_TEXT_CHARACTERS,
            total=f"131072 lists, objects and keys of a body; {_CONTEXT}",
        ),
    ),
    "BatchChatCompletionRequest.messages": Bound(entries=1024, total="131072 lists, objects and keys of a body"),
    "CreateItemsRequest.items": Bound(entries=20, total="131072 lists, objects and keys of a body"),
    "CreateConversationRequest.items": Bound(entries=20, total="131072 lists, objects and keys of a body"),
    # Constraints and templates.
    **dict.fromkeys(
        (
            *("grammar", "guided_grammar", "guided_json", "guided_regex", "guided_whitespace_pattern", "json_schema"),
            *("regex", "structural_tag", "whitespace_pattern", "definition", "chat_template"),
        ),
        _GRAMMAR,
    ),
    # Texts that the model reads, or that are stored and returned.
    **dict.fromkeys(
        (
            *("arguments", "context", "data", "description", "encrypted_content", "instruction", "instructions"),
            *("prompt", "refusal", "signature", "suffix", "text", "thinking", "title", "source"),
        ),
        _TEXT,
    ),
    # Names and ids.
    "cache_salt": Bound(characters=MAX_SALT_CHARACTERS),
    "request_id": Bound(characters=256),
    "ResponsesRequest.request_id": Bound(characters=MAX_NAME_CHARACTERS),
    "ResponsesRequest.safety_identifier": Bound(characters=64),
    "ResponsesRequest.prompt_cache_key": Bound(characters=1024),
    **dict.fromkeys(("server_url", "server_description", "reason"), Bound(characters=4096)),
    "authorization": Bound(characters=8192),
    **dict.fromkeys(("allowed_tools", "tool_names"), Bound(characters=MAX_NAME_CHARACTERS, entries=1024)),
    "approval_request_id": _NAME,
    **dict.fromkeys(
        (
            *("call_id", "completion_window", "conversation", "endpoint", "execution", "id", "input_file_id"),
            *("input_type", "lora_name", "lora_path", "media_type", "model", "name", "namespace"),
            *("previous_response_id", "prompt_cache_key", "role", "safety_identifier", "server_label"),
            "session_id",
            *("service_tier", "status", "syntax", "task", "tool_name", "tool_use_id", "type", "user", "user_id"),
            "working_directory",
        ),
        _NAME,
    ),
}
"""Field, or `Class.field` where a body has other bounds -> its bounds."""


def bound_of(owner: str, field: str) -> Bound | None:
    """Return the bounds of a field of the class `owner`; None for a field without a row."""
    return BOUNDS.get(f"{owner}.{field}") or BOUNDS.get(field)


def sampling_bound(field: str) -> Bound:
    """Return the bounds of a field of SamplingParams. Raises KeyError for a field without a row."""
    return BOUNDS.get(f"SamplingParams.{field}") or BOUNDS[field]
