"""vLLM's interface of tool and reasoning parser plugins: the base classes, their registries and the messages.

Plugins import these names from vLLM's module paths, see server.vllm.modules;
`server.vllm.parser_plugins` runs them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from functools import cached_property
from importlib import import_module
from typing import Any, ClassVar, Generic, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from pagoda.common.sampling_params import StructuredOutputsParams
from pagoda.server.parsers.output_parser import new_call_id
from pagoda.server.vllm.tokenizer_view import HfTokenizer

# The messages of parsers.


class FunctionCall(BaseModel):
    """A complete call. `id`: of the call, where the model writes one."""

    id: str | None = Field(default=None, exclude=True)
    name: str
    arguments: str


class PluginToolCall(BaseModel):
    """vLLM's ToolCall: a complete call with its id."""

    id: str = Field(default_factory=new_call_id)
    type: Literal["function"] = "function"
    function: FunctionCall


class ExtractedToolCallInformation(BaseModel):
    """What a complete output contains. `content`: the text beside the calls."""

    tools_called: bool
    tool_calls: list[PluginToolCall]
    content: str | None = None


class DeltaFunctionCall(BaseModel):
    """A piece of a call: the name once, arguments to be concatenated."""

    name: str | None = None
    arguments: str | None = None


class DeltaToolCall(BaseModel):
    """A piece of call `index` of an output."""

    id: str | None = None
    type: Literal["function"] | None = None
    index: int
    function: DeltaFunctionCall | None = None


class DeltaMessage(BaseModel):
    """What a piece of an output adds. `reasoning_content` is a former name of `reasoning`."""

    role: str | None = None
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = Field(default=None, exclude=True)
    tool_calls: list[DeltaToolCall] = Field(default_factory=list)


# The request that parsers read.


class FunctionDefinition(BaseModel):
    """A function that the model may call."""

    model_config = ConfigDict(extra="allow")
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ChatCompletionToolsParam(BaseModel):
    """A tool of the request."""

    model_config = ConfigDict(extra="allow")
    type: Literal["function"] = "function"
    function: FunctionDefinition


class ChatCompletionNamedFunction(BaseModel):
    """The function that a tool choice names."""

    name: str


class ChatCompletionNamedToolChoiceParam(BaseModel):
    """A tool choice that names one function."""

    function: ChatCompletionNamedFunction
    type: Literal["function"] = "function"


def named_choice(name: str) -> ChatCompletionNamedToolChoiceParam:
    """Return the tool choice that names a function."""
    return ChatCompletionNamedToolChoiceParam(function=ChatCompletionNamedFunction(name=name))


class ParserRequest(BaseModel):
    """vLLM's ChatCompletionRequest as parsers read it; requests of other APIs are converted to it.

    Of the fields that `adjust_request` may change, `skip_special_tokens` and `structured_outputs` have an effect.
    """

    model_config = ConfigDict(extra="allow", arbitrary_types_allowed=True)
    messages: list[Any] = Field(default_factory=list)
    tools: list[ChatCompletionToolsParam] | None = None
    tool_choice: Literal["none", "auto", "required"] | ChatCompletionNamedToolChoiceParam | None = "none"
    parallel_tool_calls: bool | None = True
    reasoning_effort: str | None = None
    include_reasoning: bool = True
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[Any] | None = None
    response_format: Any = None
    structured_outputs: StructuredOutputsParams | None = None
    skip_special_tokens: bool = True
    stream: bool | None = False


# The base classes.


class ToolParser:
    """Base class of tool parsers. One is constructed per output."""

    supports_required_and_named: bool = True

    def __init__(self, tokenizer: HfTokenizer, tools: Sequence[ChatCompletionToolsParam] | None = None) -> None:
        self.model_tokenizer = tokenizer
        self.tools = list(tools or ())
        # State of streaming parsers.
        self.prev_tool_call_arr: list[dict[str, Any]] = []
        self.current_tool_id = -1
        self.current_tool_name_sent = False
        self.streamed_args_for_tool: list[str] = []

    @cached_property
    def vocab(self) -> dict[str, int]:
        """Token -> id, added tokens included."""
        return self.model_tokenizer.get_vocab()

    def adjust_request(self, request: Any) -> Any:
        """Return the request, possibly changed. Called for requests with tools that the model may call."""
        return request

    def extract_tool_calls(self, model_output: str, request: Any) -> ExtractedToolCallInformation:
        """Parse a complete output."""
        raise NotImplementedError(f"{type(self).__name__} has no extract_tool_calls")

    def extract_tool_calls_streaming(
        self,
        previous_text: str,
        current_text: str,
        delta_text: str,
        previous_token_ids: Sequence[int],
        current_token_ids: Sequence[int],
        delta_token_ids: Sequence[int],
        request: Any,
    ) -> DeltaMessage | None:
        """Parse the next piece of an output; None: nothing is certain yet."""
        raise NotImplementedError(f"{type(self).__name__} has no extract_tool_calls_streaming")

    def get_remaining_unstreamed_args(self) -> str:
        """Return the end of the last call's arguments in `prev_tool_call_arr` that was not streamed."""
        if not self.prev_tool_call_arr:
            return ""
        index = len(self.prev_tool_call_arr) - 1
        arguments = self.prev_tool_call_arr[index].get("arguments", {})
        expected = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        streamed = self.streamed_args_for_tool[index] if index < len(self.streamed_args_for_tool) else ""
        return expected[len(streamed) :] if expected.startswith(streamed) else ""


class ReasoningParser:
    """Base class of reasoning parsers. One is constructed per output."""

    def __init__(self, tokenizer: HfTokenizer, *args: Any, **kwargs: Any) -> None:
        """`kwargs`: `chat_template_kwargs` of the request."""
        self.model_tokenizer = tokenizer

    @cached_property
    def vocab(self) -> dict[str, int]:
        """Token -> id, added tokens included."""
        return self.model_tokenizer.get_vocab()

    @property
    def reasoning_start_str(self) -> str | None:
        """Text that starts the reasoning."""
        return None

    @property
    def reasoning_end_str(self) -> str | None:
        """Text that ends the reasoning."""
        return None

    def is_reasoning_end(self, input_ids: Sequence[int]) -> bool:
        """Return whether the reasoning has ended in these token ids, of a prompt or an output."""
        raise NotImplementedError(f"{type(self).__name__} has no is_reasoning_end")

    def is_reasoning_end_streaming(self, input_ids: Sequence[int], delta_ids: Iterable[int]) -> bool:
        """Return whether the reasoning ended by the last token ids `delta_ids` of an output."""
        return self.is_reasoning_end(input_ids)

    def extract_content_ids(self, input_ids: list[int]) -> list[int]:
        """Return the token ids after the reasoning."""
        raise NotImplementedError(f"{type(self).__name__} has no extract_content_ids")

    def adjust_request(self, request: Any) -> Any:
        """Return the request, possibly changed."""
        return request

    def adjust_initial_state_from_prompt(self, prompt_token_ids: Sequence[int]) -> None:
        """Read the prompt before a stream whose prompt has not ended the reasoning."""

    def extract_reasoning(self, model_output: str, request: Any) -> tuple[str | None, str | None]:
        """Return reasoning and content of a complete output. `extract_reasoning_content` is its former name."""
        former = getattr(self, "extract_reasoning_content", None)
        if former is None:
            raise NotImplementedError(f"{type(self).__name__} has no extract_reasoning")
        reasoning, content = former(model_output, request)
        return reasoning, content

    def extract_reasoning_streaming(
        self,
        previous_text: str,
        current_text: str,
        delta_text: str,
        previous_token_ids: Sequence[int],
        current_token_ids: Sequence[int],
        delta_token_ids: Sequence[int],
    ) -> DeltaMessage | None:
        """Parse the next piece of an output; None: it adds nothing."""
        former = getattr(self, "extract_reasoning_content_streaming", None)
        if former is None:
            raise NotImplementedError(f"{type(self).__name__} has no extract_reasoning_streaming")
        delta: DeltaMessage | None = former(
            previous_text, current_text, delta_text, previous_token_ids, current_token_ids, delta_token_ids
        )
        return delta


class BaseThinkingReasoningParser(ReasoningParser):
    """Base class of parsers of reasoning between two tokens. Subclasses define the two properties."""

    @property
    def start_token(self) -> str:
        """The token that starts the reasoning."""
        raise NotImplementedError(f"{type(self).__name__} has no start_token")

    @property
    def end_token(self) -> str:
        """The token that ends the reasoning."""
        raise NotImplementedError(f"{type(self).__name__} has no end_token")

    def __init__(self, tokenizer: HfTokenizer, *args: Any, **kwargs: Any) -> None:
        """Raise RuntimeError if the tokenizer lacks the tokens."""
        super().__init__(tokenizer, *args, **kwargs)
        start, end = (tokenizer.convert_tokens_to_ids(token) for token in (self.start_token, self.end_token))
        if start is None or end is None:
            raise RuntimeError(f"the tokenizer has no tokens {self.start_token!r} and {self.end_token!r}")
        self.start_token_id: int = start
        self.end_token_id: int = end

    @property
    def reasoning_start_str(self) -> str:
        return self.start_token

    @property
    def reasoning_end_str(self) -> str:
        return self.end_token

    def is_reasoning_end(self, input_ids: Sequence[int]) -> bool:
        last = next((id for id in reversed(input_ids) if id in (self.start_token_id, self.end_token_id)), None)
        return last == self.end_token_id

    def is_reasoning_end_streaming(self, input_ids: Sequence[int], delta_ids: Iterable[int]) -> bool:
        return self.end_token_id in delta_ids

    def extract_content_ids(self, input_ids: list[int]) -> list[int]:
        ended = self.end_token_id in input_ids
        return input_ids[input_ids.index(self.end_token_id) + 1 :] if ended else []

    def count_reasoning_tokens(self, token_ids: Sequence[int]) -> int:
        """Return the number of tokens between start and end tokens."""
        count = depth = 0
        for id in token_ids:
            if id == self.start_token_id:
                depth += 1
            elif id == self.end_token_id:
                depth = max(0, depth - 1)
            elif depth:
                count += 1
        return count

    def extract_reasoning(self, model_output: str, request: Any) -> tuple[str | None, str | None]:
        before, start, after = model_output.partition(self.start_token)
        reasoning, _, content = (after if start else before).partition(self.end_token)
        return reasoning, content or None

    def extract_reasoning_streaming(
        self,
        previous_text: str,
        current_text: str,
        delta_text: str,
        previous_token_ids: Sequence[int],
        current_token_ids: Sequence[int],
        delta_token_ids: Sequence[int],
    ) -> DeltaMessage | None:
        if not delta_text or delta_text in (self.start_token, self.end_token):
            return None
        started = self.start_token_id in current_token_ids or self._starts_inside()
        if not started or self.end_token_id in previous_token_ids:
            return DeltaMessage(content=delta_text)
        before, start, after = delta_text.partition(self.start_token)
        reasoning, _, content = (after if start else before).partition(self.end_token)
        return DeltaMessage(reasoning=reasoning or None, content=content or None)

    def _starts_inside(self) -> bool:
        """Return whether an output without a start token begins with reasoning."""
        return False


class DeepSeekR1ReasoningParser(BaseThinkingReasoningParser):
    """Reasoning between <think> and </think>, of which the prompt or the output has the first."""

    @property
    def start_token(self) -> str:
        return "<think>"

    @property
    def end_token(self) -> str:
        return "</think>"

    def _starts_inside(self) -> bool:
        return True


# The registries.

ParserT = TypeVar("ParserT", bound=ToolParser | ReasoningParser)


class ParserClasses(Generic[ParserT]):
    """Parser classes by name. Registered in the process that imports the plugin."""

    def __init__(self, base: type[ParserT]) -> None:
        self._base = base
        self._classes: dict[str, type[ParserT]] = {}
        self._lazy: dict[str, tuple[str, str]] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._classes or name in self._lazy

    def names(self) -> list[str]:
        """Return the registered names, sorted."""
        return sorted({*self._classes, *self._lazy})

    def get(self, name: str) -> type[ParserT]:
        """Return a class, importing a lazy one. Raise KeyError, TypeError or what the import raises."""
        if name in self._classes:
            return self._classes[name]
        if name not in self._lazy:
            raise KeyError(f"no parser {name!r} is registered; registered: {', '.join(self.names()) or 'none'}")
        module, attribute = self._lazy[name]
        self.add(getattr(import_module(module), attribute), name)
        return self._classes[name]

    def add(self, parser: Any, name: str | Sequence[str] | None, *, force: bool = True) -> None:
        """Register a class. Raise TypeError for another object, KeyError for a name in use unless `force`."""
        if not (isinstance(parser, type) and issubclass(parser, self._base)):
            raise TypeError(f"{parser!r} is not a subclass of {self._base.__name__}")
        names = [name] if isinstance(name, str) else list(name or [parser.__name__])
        taken = [name for name in names if name in self and not force]
        if taken:
            raise KeyError(f"a parser {taken[0]!r} is registered already")
        self._classes |= dict.fromkeys(names, parser)

    def add_lazy(self, name: str, module_path: str, class_name: str) -> None:
        """Register a class by the module that defines it, which is imported when the class is used."""
        self._classes.pop(name, None)
        self._lazy[name] = (module_path, class_name)

    def registering(self, name: str | Sequence[str] | None, force: bool, parser: Any) -> Any:
        """Register `parser` and return it; without one, return a decorator that does."""
        if parser is not None:
            self.add(parser, name, force=force)
            return parser

        def register(decorated: type[ParserT]) -> type[ParserT]:
            self.add(decorated, name, force=force)
            return decorated

        return register


class ParserManager:
    """What the managers of parsers have in common: registration under names."""

    parsers: ClassVar[ParserClasses[Any]]

    @classmethod
    def register_module(
        cls, name: str | Sequence[str] | None = None, force: bool = True, module: type[Any] | None = None
    ) -> Any:
        """Register a class under one or more names, by default its own; without `module`, return a decorator."""
        return cls.parsers.registering(name, force, module)

    @classmethod
    def register_lazy_module(cls, name: str, module_path: str, class_name: str) -> None:
        """Register a class that is imported when it is used."""
        cls.parsers.add_lazy(name, module_path, class_name)

    @classmethod
    def list_registered(cls) -> list[str]:
        """Return the registered names."""
        return cls.parsers.names()


class ToolParserManager(ParserManager):
    """The registered tool parsers."""

    parsers: ClassVar[ParserClasses[ToolParser]] = ParserClasses(ToolParser)

    @classmethod
    def get_tool_parser(cls, name: str) -> type[ToolParser]:
        """Return a registered class. Raise KeyError."""
        return cls.parsers.get(name)


class ReasoningParserManager(ParserManager):
    """The registered reasoning parsers."""

    parsers: ClassVar[ParserClasses[ReasoningParser]] = ParserClasses(ReasoningParser)

    @classmethod
    def get_reasoning_parser(cls, name: str) -> type[ReasoningParser]:
        """Return a registered class. Raise KeyError."""
        return cls.parsers.get(name)


# Helpers that plugins use.


def make_tool_call_id(id_type: str = "random", func_name: str | None = None, idx: int | None = None) -> str:
    """Return a tool call id: random, or `functions.NAME:INDEX` for id_type "kimi_k2"."""
    return f"functions.{func_name}:{idx}" if id_type == "kimi_k2" else new_call_id()


def find_common_prefix(s1: str, s2: str) -> str:
    """Return the longest common beginning of two texts."""
    length = next((n for n, (a, b) in enumerate(zip(s1, s2)) if a != b), min(len(s1), len(s2)))
    return s1[:length]


def find_common_suffix(s1: str, s2: str) -> str:
    """Return the longest common end of two texts that has no letter or digit."""
    length = 0
    for a, b in zip(reversed(s1), reversed(s2)):
        if a != b or a.isalnum():
            break
        length += 1
    return s1[len(s1) - length :]


def extract_intermediate_diff(curr: str, old: str) -> str:
    """Return what `curr` has between the beginning and the end that it shares with `old`."""
    suffix = find_common_suffix(curr, old)
    old = old[: len(old) - len(suffix)]
    return curr[len(find_common_prefix(curr, old)) : len(curr) - len(suffix)]


def is_complete_json(input_str: str) -> bool:
    """Return whether a text is valid JSON."""
    try:
        json.loads(input_str)
    except ValueError:
        return False
    return True


def consume_space(i: int, s: str) -> int:
    """Return the index of the first character from `i` that is not white space."""
    return len(s) - len(s[i:].lstrip()) if i < len(s) else i


def partial_json_loads(input_str: str, flags: Any) -> tuple[Any, int]:
    """Parse JSON that may be cut off, by the package partial_json_parser. Return the value and its length.

    Raises ModuleNotFoundError without the package, whose `Allow` the flags are.
    """
    package = import_module("partial_json_parser")
    try:
        return package.loads(input_str, flags), len(input_str)
    except json.JSONDecodeError as error:
        if "Extra data" not in error.msg:
            raise
        return json.JSONDecoder().raw_decode(input_str)
