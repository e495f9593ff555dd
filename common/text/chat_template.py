"""Render chat messages to prompt text with the model's jinja template, which runs in `template_sandbox`.

The rendered text must be encoded without adding special tokens: the template writes them itself. Special tokens that
stand in a message are text: `render_literal` returns where they are.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol

import jinja2
from jinja2 import nodes

from pagoda.common.errors import ConfigError, RequestError
from pagoda.common.text.literal_stretches import Span
from pagoda.common.text.template_sandbox import compile_template, parse_template

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


def built_in_template(name: str) -> str:
    """Return one of BUILT_IN_TEMPLATES."""
    return BUILT_IN_TEMPLATES[name].read_text(encoding="utf-8")


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
    `content_format`: pass message contents as text or as a list of parts; auto: detected from the template, for answers
    and results of tools by role.
    `must_show_tools`: refuse a template that ignores `tools`. `kwargs`: further template variables.

    Raises RequestError with the path of a malformed message, RequestError("messages") if the template rejects them,
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
    texts = _roles_with_text(template) if as_parts and content_format == "auto" else frozenset()
    try:
        plain = [_message(f"messages[{i}]", message, as_parts, texts) for i, message in enumerate(_nonempty(messages))]
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
    except Exception as error:  # A template can raise anything; the engine must serve the next request.
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
    parameter, unless it reads its items as tool calls. Raises jinja2.TemplateSyntaxError.
    """
    tree = parse_template(template)
    aliases = _content_aliases(tree)
    loops = [loop for loop in tree.find_all(nodes.For) if _is_content(loop.iter, aliases)]
    return "openai" if any(not _reads_calls(loop) for loop in loops) else "string"


def _reads_calls(loop: nodes.For) -> bool:
    """Return whether a loop reads `function` of its items: some templates keep tool calls in the content."""
    read = {node.attr for node in loop.find_all(nodes.Getattr)}
    read |= {node.arg.value for node in loop.find_all(nodes.Getitem) if isinstance(node.arg, nodes.Const)}
    return "function" in read and "type" not in read


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


@lru_cache(maxsize=32)
def _roles_with_text(template: str) -> frozenset[str]:
    """Return which of the roles "assistant" and "tool" the template shows contents of that are text.

    Some templates loop over the parts of a user's content, and write others as they are.
    """
    mark = _END_MARK.strip()
    arguments = {"name": "a", "arguments": {}}
    call = {"id": "call12345", "type": "function", "function": arguments}  # Some templates want nine characters.
    question = {"role": "user", "content": [{"type": "text", "text": "q"}]}
    result = {"role": "tool", "tool_call_id": call["id"], "name": "a", "content": mark}
    conversations: dict[str, list[dict[str, Any]]] = {
        "assistant": [question, {"role": "assistant", "content": mark}],
        "tool": [question, {"role": "assistant", "content": "", "tool_calls": [call]}, result],
    }
    return frozenset(role for role, messages in conversations.items() if mark in _try_render(template, messages))


_SPECIAL_TOKENS: Final = ("bos_token", "eos_token", "unk_token", "pad_token")


def _try_render(template: str, messages: Sequence[Mapping[str, Any]]) -> str:
    """Return the text of messages, "" if the template fails."""
    try:
        scope = {**dict.fromkeys(_SPECIAL_TOKENS, ""), "messages": messages, "add_generation_prompt": True}
        return _compiled(template).render(scope)
    except Exception:  # A template can raise anything.
        return ""


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
    return _END_MARK.strip() in _try_render(template, plain)


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


def _message(path: str, message: object, as_parts: bool, texts: frozenset[str]) -> dict[str, Any]:
    """Normalise a message: plain JSON values, content as text or parts, tool-call arguments as objects.

    `texts`: roles whose contents stay text.
    """
    if not isinstance(message, Mapping):
        raise RequestError(path, f"{path} must be an object with role and content")
    if not isinstance(message.get("role"), str):
        raise RequestError(f"{path}.role", f"{path}.role must be a string")
    plain = _without_empty(plain_json(path, message))
    content = _texts(f"{path}.content", plain.get("content"))
    in_parts = as_parts and plain["role"] not in texts
    plain["content"] = [{"type": "text", "text": text} for text in content] if in_parts else "\n".join(content)
    if "tool_calls" in plain:
        calls = _calls(path, plain["tool_calls"])
        plain["tool_calls"] = [_tool_call(f"{path}.tool_calls[{i}]", call) for i, call in enumerate(calls)]
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
        raise RequestError(path, f"{path} must be a string or a list of parts")
    return [_part(f"{path}[{i}]", part) for i, part in enumerate(content)]


def _part(path: str, part: object) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(part, dict) or not isinstance(kind, str):
        raise RequestError(path, f"{path} must be a string or an object with a type")
    if kind not in TEXT_PARTS:
        reason = TEXT_ONLY if kind in MEDIA_PARTS else "only text parts are supported"
        raise RequestError(f"{path}.type", f"{path}.type is {kind[:40]!r}; {reason}")
    text = part.get(TEXT_PARTS[kind])
    if not isinstance(text, str):
        field = f"{path}.{TEXT_PARTS[kind]}"
        raise RequestError(field, f"{field} must be a string")
    return text


def _calls(path: str, calls: object) -> list[Any]:
    if not isinstance(calls, list):
        raise RequestError(f"{path}.tool_calls", f"{path}.tool_calls must be a list of calls")
    return calls


def _tool_call(path: str, call: object) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict):
        raise RequestError(f"{path}.function", f"{path} must be an object with a function")
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
    raise RequestError(path, f"{path} is a {type(value).__name__}, which is not a JSON value")


# The text of special tokens in chat messages stays text.
#
# A template puts messages and its own special tokens into one text, which is then tokenised. Where a message that the
# application did not write contains the text of a special token, the conversation is rendered again with a marker in
# its place: the special tokens in this rendering are the template's, and its markers are those of the messages. Both
# renderings have the same sequence of them, which tells the one from the other in the prompt's text.

TRUSTED_ROLES: Final = frozenset({"system", "developer", "assistant"})
"""Roles whose messages the application or the model wrote: special tokens in them are parsed."""

_NONCE_CHARS: Final = 4
_PRIVATE: Final = (0xF0000, 0xFFFE)  # First code point and number of code points of a plane for private use.
_KINDS: Final = (0x100000, 0xFFFE)  # The same of another plane, which says which special token a marker is.

Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """A prompt's text and where special tokens in it are text of messages, in order."""

    text: str
    literal: tuple[Span, ...] = ()
    generation_prompt: str = ""  # the end of the text that opens the answer; "" if that was not determined


def render_literal(
    tokenizer: Tokenizer,
    messages: Messages,
    documents: Messages | None,
    render: Callable[[Messages, Messages | None], str],
) -> RenderedChat:
    """Return what `render` makes of messages and documents, and which special tokens in it stay text.

    These are the ones in documents and in messages of all roles but TRUSTED_ROLES. Raises RequestError as `render`
    does, and if a template changes a message such that its special tokens cannot be told from the template's.
    """
    text = render(messages, documents)
    pattern = tokenizer.special_pattern
    try:
        if pattern is None or not any(pattern.search(text) for text in _untrusted_texts(messages, documents)):
            return RenderedChat(text)
        return RenderedChat(text, _literal_spans(pattern, text, messages, documents, render))
    except RecursionError:
        raise RequestError("messages", "the messages are nested too deeply") from None


def _literal_spans(
    pattern: re.Pattern[str],
    text: str,
    messages: Messages,
    documents: Messages | None,
    render: Callable[[Messages, Messages | None], str],
) -> tuple[Span, ...]:
    """Return where special tokens in the rendered `text` are text of messages. Raises RequestError."""
    markers = _Markers(pattern, text)
    read: list[list[_Found]] = []
    for joins in (True, False):
        shown = [markers.in_message(message, joins) for message in messages]
        shown_markers = markers.found(render(shown, markers.in_value(documents)))
        if shown_markers not in read:
            read.append(shown_markers)
    plain = [_Found(match[0], False) for match in pattern.finditer(text)]
    # These are the template's own: in this rendering no message has any.
    template_tokens = [token for token in read[0] if not token.is_literal]
    for shown_markers in (*read, plain):
        same = [token.text for token in shown_markers] == [token.text for token in plain]
        if same and [token for token in shown_markers if not token.is_literal] == template_tokens:
            spans = (match.span() for match in pattern.finditer(text))
            return tuple(span for span, token in zip(spans, shown_markers) if token.is_literal)
    raise RequestError(
        "messages",
        f"the chat template changes a message that contains the special token {markers.example!r}, so that it cannot "
        "be told from the template's; remove it from the message",
    )


@dataclass(frozen=True, slots=True)
class _Found:
    """A special token in a rendering."""

    text: str
    is_literal: bool


class _Markers:
    """Puts markers for special tokens into messages and finds them in renderings."""

    def __init__(self, pattern: re.Pattern[str], text: str) -> None:
        """`text`: the rendered conversation, which has no marker in it."""
        self._pattern = pattern
        self._kinds: dict[str, str] = {}  # Text of a special token -> marker.
        first, count = _PRIVATE
        while (nonce := "".join(chr(first + secrets.randbelow(count)) for _ in range(_NONCE_CHARS))) in text:
            pass
        self._nonce = nonce
        self._marker = re.compile(f"{nonce}[{chr(_KINDS[0])}-{chr(_KINDS[0] + _KINDS[1] - 1)}]")

    @property
    def example(self) -> str:
        """The first special token that a marker stands for."""
        return next(iter(self._kinds), "")

    def in_message(self, message: Mapping[str, Any], joins: bool) -> Mapping[str, Any]:
        """Return a message with markers. `joins`: also for what is split over its parts, as templates may join them."""
        if not _is_untrusted(message):
            return message
        marked = {key: self.in_value(value) for key, value in message.items()}
        content = message.get("content")
        if joins and isinstance(content, list | tuple) and _indexed_texts(content):
            marked["content"] = self._in_parts(content)
        return marked

    def in_value(self, value: Any) -> Any:
        """Return a JSON value with markers in its texts."""
        if isinstance(value, str):
            return self._pattern.sub(lambda match: self._marker_of(match[0]), value)
        if isinstance(value, Mapping):
            return {self.in_value(key): self.in_value(item) for key, item in value.items()}
        return [self.in_value(item) for item in value] if isinstance(value, list | tuple) else value

    def found(self, rendered: str) -> list[_Found]:
        """Return the special tokens of a rendering and its markers, in order."""
        names = {marker: text for text, marker in self._kinds.items()}
        matches = []
        start = 0
        for marker in self._marker.finditer(rendered):
            between = rendered[start : marker.start()]
            matches += [_Found(match[0], False) for match in self._pattern.finditer(between)]
            matches.append(_Found(names.get(marker[0], ""), True))
            start = marker.end()
        return matches + [_Found(match[0], False) for match in self._pattern.finditer(rendered[start:])]

    def _in_parts(self, parts: Sequence[Any]) -> list[Any]:
        """Return parts with markers, where a special token that is split over parts is one in the first of them."""
        texts = _indexed_texts(parts)
        joined = "".join(text for _, text in texts)
        spans = [match.span() for match in self._pattern.finditer(joined)]
        marked = list(parts)
        position = 0
        next_span = 0
        for index, text in texts:
            end = position + len(text)
            pieces = []
            start = position
            while next_span < len(spans) and spans[next_span][0] < end:
                first, last = spans[next_span]
                pieces.append(joined[start : max(start, first)])
                if first >= position:
                    pieces.append(self._marker_of(joined[first:last]))
                start = min(last, end)
                if last > end:
                    break  # The text goes on in the next part.
                next_span += 1
            marked[index] = _with_text(self.in_value(parts[index]), "".join(pieces) + joined[start:end])
            position = end
        return marked

    def _marker_of(self, text: str) -> str:
        first, count = _KINDS
        if text not in self._kinds:
            self._kinds[text] = self._nonce + chr(first + len(self._kinds) % count)
        return self._kinds[text]


def _untrusted_texts(messages: Messages, documents: Messages | None) -> Iterable[str]:
    for message in messages:
        if _is_untrusted(message):
            yield from _all_texts(message)
            content = message.get("content")
            if isinstance(content, list | tuple) and len(content) > 1:
                yield "".join(text for _, text in _indexed_texts(content))
    yield from _all_texts(documents)


def _all_texts(value: Any) -> Iterable[str]:
    """Return all texts in a JSON value, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _all_texts(key)
            yield from _all_texts(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _all_texts(item)


def _is_untrusted(message: Mapping[str, Any]) -> bool:
    return isinstance(message, Mapping) and message.get("role") not in TRUSTED_ROLES


def _indexed_texts(parts: Sequence[Any]) -> list[tuple[int, str]]:
    """Return index and text of the parts that are texts."""
    texts = [(index, _text_of(part)) for index, part in enumerate(parts)]
    return [(index, text) for index, text in texts if text is not None]


def _text_of(part: Any) -> str | None:
    if isinstance(part, Mapping):
        kind = part.get("type")
        part = part.get(TEXT_PARTS[kind]) if isinstance(kind, str) and kind in TEXT_PARTS else None
    return part if isinstance(part, str) else None


def _with_text(part: Any, text: str) -> Any:
    return {**part, TEXT_PARTS[part["type"]]: text} if isinstance(part, Mapping) else text
