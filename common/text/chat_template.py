"""Render chat messages to prompt text with the model's jinja template.

The rendered text must be encoded without adding special tokens: the template writes them itself.
"""

from __future__ import annotations

import functools
import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, NoReturn, Protocol

import jinja2
from jinja2 import filters, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pagoda.common.errors import ConfigError, RequestError

if TYPE_CHECKING:
    from pagoda.common.text.tokenizer import Tokenizer

BUILT_IN_TEMPLATES: Final = {"chatml_tools": Path(__file__).parent / "templates" / "chatml_tools.jinja"}
"""Name -> file of a template for models whose own template does not render tools."""

TEXT_PARTS: Final = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Type of a content part -> the key that holds its text."""

MEDIA_PARTS: Final = frozenset(
    (
        *("image", "image_url", "image_embeds", "image_pil", "input_image", "audio", "audio_url", "input_audio"),
        *("video", "video_url", "input_video", "document", "file", "input_file"),
    )
)
"""Types of content parts that hold media."""

TEXT_ONLY: Final = "the model is served text-only, so leave images, audio, video and files out"

MAX_TEMPLATE_KEYWORDS: Final = 64

MAX_TEMPLATE_CHARS: Final = 1 << 18
"""Maximum length of a template; those of models have a few thousand characters."""

_RESERVED_KEYWORDS: Final = frozenset(
    (
        *("messages", "tools", "documents", "chat_template", "template", "tokenize", "add_generation_prompt"),
        *("continue_final_message", "bos_token", "eos_token", "pad_token", "unk_token", "return_dict"),
        *("return_tensors", "content_format", "special_tokens", "raise_exception", "strftime_now"),
    )
)
"""Names that chat_template_kwargs may not set: other request fields, and the template's built-in variables."""

_END_MARK: Final = "[[end of the message to go on with]] "
"""Appended to the final message to find its end in the rendered text; the space shows whether the template trims."""

ContentFormat = Literal["string", "openai"]
"""string: content is text. openai: content is a list of parts such as {"type": "text", "text": "..."}."""


class Renderer(Protocol):
    """`render` of this module, or what calls it in another process."""

    def __call__(
        self,
        template: str,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        special_tokens: Mapping[str, str] | None = None,
        **options: Any,
    ) -> str:
        """Return the prompt text."""
        ...


def render_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    *,
    template: str | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
    renderer: Renderer | None = None,
    **options: Any,
) -> str:
    """Call `render`, or `renderer`, with the model's template (or `template`) and its special tokens.

    Raises RequestError as `render` does, and for a model without a template.
    """
    source = template_of(tokenizer, template, with_tools=bool(tools))
    if source is None:
        raise RequestError(
            "messages", "the model has no chat template; pass one with --chat-template, or use plain completions"
        )
    return (renderer or render)(
        source, messages, tools=tools or None, special_tokens=tokenizer.special_tokens, **options
    )


def read_chat_template(value: str | None) -> str | None:
    """Return a built-in template, the content of a file, or `value` if it is a template. Raise ConfigError."""
    if value is None:
        return None
    try:
        return BUILT_IN_TEMPLATES.get(value, Path(value)).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        if any(mark in value for mark in ("{{", "{%", "{#")):
            return value
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ConfigError(
            "--chat-template",
            f"{value[:200]}: {reason}; give a file, a jinja template, or {' or '.join(BUILT_IN_TEMPLATES)}",
        ) from None


def template_of(tokenizer: Tokenizer, template: str | None, *, with_tools: bool) -> str | None:
    """Return `template`, else the model's template; `with_tools` prefers its "tool_use" template."""
    if template is not None:
        return template
    tool_use = tokenizer.chat_templates.get("tool_use") if with_tools else None
    return tool_use if tool_use is not None else tokenizer.chat_template


def render(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    tools: Sequence[Mapping[str, Any]] | None = None,
    documents: Sequence[Mapping[str, Any]] | None = None,
    special_tokens: Mapping[str, str] | None = None,
    content_format: Literal["auto", "string", "openai"] = "auto",
    must_show_tools: bool = False,
    **kwargs: Any,
) -> str:
    """Return the prompt text of `messages`.

    `add_generation_prompt`: end with the opening of an assistant message. `continue_final_message`: end inside the last
    message, so that generation continues it. `special_tokens`: role -> text, such as "bos_token" -> "<s>".
    `content_format`: pass message contents as text or as a list of parts; auto: detected from the template.
    `must_show_tools`: refuse a template that ignores `tools`. `kwargs`: further template variables.

    Raises RequestError("messages") if the messages are malformed or the template rejects them,
    RequestError("chat_template") if the template is too long or not valid jinja, RequestError("documents") if it
    ignores them. A template can use much time and memory within the limits below, and exceed them by values nested in
    one another: what comes from clients is rendered in a process that can be ended.
    """
    if add_generation_prompt and continue_final_message:
        raise RequestError(
            "continue_final_message", "continue_final_message and add_generation_prompt exclude each other; set one"
        )
    compiled = _compiled(template)
    _check_shown(template, tools if must_show_tools else None, documents)
    as_parts = (content_format_of(template) if content_format == "auto" else content_format) == "openai"
    try:
        plain = [_message(f"messages[{i}]", message, as_parts) for i, message in enumerate(_nonempty(messages))]
        variables = plain_json("chat_template_kwargs", {**kwargs, "tools": tools, "documents": documents})
    except RecursionError:
        raise RequestError("messages", "the messages are nested too deeply") from None
    plain = _map_developer_role(template, plain)
    if _has_late_system(plain) and not _shows_late_system(template, as_parts):
        plain = _with_system_first(plain)
    if continue_final_message:
        plain[-1] = {**plain[-1], "content": _with_end_mark(plain[-1]["content"])}
    scope = {"messages": plain, "add_generation_prompt": add_generation_prompt}
    text = _render(compiled, {**(special_tokens or {}), **variables, **scope})
    return _cut_at_mark(text) if continue_final_message else text


def _check_shown(template: str, tools: object, documents: object) -> None:
    """Raise RequestError if the template ignores the tools or documents, if there are any."""
    if tools and "tools" not in variables_of(template):
        raise RequestError(
            "tools",
            "the model's chat template does not show it any tools; serve it with a --chat-template that does "
            "(chatml_tools for ChatML models)",
        )
    if documents and "documents" not in variables_of(template):
        raise RequestError(
            "documents", "the model's chat template does not show it any documents; put their text into a message"
        )


@lru_cache(maxsize=32)
def _compiled(template: str) -> jinja2.Template:
    if len(template) > MAX_TEMPLATE_CHARS:
        raise RequestError(
            "chat_template", f"the chat template has more than {MAX_TEMPLATE_CHARS} characters; shorten it"
        )
    try:
        return compile_template(template)
    except (jinja2.TemplateError, RecursionError) as error:
        raise RequestError("chat_template", f"the chat template is not valid jinja: {_shortened(error)}") from None


def _render(template: jinja2.Template, variables: Mapping[str, Any]) -> str:
    try:
        return template.render(variables)
    except MemoryError:
        raise
    except Exception as error:  # a template can raise anything; the engine must serve the next request
        raise RequestError("messages", f"the chat template refused the messages: {_shortened(error)}") from None


def _shortened(error: Exception) -> str:
    text = str(error) or type(error).__name__
    return text if len(text) <= 400 else text[:397] + "..."


def _with_end_mark(content: str | list[dict[str, str]]) -> str | list[dict[str, str]]:
    if isinstance(content, str):
        return content + _END_MARK
    return [*content[:-1], {"type": "text", "text": (content[-1]["text"] if content else "") + _END_MARK}]


def _cut_at_mark(text: str) -> str:
    """Text up to the end mark, right-stripped if the template stripped the mark's space."""
    end = text.rfind(_END_MARK.rstrip())
    if end < 0:
        raise RequestError("messages", "the chat template does not show the final message, so it cannot be continued")
    return text[:end] if text.startswith(_END_MARK, end) else text[:end].rstrip()


# Template variables.


def template_kwargs_error(kwargs: Mapping[str, Any]) -> str:
    """Return why these chat_template_kwargs are invalid; empty if they are valid."""
    if len(kwargs) > MAX_TEMPLATE_KEYWORDS:
        return f"may have at most {MAX_TEMPLATE_KEYWORDS} entries"
    reserved = next((name for name in kwargs if name in _RESERVED_KEYWORDS), None)
    return "" if reserved is None else f"may not set {reserved!r}"


@lru_cache(maxsize=32)
def variables_of(template: str) -> frozenset[str]:
    """Return the names a template reads; empty for invalid jinja."""
    if len(template) > MAX_TEMPLATE_CHARS:
        return frozenset()
    try:
        tree = parse_template(template)
    except (jinja2.TemplateError, RecursionError):
        return frozenset()
    return frozenset(name.name for name in tree.find_all(nodes.Name) if name.ctx == "load")


# Detection of the content format, from the template's syntax tree.

_LIST_FILTERS: Final = frozenset({"list", "selectattr", "rejectattr", "select", "reject", "default", "d"})


@lru_cache(maxsize=32)
def content_format_of(template: str) -> ContentFormat:
    """Return "openai" if the template loops over a message's content, else "string".

    The loop may run over `x.content` or `x["content"]`, an alias or slice of it, a list filter of it, or a macro's
    parameter. Raises jinja2.TemplateSyntaxError.
    """
    tree = parse_template(template)
    aliases = _content_aliases(tree)
    loops = tree.find_all(nodes.For)
    return "openai" if any(_is_content(loop.iter, aliases) for loop in loops) else "string"


def _content_aliases(tree: nodes.Template) -> frozenset[str]:
    """Variables and macro parameters assigned from a content, to a fixed point. Ignores scopes."""
    aliases: frozenset[str] = frozenset()
    while True:
        grown = set(aliases)
        for assign in tree.find_all(nodes.Assign):
            if isinstance(assign.target, nodes.Name) and _is_content(assign.node, aliases):
                grown.add(assign.target.name)
        macros = {macro.name: macro for macro in tree.find_all(nodes.Macro)}
        for call in tree.find_all(nodes.Call):
            if isinstance(call.node, nodes.Name) and call.node.name in macros:
                parameters = macros[call.node.name].args
                grown.update(p.name for p, value in zip(parameters, call.args) if _is_content(value, aliases))
        if grown == aliases:
            return aliases
        aliases = frozenset(grown)


def _is_content(node: nodes.Node, aliases: frozenset[str]) -> bool:
    if isinstance(node, nodes.Name):
        return node.name in aliases
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice):
        return _is_content(node.node, aliases)
    if isinstance(node, nodes.Getitem):
        return isinstance(node.arg, nodes.Const) and node.arg.value == "content"
    if isinstance(node, nodes.Filter) and node.node is not None and node.name in _LIST_FILTERS:
        return _is_content(node.node, aliases)
    return False


# Messages as templates expect them.

_DEVELOPER: Final = "developer"


def _map_developer_role(template: str, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Map "developer" messages to "system" if `template` does not mention that role.

    All system messages are then merged into one at the front: many templates reject them elsewhere.
    """
    has_developer = any(message["role"] == _DEVELOPER for message in messages)
    if not has_developer or f"'{_DEVELOPER}'" in template or f'"{_DEVELOPER}"' in template:
        return list(messages)
    return _with_system_first(messages)


def _with_system_first(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Merge all system and developer messages into one system message at the front."""
    system = [message for message in messages if message["role"] in (_DEVELOPER, "system")]
    others = [message for message in messages if message["role"] not in (_DEVELOPER, "system")]
    return [{**system[0], "role": "system", "content": _joined([message["content"] for message in system])}, *others]


def _has_late_system(messages: Sequence[dict[str, Any]]) -> bool:
    """Return whether a system message is not the first message. Agents send reminders in such messages."""
    return any(message["role"] == "system" for message in messages[1:])


@lru_cache(maxsize=32)
def _shows_late_system(template: str, as_parts: bool) -> bool:
    """Return whether the template accepts and shows a system message after others."""
    contents = {"system": "a", "user": "b", "assistant": "c"}
    messages = [(role, contents[role]) for role in ("system", "user", "assistant", "user")]
    messages.append(("system", _END_MARK.strip()))
    plain = [
        {"role": role, "content": [{"type": "text", "text": text}] if as_parts else text} for role, text in messages
    ]
    try:
        text = _compiled(template).render({"messages": plain, "add_generation_prompt": True})
    except Exception:  # a template can raise anything
        return False
    return _END_MARK.strip() in text


def _joined(contents: Sequence[str | list[dict[str, str]]]) -> str | list[dict[str, str]]:
    """Merge contents: texts joined by a blank line, or lists of parts concatenated."""
    texts = [content for content in contents if isinstance(content, str)]
    if len(texts) == len(contents):
        return "\n\n".join(text for text in texts if text)
    return [part for content in contents for part in content if isinstance(part, dict)]


def _nonempty(messages: object) -> Sequence[object]:
    if not isinstance(messages, list | tuple) or not messages:
        raise RequestError("messages", "messages must be a non-empty list of messages")
    return messages


def _message(path: str, message: object, as_parts: bool) -> dict[str, Any]:
    """Normalise a message: plain JSON values, content as text or parts, tool-call arguments as objects."""
    if not isinstance(message, Mapping):
        raise RequestError("messages", f"{path} must be an object with role and content")
    if not isinstance(message.get("role"), str):
        raise RequestError("messages", f"{path}.role must be a string")
    plain = _without_empty(plain_json(path, message))
    texts = _texts(f"{path}.content", plain.get("content"))
    plain["content"] = [{"type": "text", "text": text} for text in texts] if as_parts else "\n".join(texts)
    if "tool_calls" in plain:
        plain["tool_calls"] = [_tool_call(f"{path}.tool_calls", call) for call in _calls(path, plain["tool_calls"])]
    return plain


def _without_empty(message: dict[str, Any]) -> dict[str, Any]:
    """Drop nulls and an empty `tool_calls`, as clients send them back: templates test whether a key is defined."""
    return {
        key: value for key, value in message.items() if value is not None and not (key == "tool_calls" and value == [])
    }


def _texts(path: str, content: object) -> list[str]:
    if content is None:
        return []
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list):
        raise RequestError("messages", f"{path} must be a string or a list of parts")
    return [_part(f"{path}[{i}]", part) for i, part in enumerate(content)]


def _part(path: str, part: object) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(part, dict) or not isinstance(kind, str):
        raise RequestError("messages", f"{path} must be a string or an object with a type")
    if kind not in TEXT_PARTS:
        reason = TEXT_ONLY if kind in MEDIA_PARTS else "only text parts are supported"
        raise RequestError("messages", f"{path} has type {kind[:40]!r}; {reason}")
    text = part.get(TEXT_PARTS[kind])
    if not isinstance(text, str):
        raise RequestError("messages", f"{path}.{TEXT_PARTS[kind]} must be a string")
    return text


def _calls(path: str, calls: object) -> list[Any]:
    if not isinstance(calls, list):
        raise RequestError("messages", f"{path}.tool_calls must be a list of calls")
    return calls


def _tool_call(path: str, call: object) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict):
        raise RequestError("messages", f"{path} must contain objects with a function")
    return {**call, "function": {**function, "arguments": _arguments(function.get("arguments"))}}


def _arguments(arguments: object) -> dict[str, Any]:
    """Arguments as an object; {} if invalid, as rejecting what the model generated would end the conversation."""
    try:
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        return {}
    return arguments if isinstance(arguments, dict) else {}


def plain_json(path: str, value: object) -> Any:
    """Copy into plain JSON types: nothing else may reach a template, not even a subclass of str."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int | float):
        return int(value) if isinstance(value, int) else float(value)
    if isinstance(value, Mapping):
        return {str(key): plain_json(f"{path}.{key}", item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain_json(f"{path}[{i}]", item) for i, item in enumerate(value)]
    field = path.partition("[")[0].partition(".")[0]
    raise RequestError(field, f"{path} contains a {type(value).__name__}, which is not a JSON value")


# The sandbox: a template is untrusted code. Jinja's immutable sandbox isolates it from the interpreter; the limits here
# bound steps (loop iterations and calls) and seconds per rendering, and characters per value.

MAX_STEPS: Final = 1_000_000
CALL_STEPS: Final = 4
"""Cost of a call, in loop iterations."""
MAX_SECONDS: Final = 10.0
MAX_CHARS: Final = 1 << 24
"""Maximum length of any value, including the output."""
MAX_INT_BITS: Final = 4096

_WIDE_FORMAT: Final = re.compile(r"\d{5}|\*|\{[^{}]*\{")
"""Format strings with a width above 9999, or with a width taken from an argument."""


class TemplateLimitError(jinja2.TemplateError):
    """A template exceeded a limit."""


def parse_template(source: str) -> nodes.Template:
    """Return a template's syntax tree. Raises jinja2.TemplateSyntaxError."""
    return _ENVIRONMENT.parse(source)


def compile_template(source: str) -> jinja2.Template:
    """Return a template ready to render, instrumented with the limits. Raises jinja2.TemplateSyntaxError."""
    tree = parse_template(source)
    for loop in tree.find_all(nodes.For):
        loop.iter = _filtered(loop.iter, _count_iterations.__name__)
    for joined in list(tree.find_all(nodes.Concat)):
        joined.nodes = [_filtered(nodes.Concat(joined.nodes, lineno=joined.lineno), _check_length.__name__)]
    return _ENVIRONMENT.from_string(tree)


def _filtered(node: nodes.Node, name: str) -> nodes.Filter:
    assert isinstance(node, nodes.Expr)
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


class _Budget:
    """Remaining steps and time of one rendering."""

    __slots__ = ("_deadline", "_steps")

    def __init__(self) -> None:
        self._steps = MAX_STEPS
        self._deadline = time.monotonic() + MAX_SECONDS

    def spend(self, steps: int) -> None:
        self._steps -= steps
        if self._steps < 0 or time.monotonic() > self._deadline:
            raise TemplateLimitError(f"the chat template runs too long (more than {MAX_STEPS} steps)")


class _BudgetContext(Context):
    """A rendering's variables and its budget, which nested scopes share."""

    budget: _Budget

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.budget = _Budget()

    def derived(self, locals: dict[str, Any] | None = None) -> Context:
        inner = super().derived(locals)
        assert isinstance(inner, _BudgetContext)
        inner.budget = self.budget
        return inner


class _LimitedSandbox(ImmutableSandboxedEnvironment):
    context_class = _BudgetContext
    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        _check_operands(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805 - jinja's names
        assert isinstance(__context, _BudgetContext)
        __context.budget.spend(CALL_STEPS)
        text = getattr(__obj, "__self__", None)
        if isinstance(text, str):
            args = _check_method(text, __obj.__name__, args, kwargs)
        return super().call(__context, __obj, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is not None:
            _check_format(value.__self__)
        return wrapped

    @staticmethod
    def concat(pieces: Iterable[str]) -> str:
        """Join the output of a template, macro or block."""
        output: list[str] = []
        length = 0
        for piece in pieces:
            output.append(piece)
            length += len(piece)
            if length > MAX_CHARS:
                _too_long()
        return "".join(output)


class _GenerationBlock(Extension):
    """`{% generation %}` marks assistant text for training; here it has no effect."""

    tags = {"generation"}  # noqa: RUF012 - jinja declares it per instance

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _too_long() -> NoReturn:
    raise TemplateLimitError(f"the chat template builds a text of more than {MAX_CHARS} characters")


def _check_size(size: int) -> None:
    if size > MAX_CHARS:
        _too_long()


def _check_operands(operator: str, left: Any, right: Any) -> None:
    """Reject an operation with an oversized result before it is computed."""
    if operator == "%" and isinstance(left, str):
        _check_format(left)
    elif operator == "+" and hasattr(left, "__len__") and hasattr(right, "__len__"):
        _check_size(len(left) + len(right))
    elif isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() * max(right, 0) if operator == "**" else left.bit_length() + right.bit_length()
        if operator in ("*", "**") and bits > MAX_INT_BITS:
            raise TemplateLimitError("the chat template computes too large a number")
    elif operator == "*":
        for text, times in ((left, right), (right, left)):
            if hasattr(text, "__len__") and isinstance(times, int):
                _check_size(len(text) * max(times, 0))


def _check_format(text: str) -> None:
    if _WIDE_FORMAT.search(text):
        raise TemplateLimitError("the chat template formats with too large or a computed width")


def _check_method(text: str, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """Reject a string method call with an oversized result. Return its arguments, with iterators turned into lists."""
    if name == "translate":
        raise TemplateLimitError("chat templates may not use str.translate")
    if name == "join" and args:
        args = (list(args[0]),)
        _check_size(_joined_length(text, args[0]))
    elif name == "replace" and len(args) > 1:
        _check_size(_replaced_length(text, args[0], args[1]))
    elif name in ("center", "ljust", "rjust", "zfill", "expandtabs"):
        for width in (*args, *kwargs.values()):
            if isinstance(width, int):
                _check_size(width * (1 + text.count("\t") if name == "expandtabs" else 1))
    return args


def _joined_length(separator: str, items: list[Any]) -> int:
    return len(separator) * len(items) + sum(len(item) for item in items if hasattr(item, "__len__"))


def _replaced_length(text: str, old: Any, new: Any) -> int:
    return len(text) + text.count(str(old)) * len(str(new))


@jinja2.pass_context
def _count_iterations(context: Context, items: Any) -> Any:
    """Charge a loop's iterations: at once if their number is known, else one by one."""
    assert isinstance(context, _BudgetContext)
    if not hasattr(items, "__len__"):
        return _counted(context.budget, items)
    context.budget.spend(len(items))
    return items


def _counted(budget: _Budget, items: Iterable[Any]) -> Iterator[Any]:
    for item in items:
        budget.spend(1)
        yield item


def _check_length(text: str) -> str:
    _check_size(len(text))
    return text


@functools.wraps(filters.do_replace)
def _replace(eval_ctx: Any, s: Any, old: Any, new: Any, count: int | None = None) -> str:
    _check_size(_replaced_length(str(s), old, new))
    return filters.do_replace(eval_ctx, s, old, new, count)


@functools.wraps(filters.sync_do_join)
def _join(eval_ctx: Any, value: Iterable[Any], d: str = "", attribute: str | int | None = None) -> str:
    items = list(value)
    _check_size(_joined_length(str(d), items))
    return filters.sync_do_join(eval_ctx, items, d, attribute)


def _indent(s: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    _check_size(len(s) + (1 + s.count("\n")) * (width if isinstance(width, int) else len(width)))
    return filters.do_indent(s, width, first, blank)


def _center(value: str, width: int = 80) -> str:
    _check_size(width)
    return filters.do_center(value, width)


def _format(value: str, *args: Any, **kwargs: Any) -> str:
    _check_format(value)
    return filters.do_format(value, *args, **kwargs)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without HTML or ASCII escapes, as models were trained on."""
    if indent is not None and indent > 100:
        raise TemplateLimitError("the chat template indents JSON by more than 100")
    encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    if indent is None:
        return _check_length(encoder.encode(value))
    return _LimitedSandbox.concat(encoder.iterencode(value))  # indentation multiplies the length of nested values


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    _check_size(len(format) * 100)
    return datetime.now().strftime(format)


def _environment() -> _LimitedSandbox:
    environment = _LimitedSandbox(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationBlock])
    for function in (_count_iterations, _check_length):
        environment.filters[function.__name__] = function
    environment.filters.update(
        replace=_replace, join=_join, indent=_indent, center=_center, format=_format, tojson=_tojson
    )
    for name in ("urlize", "xmlattr", "batch", "slice", "wordwrap", "random"):
        del environment.filters[name]
    del environment.globals["lipsum"]
    environment.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
    return environment


_ENVIRONMENT: Final = _environment()
