"""Request bodies of /v1/embeddings, /classify and /pooling, and what all pooling routes share: fields and responses."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Final, Literal, TypeVar

import msgspec
import numpy as np
from pydantic import Field, WithJsonSchema

from pagoda.common.errors import RequestError
from pagoda.common.pooling_params import PoolingParams
from pagoda.server.api.chat_prompt import Conversation
from pagoda.server.api.pooling.encoding import EmbedDType, Encoding, EncodingFormat, Endianness
from pagoda.server.http.body import Int64, RequestBody, hint, split_path, unsupported
from pagoda.server.http.fields import PROMPTS_SCHEMA, check_template_kwargs, is_prompts, is_token_ids
from pagoda.server.outputs import RawPoolingOutput, ScoringRequestOutput
from pagoda.server.processing.inputs import Side, TextOptions

# Request bodies.

MAX_INPUTS: Final = 4096  # Maximum number of texts, conversations or documents per request.

_MESSAGES = {"type": "array", "items": {"type": "object"}, "minItems": 1}
CONVERSATIONS_SCHEMA: Final[dict[str, Any]] = {"anyOf": [_MESSAGES, {"type": "array", "items": _MESSAGES}]}

Messages = Annotated[list[Any], Field(min_length=1)]

ChatT = TypeVar("ChatT", bound="ConversationFields")
CompletionT = TypeVar("CompletionT", bound="InputFields")

_OBJECTS: Final = re.compile(rb"\s*\[\s*(\[\s*)?\{")


class PoolingFields(RequestBody):
    """Fields of all pooling requests."""

    model: str | None = None
    user: str | None = Field(None, description="End user, for the request log; does not affect the response.")
    truncate_prompt_tokens: Int64 | None = None
    truncation_side: Side | None = None
    request_id: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    priority: Int64 | None = 0
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = Field(
        None, description="No effect: pooling requests share no cached prefixes."
    )
    use_activation: bool | None = None

    padding: Literal["max_length", "do_not_pad"] | None = Field(
        None,
        description="max_length: append padding tokens up to --max-model-len, which the model reads like others. For "
        "models trained with texts of one length; others give worse vectors.",
    )
    mm_processor_kwargs: Any = hint(why="this version serves text only")

    @property
    def text_options(self) -> TextOptions:
        return TextOptions(
            add_special_tokens=getattr(self, "add_special_tokens", True),
            truncate_prompt_tokens=self.truncate_prompt_tokens,
            truncation_side=self.truncation_side,
        )

    def params(self, task: str | None) -> PoolingParams:
        """Return PoolingParams. `task` None: the model's default task. Raise RequestError."""
        dimensions = getattr(self, "dimensions", None)
        return PoolingParams(task=task, use_activation=self.use_activation, dimensions=dimensions)

    def in_own_names(self, error: RequestError) -> RequestError:
        return error


class EncodingFields(RequestBody):
    """Wire encoding of vectors."""

    encoding_format: EncodingFormat = "float"
    embed_dtype: EmbedDType = "float32"
    endianness: Endianness = "native"

    @property
    def encoding(self) -> Encoding:
        return Encoding(self.encoding_format, self.embed_dtype, self.endianness)


class InputFields(PoolingFields):
    """Texts or token ids."""

    input: Annotated[Any, WithJsonSchema(PROMPTS_SCHEMA)] = None
    add_special_tokens: bool = True

    @property
    def prompts(self) -> list[str | list[int]]:
        """The inputs as a list of prompts. Raise RequestError."""
        value = self.input
        if value is None:
            raise RequestError("input", "input is missing")
        if isinstance(value, str) or is_token_ids(value):
            return [value]
        if isinstance(value, list) and value:
            check_count("input", value)
            if is_prompts(value):
                return value
        raise RequestError("input", "input must be a string, a list of strings, token ids, or lists of token ids")

    def in_own_names(self, error: RequestError) -> RequestError:
        return renamed(error, "input")


class ConversationFields(PoolingFields):
    """A conversation, rendered by the chat template."""

    messages: Annotated[Messages | None, WithJsonSchema(_MESSAGES)] = None
    add_special_tokens: bool = False
    add_generation_prompt: bool = False
    continue_final_message: bool = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    media_io_kwargs: Any = hint(why="this version serves text only")

    allows_many: ClassVar[bool] = False

    @property
    def messages_field(self) -> tuple[str, list[Any] | None]:
        """Name and value of the field with the messages."""
        return "messages", self.messages

    def conversations(self) -> list[Conversation]:
        """Return the conversations: one, or several if the request allows it. Raise RequestError."""
        name, value = self.messages_field
        if not value:
            raise RequestError(name, f"{name} are missing")
        check_template_kwargs(self.chat_template_kwargs)
        many = value if self.allows_many and isinstance(value[0], list) else [value]
        check_count(name, many)
        for messages in many:
            if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
                raise RequestError(name, f"{name} must be a list of messages, each an object with role and content")
        return [self._conversation(conversation) for conversation in many]

    def _conversation(self, messages: Sequence[Mapping[str, Any]]) -> Conversation:
        return Conversation(
            messages=messages,
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=self.continue_final_message,
            add_special_tokens=self.add_special_tokens,
            template=self.chat_template,
            keywords=self.chat_template_kwargs or {},
        )

    def in_own_names(self, error: RequestError) -> RequestError:
        return renamed(error, self.messages_field[0])


class _Shape(msgspec.Struct):
    messages: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    input: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


def is_conversation(raw: bytes) -> bool:
    """Return whether a JSON body has messages, not texts or token ids."""
    try:
        shape = msgspec.json.decode(raw, type=_Shape)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return False  # The body parser reports the error.
    if shape.messages is not msgspec.UNSET:
        return True
    return shape.input is not msgspec.UNSET and _OBJECTS.match(bytes(shape.input)) is not None


def check_count(field: str, values: Sequence[Any]) -> None:
    """Raise RequestError for more than MAX_INPUTS values."""
    if len(values) > MAX_INPUTS:
        raise RequestError(field, f"{field} has {len(values)} entries; at most {MAX_INPUTS} are allowed")


def renamed(error: RequestError, prompt: str, *, indexed: bool = True) -> RequestError:
    """Return an error about a prompt with `prompt` as its field. `indexed`: prompts are the entries of that field."""
    name, path = split_path(error.field)
    if name not in ("prompt", "prompt_token_ids", "messages"):
        return error
    message = str(error)
    if path:
        message = prompt + (message.removeprefix(name) if indexed else message.removeprefix(name + path))
    return error.renamed(prompt + path if indexed else prompt, message)


Dimensions = Annotated[Int64, Field(ge=1)]


class EmbeddingCompletionRequest(InputFields, EncodingFields):
    """Texts or token ids to embed."""

    dimensions: Dimensions | None = None


class EmbeddingChatRequest(ConversationFields, EncodingFields):
    """One or several conversations to embed, in `messages` or `input`."""

    messages: Annotated[Messages | None, WithJsonSchema(CONVERSATIONS_SCHEMA)] = None
    input: Annotated[Messages | None, WithJsonSchema(CONVERSATIONS_SCHEMA)] = None
    dimensions: Dimensions | None = None

    allows_many: ClassVar[bool] = True

    @property
    def messages_field(self) -> tuple[str, list[Any] | None]:
        """Name and value of the field with the messages. Raise RequestError."""
        if self.input is None:
            return "messages", self.messages
        if self.messages is not None and self.messages != self.input:
            raise RequestError("input", "input and messages differ; set only one of them")
        return "input", self.input


class ClassificationCompletionRequest(InputFields):
    """Texts or token ids to classify."""


class ClassificationChatRequest(ConversationFields):
    """A conversation to classify."""


class PoolingCompletionRequest(InputFields, EncodingFields):
    """Texts or token ids for any pooling task of the model."""

    task: str | None = None
    dimensions: Dimensions | None = None
    data: Any = unsupported()


class PoolingChatRequest(ConversationFields, EncodingFields):
    """A conversation for any pooling task of the model."""

    task: str | None = None
    dimensions: Dimensions | None = None
    data: Any = unsupported()


# Responses, in vLLM's formats.

MAX_METADATA: Final = 400
"""Maximum number of vectors whose metadata fits into a response header (encoding format "bytes")."""


@dataclass(frozen=True, slots=True)
class PoolingMeta:
    """Fields that all responses share."""

    id: str
    created: int
    model: str
    tokens: int  # Tokens of all prompts.

    @property
    def usage(self) -> dict[str, int]:
        return {"prompt_tokens": self.tokens, "total_tokens": self.tokens}

    def listing(self, data: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return the list object with `data`."""
        return {
            "id": self.id,
            "object": "list",
            "created": self.created,
            "model": self.model,
            "data": data,
            "usage": self.usage | {"completion_tokens": 0},
        }


def vectors_response(
    meta: PoolingMeta, outputs: Sequence[RawPoolingOutput], encoding: Encoding, kind: str, key: str
) -> dict[str, Any]:
    """Return a vector per prompt. `kind`: "object" of each entry; `key`: its field with the vector."""
    return meta.listing(
        [
            {"index": index, "object": kind, key: encoding.in_json(output.outputs.data)}
            for index, output in enumerate(outputs)
        ]
    )


def check_binary(encoding: Encoding, count: int) -> None:
    """Raise RequestError if the metadata of `count` vectors does not fit into a header."""
    if encoding.format == "bytes" and count > MAX_METADATA:
        raise RequestError(
            "encoding_format", f"bytes supports at most {MAX_METADATA} vectors; use bytes_only or base64"
        )


def binary_response(
    meta: PoolingMeta, outputs: Sequence[RawPoolingOutput], encoding: Encoding
) -> tuple[bytes, dict[str, Any] | None]:
    """Return the concatenated vectors and their metadata (None for "bytes_only")."""
    chunks = [encoding.in_bytes(output.outputs.data) for output in outputs]
    if encoding.format == "bytes_only":
        return b"".join(chunks), None
    items: list[dict[str, Any]] = []
    end = 0
    for index, (chunk, output) in enumerate(zip(chunks, outputs)):
        start = end
        end = end + len(chunk)
        items.append(
            {
                "index": index,
                "embed_dtype": encoding.dtype,
                "endianness": encoding.endianness,
                "start": start,
                "end": end,
                "shape": output.outputs.data.shape,
            }
        )
    metadata = {"id": meta.id, "created": meta.created, "model": meta.model, "data": items, "usage": meta.usage}
    return b"".join(chunks), metadata


def classes_response(meta: PoolingMeta, outputs: Sequence[RawPoolingOutput], labels: Sequence[str]) -> dict[str, Any]:
    """Return the most likely label and all probabilities per prompt."""
    data = []
    for index, output in enumerate(outputs):
        probs = output.outputs.data
        best = int(np.argmax(probs))
        label = labels[best] if best < len(labels) else None
        data.append({"index": index, "label": label, "probs": probs.tolist(), "num_classes": len(probs)})
    return meta.listing(data)


def scores_response(meta: PoolingMeta, scores: Sequence[ScoringRequestOutput]) -> dict[str, Any]:
    return meta.listing(
        [{"index": index, "object": "score", "score": score.outputs.score} for index, score in enumerate(scores)]
    )


def ranking_response(
    meta: PoolingMeta, scores: Sequence[ScoringRequestOutput], documents: Sequence[Any] | None, top_n: int
) -> dict[str, Any]:
    """Return the `top_n` best documents (0: all), best first. `documents`: None to omit them from the response."""
    order = sorted(range(len(scores)), key=lambda index: -scores[index].outputs.score)
    results: list[dict[str, Any]] = []
    for index in order[: top_n or len(order)]:
        document = {} if documents is None else {"document": _document(documents[index])}
        results.append({"index": index} | document | {"relevance_score": scores[index].outputs.score})
    return {"id": meta.id, "model": meta.model, "usage": meta.usage, "results": results}


def _document(document: Any) -> dict[str, Any]:
    if isinstance(document, str):
        return {"text": document, "multi_modal": None}
    return {"text": None, "multi_modal": document["content"]}
