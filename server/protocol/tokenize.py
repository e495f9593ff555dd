"""Bodies and answers of POST /tokenize and /detokenize."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from pydantic import Field

from pagoda.common.errors import RequestError
from pagoda.common.text.template_keywords import fault_of_keywords
from pagoda.common.text.tokenizer import Tokenizer
from pagoda.server.conversation.conversation import Conversation
from pagoda.server.protocol.base import Body, Ignored, Int64, hint
from pagoda.server.protocol.chat import check_messages, ignored_of_tools, offered_tools

MAX_TOKENS = 1 << 20


class TokenizeCompletionRequest(Body):
    """A text to tokenise."""

    model: str | None = None
    prompt: str
    add_special_tokens: bool | None = True
    return_token_strs: bool | None = False


class TokenizeChatRequest(Body):
    """A conversation to render and tokenise."""

    model: str | None = None
    messages: list[dict[str, Any]] = Field(min_length=1)
    add_generation_prompt: bool | None = True
    return_token_strs: bool | None = False
    continue_final_message: bool | None = False
    add_special_tokens: bool | None = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    media_io_kwargs: Any = hint(why="this version serves text only")
    mm_processor_kwargs: Any = hint(why="this version serves text only")

    def ignored(self, path: str = "") -> Iterator[Ignored]:
        """Yield the parts that have no effect, tools and fields of tools among them."""
        yield from super().ignored(path)
        yield from ignored_of_tools(self.tools or ())

    def conversation(self) -> Conversation:
        """What is to be rendered. Raises RequestError."""
        opens = self.add_generation_prompt is not False
        if self.continue_final_message and opens and "add_generation_prompt" in self.model_fields_set:
            raise RequestError("continue_final_message", "it excludes add_generation_prompt; set only one of them")
        fault = fault_of_keywords(self.chat_template_kwargs or {})
        if fault:
            raise RequestError("chat_template_kwargs", f"chat_template_kwargs {fault}")
        check_messages("messages", self.messages)
        return Conversation(
            messages=self.messages,
            tools=offered_tools(self.tools or ()),
            add_generation_prompt=opens and not self.continue_final_message,
            continue_final_message=bool(self.continue_final_message),
            add_special_tokens=bool(self.add_special_tokens),
            template=self.chat_template,
            keywords=self.chat_template_kwargs or {},
        )


class DetokenizeRequest(Body):
    """Token ids to spell."""

    model: str | None = None
    tokens: list[Int64] = Field(max_length=MAX_TOKENS)


def tokenized(ids: Sequence[int], max_model_len: int, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """The answer of /tokenize. `tokenizer`: names the tokens one by one; None: they are not asked for."""
    return {
        "count": len(ids),
        "max_model_len": max_model_len,
        "tokens": list(ids),
        "token_strs": None if tokenizer is None else [tokenizer.token_name(token) for token in ids],
    }
