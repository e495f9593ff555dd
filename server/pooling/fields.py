"""Request bodies of /v1/embeddings, /classify and /pooling, and the fields they share with other pooling routes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Final, TypeVar

import msgspec
from pydantic import Field, WithJsonSchema

from pagoda.common.errors import RequestError
from pagoda.common.pooling_params import PoolingParams
from pagoda.common.text.chat_template import template_kwargs_error
from pagoda.server.chat.conversation import Conversation
from pagoda.server.http.body import INT64_MAX, Int64, RequestBody, hint, unsupported
from pagoda.server.pooling.response import EmbedDType, Encoding, EncodingFormat, Endianness
from pagoda.server.processing.tokenization import Side, TextOptions

MAX_INPUTS: Final = 4096  # texts, conversations or documents per request

_IDS = {"type": "array", "items": {"type": "integer"}}
_TEXTS = {"type": "array", "items": {"type": "string"}}
_INPUT_SCHEMA: dict[str, Any] = {"anyOf": [{"type": "string"}, _TEXTS, _IDS, {"type": "array", "items": _IDS}]}
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
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=INT64_MAX)] | None = None
    truncation_side: Side | None = None
    request_id: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    priority: Int64 | None = 0
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = Field(
        None, description="No effect: pooling requests share no cached prefixes."
    )
    use_activation: bool | None = None

    padding: Any = unsupported(harmless=("do_not_pad",))
    mm_processor_kwargs: Any = hint(why="this version serves text only")

    @property
    def text_options(self) -> TextOptions:
        """Tokenization options."""
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
        """Return `error` with this request's field names."""
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

    input: Annotated[Any, WithJsonSchema(_INPUT_SCHEMA)] = None
    add_special_tokens: bool = True

    @property
    def prompts(self) -> list[str | list[int]]:
        """The inputs as a list of prompts. Raise RequestError."""
        value = self.input
        if value is None:
            raise RequestError("input", "input is missing")
        if isinstance(value, str) or _is_ids(value):
            return [value]
        if isinstance(value, list) and value:
            check_count("input", value)
            if all(isinstance(each, str) for each in value) or all(_is_ids(each) for each in value):
                return value
        raise RequestError("input", "input must be a string, a list of strings, token ids, or lists of token ids")

    def in_own_names(self, error: RequestError) -> RequestError:
        """Return `error` with this request's field names."""
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
        fault = template_kwargs_error(self.chat_template_kwargs or {})
        if fault:
            raise RequestError("chat_template_kwargs", f"chat_template_kwargs {fault}")
        many = value if self.allows_many and isinstance(value[0], list) else [value]
        check_count(name, many)
        for messages in many:
            if not isinstance(messages, list) or not all(isinstance(each, dict) for each in messages):
                raise RequestError(name, f"{name} must be a list of messages, each an object with role and content")
        return [self._conversation(each) for each in many]

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
        """Return `error` with this request's field names."""
        return renamed(error, self.messages_field[0])


class _Shape(msgspec.Struct):
    messages: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    input: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


def is_conversation(raw: bytes) -> bool:
    """Return whether a JSON body has messages, not texts or token ids."""
    try:
        shape = msgspec.json.decode(raw, type=_Shape)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return False  # the body parser reports the error
    if shape.messages is not msgspec.UNSET:
        return True
    return shape.input is not msgspec.UNSET and _OBJECTS.match(bytes(shape.input)) is not None


def check_count(field: str, values: Sequence[Any]) -> None:
    """Raise RequestError for more than MAX_INPUTS values."""
    if len(values) > MAX_INPUTS:
        raise RequestError(field, f"{field} has {len(values)} entries; at most {MAX_INPUTS} are allowed")


def renamed(error: RequestError, prompt: str) -> RequestError:
    """Return an error about a prompt with `prompt` as its field."""
    return RequestError(prompt, str(error)) if error.field in ("prompt", "prompt_token_ids", "messages") else error


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(each) is int for each in value)


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
